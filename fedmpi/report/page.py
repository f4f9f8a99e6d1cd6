"""The page of a report: one HTML file that holds its data, its figures and Vega-Lite, and asks nobody for anything.

Figures are specifications in Vega-Lite over two sets of data, the configurations and the runs; tables are pandas'.
"""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import names_a_file, remedy, write_whole
from fedmpi.records.history import SCORES, json_value
from fedmpi.report import curves as drawing
from fedmpi.report.curves import TITLES, Configuration, completed, configurations, curves, rounded, targets
from fedmpi.results.comparison import AXES, Spread, spent
from fedmpi.results.loading import OneRun, differing, find_runs, read_runs, table_value

VEGA_LITE = "6.4"
OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#B8A800"]
"""Colours that all eyes can distinguish."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
SHORT = {
    "round": "rounds",
    "samples": "samples",
    "megabytes": "MB",
    "seconds": "seconds",
    "virtual_seconds": "virtual s",
}
LINKS = {
    "client_up": "from clients",
    "client_down": "to clients",
    "mediator_up": "from mediators",
    "mediator_down": "to mediators",
}
CLIENT_SCORES = {
    "accuracy": "accuracy",
    "tuned_accuracy": "accuracy, fine-tuned",
    "loss": "loss",
    "tuned_loss": "loss, fine-tuned",
}
FIRST = ("test_accuracy", "val_accuracy", "test_macro_f1", "val_macro_f1", "test_loss", "val_loss", "train_loss")
"""Numbers that are offered first."""
Spec = dict[str, Any]


def write_report(paths: Sequence[Path], out: Path, title: str = "") -> int:
    """Write the page of the runs that are named, or lie below folders that are."""
    if not names_a_file(out):
        raise UserError(f"the page cannot be written to {out}: name a file in a folder that is there, as report.html")
    runs = read_runs(find_runs(paths))
    recorded = [run for run in runs if run.records]
    if not recorded:
        raise UserError(f"nothing to report: {runs[0].folder} and the others have no record of a round yet")
    shown_runs = page_contents(recorded, title)
    shown_runs["notes"] += _without_records([run for run in runs if not run.records])
    page = render_page(shown_runs, drawing_library()).encode(errors="replace")  # names may be no UTF-8
    try:
        write_whole(out, page)
    except OSError as error:
        raise UserError(f"the page cannot be written to {out} ({error.strerror}): {remedy(error)}") from None
    return len(page)


def drawing_library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which sets `vegaEmbed`."""
    try:
        converter = importlib.import_module("vl_convert")
    except ImportError:
        raise UserError("a report needs vl-convert-python: pip install 'fedmpi[report]'") from None
    return str(converter.javascript_bundle(vl_version=VEGA_LITE))


def render_page(shown: dict[str, Any], library: str) -> str:
    """The page of some contents."""
    sections = [(title, parts) for title, parts in _sections(shown).items() if parts]
    figures = {name: spec for _, parts in sections for name, _, _, spec in parts if isinstance(spec, dict)}
    runs = [run | {"label": shown["configurations"][run["configuration"]]["label"]} for run in shown["runs"]]
    datasets = {"configurations": shown["configurations"], "runs": runs}
    data = {"common": _common_spec(shown), "figures": figures, "datasets": datasets}
    seeds, rounds = len(shown["runs"]), max(one["rounds"] for one in shown["configurations"])
    bands = "; bands and ± are standard deviations over seeds" if _several_seeds(shown) else ""
    parts = {
        "title": html.escape(shown["title"]),
        "about": f"{seeds} run(s), {len(shown['configurations'])} configuration(s), {rounds:,} rounds{bands}",
        "version": shown["version"],
        "contents": "".join(f'<a href="#{_anchor(title)}">{html.escape(title)}</a>' for title, _ in sections),
        "sections": "".join(
            f'<section id="{_anchor(title)}"><h2>{html.escape(title)}</h2><div class="grid">'
            f"{''.join(map(_part, parts))}</div></section>"
            for title, parts in sections
        ),
        "data": json.dumps(json_value(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
            "<", "\\u003c"
        ),
        "library": library.replace("</script", "<\\/script"),
    }
    page = resources.files("fedmpi.report").joinpath("page.html").read_text(encoding="utf-8")
    pieces = page.split("@@")  # text, name, text, name, …: what is put in is not searched again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


Component = tuple[str, str, str, Spec | str]
"""Name, title, note, and the specification of a figure or the HTML of a table."""


def _anchor(title: str) -> str:
    return "s-" + title.lower().replace(" ", "-")


def _part(part: Component) -> str:
    name, title, note, content = part
    head = f"<h3>{html.escape(title)}</h3>" * bool(title) + f'<p class="note">{html.escape(note)}</p>' * bool(note)
    if isinstance(content, str):
        return f'<div class="card wide" id="{name}">{head}{content}</div>'
    wide = ' class="wide"' if content.pop("wide", False) else ""
    return f'<figure id="{name}"{wide}>{head}<div class="chart"></div></figure>'


def _sections(shown: dict[str, Any]) -> dict[str, list[Component]]:
    """What the page shows, by the titles of its sections."""
    known, view = shown["metrics"], _has(shown, "view")
    keys = [key for key in FIRST if key in known] + [key for key in known if key not in FIRST]
    evenness = ("client_use_gini", "client_use_effective", "clients_used", "sample_use_gini", "sample_use_effective")
    of_clients = [key for key in known if key.startswith(("client_accuracy", "client_loss", "client_tuned"))]
    sizes = ("size_estimate", "size_true", "sampling_probability", "clipped_fraction", "size_asked")
    epsilons = ("update_epsilon", "size_epsilon_max", "size_epsilon_mean")
    times = ("seconds", "virtual_seconds", "rank_balance", *(f"bytes_{link}" for link in LINKS))
    unrecorded = "Who took part was not recorded: run with --set logging.participants=true."
    return {
        "Results": [_results(shown), *(("note", "", f"Mind: {note}.", "") for note in shown["notes"])],
        "Curves": [
            *_lines(shown, "curve", "Over the run", keys, wide=True),
            *_lines(shown, "loss", "Losses", ("test_loss", "val_loss", "train_loss")),
            *_lines(shown, "training", "Training", ("samples", "steps", "participants", "lr")),
        ],
        "What differs": _settings(shown),
        "Up to a score": _targets(shown),
        "Who took part": [
            *(_participation(shown) or [("participation", "", unrecorded, "")]),
            *_lines(shown, "use", "Evenness over the rounds", evenness),
        ],
        "Every client": _views(shown) + _lines(shown, "view-rounds", "Over the rounds", of_clients * view, wide=True),
        "Strata": _strata(shown) + _lines(shown, "strata-count", "Number of strata", ("strata",)),
        "Size estimates": [
            *_lines(shown, "size-ratio", "Estimated size / true size", ("size_ratio",), "1 is the truth."),
            *_lines(shown, "sizes", "Estimate, truth and what follows", sizes),
        ],
        "Mediators": _lines(shown, "mediators", "KL divergence of label mixes", ("kl_mean", "kl_client_mean")),
        "Traffic and time": _costs(shown) + _lines(shown, "time", "Time and bytes of a round", times),
        "Privacy spent": _lines(
            shown,
            "privacy",
            "ε spent so far",
            epsilons,
            "Of the updates at the run's δ, of the size answers without one.",
            wide=True,
        ),
        "Warnings and runs": _runs(shown),
    }


def _several_seeds(shown: dict[str, Any]) -> bool:
    return any(len(one["seeds"]) > 1 for one in shown["configurations"])


def _has(shown: dict[str, Any], part: str) -> bool:
    return any(part in run for run in shown["runs"])


# --- tables ---


def _table(columns: dict[str, list[Any]], text: Sequence[str] = ()) -> str:
    """Columns by heading as HTML; those in `text` may break lines."""
    from pandas import DataFrame  # slow to import

    frame = DataFrame({name: [_cell(value) for value in values] for name, values in columns.items()})
    table = frame.to_html(index=False, border=0, na_rep="–")
    rows = table.split("<tr>")
    for place in (list(columns).index(name) for name in text):
        for number, row in enumerate(rows):
            cells = row.split("<td>")
            if len(cells) == len(columns) + 1:
                rows[number] = "<td>".join(cells[: place + 1]) + '<td class="text">' + "<td>".join(cells[place + 1 :])
    return f'<div class="scroll">{"<tr>".join(rows)}</div>'


def _cell(value: Any) -> str:
    """A number of four digits, mean ± deviation, or a text."""
    if isinstance(value, list | tuple):
        mean, deviation = value
        return _cell(mean) + (f" ± {deviation:.2g}" if deviation is not None else "")
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return (
        "–"
        if value is None
        else f"{value:,}"
        if isinstance(value, int)
        else str(value).strip().encode(errors="replace").decode()
    )


def _any(groups: Sequence[Spec], part: str, key: str) -> bool:
    return any(one[part].get(key) for one in groups)


def _results(shown: dict[str, Any]) -> Component:
    groups, known = shown["configurations"], shown["metrics"]
    scores = [
        key for key in known if key.startswith(("test_", "val_")) and any(one["final"].get(key) for one in groups)
    ]
    best = [key for key in ("test_accuracy", "val_accuracy") if _any(groups, "best", key)]
    columns: dict[str, list[Any]] = {"configuration": [one["label"] for one in groups]}
    columns |= {known[key]: [one["final"].get(key) for one in groups] for key in scores}
    columns |= {f"best {known[key]}": [one["best"].get(key) for one in groups] for key in best}
    columns |= {
        SHORT.get(axis, axis): [one["spent"].get(axis) for one in groups] for axis in shown["axes"] if axis != "round"
    }
    columns |= {"seeds": [len(one["seeds"]) for one in groups], "rounds": [one["rounds"] for one in groups]}
    means = ", mean ± standard deviation over seeds" * _several_seeds(shown)
    note = f"The last score of every run{means}; samples, traffic and time of the whole run."
    return "results", "Scores and costs", note, _table(columns)


def _settings(shown: dict[str, Any]) -> list[Component]:
    labels, rows = [one["label"] for one in shown["configurations"]], shown["differences"]
    columns = {"key": [row[0] for row in rows]}
    columns |= {label: [row[1 + place] for row in rows] for place, label in enumerate(labels)}
    note = "" if rows else "One configuration: the runs differ in their seeds only."
    shared = {"key": [row[0] for row in shown["common"]], "value": [row[1] for row in shown["common"]]}
    details = f"<details><summary>{len(shown['common'])} settings that all runs share</summary>"
    return [
        (
            "differences",
            "Settings of the configurations",
            note,
            (_table(columns) if rows else "") + details + _table(shared, text=["value"]) + "</details>",
        )
    ]


def _runs(shown: dict[str, Any]) -> list[Component]:
    runs = shown["runs"]
    labels = [shown["configurations"][run["configuration"]]["label"] for run in runs]
    columns = {"run": [run["name"] for run in runs], "configuration": labels}
    keys = ("seed", "rounds", "ending", "ranks_count", "clients_count", "parameters", "engine", "versions")
    columns |= {key.removesuffix("_count"): [run[key] for run in runs] for key in keys}
    found = shown["warnings"]
    listed = {
        "times": [one["times"] for one in found],
        "warning": [one["text"] for one in found],
        "runs": [
            ", ".join(one["runs"][:4]) + f" and {len(one['runs']) - 4} more" * (len(one["runs"]) > 4) for one in found
        ],
    }
    note = "" if found else "No run warned of anything."
    warnings = ("warnings", "Warnings" * bool(found), note, _table(listed, ["warning", "runs"]) if found else "")
    return [warnings, ("runs", "Runs", "", _table(columns, text=["engine"]))]


# --- figures ---


def _common_spec(shown: dict[str, Any]) -> Spec:
    axis = {"labelColor": "#5a6672", "titleColor": "#5a6672", "gridColor": "#e4e8ed", "labelLimit": 180}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": {
            "view": {"stroke": None},
            "axis": axis,
            "legend": {"orient": "bottom", "columns": 2, "labelLimit": 300, "title": None},
        },
    }


def _choice(name: str, title: str, options: dict[Any, str]) -> Spec:
    """A parameter that the reader chooses above the figure."""
    bind = {"input": "select", "options": list(options), "labels": list(options.values()), "name": f"{title} "}
    return {"name": name, "value": next(iter(options)), **({"bind": bind} if len(options) > 1 else {})}


def _run_choice(shown: dict[str, Any], part: str) -> Spec:
    groups = shown["configurations"]
    runs = {
        run["number"]: f"{groups[run['configuration']]['label']}, seed {run['seed']} ({run['name']})"
        for run in shown["runs"]
        if part in run
    }
    return _choice("run", "run", runs)


def _colours(shown: dict[str, Any]) -> Spec:
    """Colour and dash of the configurations."""
    labels = [one["label"] for one in shown["configurations"]]
    colours = [OKABE_ITO[i % 8] for i in range(len(labels))]
    dashes = [DASHES[i // 8 % len(DASHES)] for i in range(len(labels))]
    channel = {"field": "label", "type": "nominal"}
    return {
        "color": channel | {"scale": {"domain": labels, "range": colours}},
        "strokeDash": channel | {"scale": {"domain": labels, "range": dashes}},
    }


def _hover_lines(shown: dict[str, Any], x: Spec, y: Spec, tooltip: list[Spec], **mark: Any) -> Spec:
    """Lines with bands of `low` to `high`; the legend chooses lines, the pointer shows values."""
    colours = _colours(shown)
    x = {"field": "at", "type": "quantitative", "scale": {"zero": False, "nice": False}, **x}
    y = {"field": "mean", "type": "quantitative", "scale": {"zero": False}, **y}
    opacity = {"condition": {"param": "chosen", "value": 1}, "value": 0.15}
    hovered = {"param": "near", "empty": False, "value": 1}
    near = {"name": "near", "select": {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}}
    band = {
        "mark": {"type": "area", "opacity": 0.17},
        "encoding": {
            "x": x,
            "y": y | {"field": "low"},
            "y2": {"field": "high"},
            "color": colours["color"],
            "opacity": {"condition": {"param": "chosen", "value": 0.17}, "value": 0.03},
        },
    }
    line = {
        "mark": {"type": "line", **mark},
        "encoding": {"x": x, "y": y, **colours, "opacity": opacity},
    }
    named = [{"field": "label", "title": "configuration"}, {"field": "at", "title": "at", "format": ".5~g"}]
    points = {
        "transform": [{"joinaggregate": [{"op": "count", "as": "points"}], "groupby": ["label"]}],
        "params": [near],
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {
            "x": x,
            "y": y,
            "color": colours["color"],
            "opacity": {"condition": [hovered, {"test": "datum.points === 1", "value": 1}], "value": 0},
            "tooltip": [*named, {"field": "mean", "title": "value", "format": ".5~g"}, *tooltip],
        },
    }
    layers: list[Spec] = [*([band] if _several_seeds(shown) else []), line, points]
    layers[0]["params"] = [{"name": "chosen", "select": {"type": "point", "fields": ["label"]}, "bind": "legend"}]
    return {"layer": layers, "height": 290}


def _of_key(part: str) -> Spec:
    """The list of the chosen number's means, deviations, …; a number may be called as what every object has."""
    found = f"datum.y[key].{part}"
    return {"calculate": f"datum.y[key] && isArray({found}) ? {found} : []", "as": part}


BAND = [
    {"calculate": "datum.mean - (datum.deviation || 0)", "as": "low"},
    {"calculate": "datum.mean + (datum.deviation || 0)", "as": "high"},
]


def _lines(
    shown: dict[str, Any], name: str, title: str, keys: Sequence[str], note: str = "", wide: bool = False
) -> list[Component]:
    """A figure of some numbers over the run, with a choice of the number and of what it is drawn against."""
    options = {key: shown["metrics"][key] for key in keys if key in shown["metrics"]}
    if not options:
        return []
    seeds = [{"field": "deviation", "format": ".5~g"}, {"field": "n", "title": "seeds"}] * _several_seeds(shown)
    whole = "axis !== 'round' || datum.value === floor(datum.value) ? datum.label : ''"
    spec = {
        "data": {"name": "configurations"},
        "params": [_choice("key", "show", options), _choice("axis", "against", shown["axes"])],
        "transform": [
            *map(_of_key, ("mean", "deviation", "n")),
            {"calculate": "datum.x[axis]", "as": "at"},
            {"flatten": ["mean", "at", "deviation", "n"]},
            {"filter": "isValid(datum.mean) && isValid(datum.at)"},
            *BAND,
        ],
        **_hover_lines(shown, {"title": None, "axis": {"grid": False, "labelExpr": whole}}, {"title": None}, seeds),
    }
    return [(name, title, note, spec | {"wide": wide, "height": 380 if wide else 290})]


def _targets(shown: dict[str, Any]) -> list[Component]:
    """What was spent up to a score: a table for one of them, a figure for all."""
    found, groups = shown["targets"], shown["configurations"]
    if not found:
        return []
    place, axes, costs = found["levels"].index(found["default"]), shown["axes"], found["costs"]
    columns: dict[str, list[Any]] = {"configuration": [one["label"] for one in groups]}
    reached = [cost["round"]["n"][place] if cost["round"] else 0 for cost in costs]
    columns["runs that reached it"] = [f"{n} of {len(one['seeds'])}" for n, one in zip(reached, groups, strict=True)]
    columns |= {SHORT.get(axis, axis): [_at(cost[axis], place) for cost in costs] for axis in axes}
    rows = [
        {"label": one["label"], "level": found["levels"], "costs": cost, "seeds": len(one["seeds"])}
        for one, cost in zip(groups, costs, strict=True)
    ]
    lists = [
        {"calculate": f"datum.costs[axis] ? datum.costs[axis].{part} : []", "as": part}
        for part in ("mean", "deviation", "n")
    ]
    spec = {
        "data": {"values": rows},
        "params": [_choice("axis", "cost in", axes)],
        "transform": [
            *lists,
            {"flatten": ["level", "mean", "deviation", "n"]},
            {"filter": "isValid(datum.mean)"},
            {"calculate": "datum.level", "as": "at"},
            *BAND,
        ],
        **_hover_lines(
            shown,
            {"title": shown["metrics"][found["key"]]},
            {"title": None, "scale": {"zero": True}},
            [{"field": "n", "title": "runs that reached it"}],
        ),
        "wide": True,
    }
    words = "up" if found["rises"] else "down"
    title = f"Spent {words} to a {shown['metrics'][found['key']]} of {found['default']:.4g}"
    note = "At the end of the first round whose evaluation reached it, over the runs that did."
    return [("to-target", title, note, _table(columns)), ("target", "Cost of other scores", "", spec)]


def _at(cost: dict[str, Any] | None, place: int) -> tuple[Any, Any] | None:
    return None if cost is None or cost["mean"][place] is None else (cost["mean"][place], cost["deviation"][place])


def _cells(run: Spec, transform: list[Spec], y: str, value: Spec, tooltip: Sequence[str]) -> Spec:
    """A heat map of one run, cells from `left` to `right` and `top` to `bottom`."""
    axis = {"type": "quantitative", "scale": {"zero": False, "nice": False}, "axis": {"grid": False, "tickMinStep": 1}}
    return {
        "data": {"name": "runs"},
        "params": [run],
        "transform": [{"filter": "datum.number === run"}, *transform],
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {"field": "left", "title": "round", **axis},
            "x2": {"field": "right"},
            "y": {"field": "top", "title": y, **axis, "scale": {"zero": False, "nice": False, "reverse": True}},
            "y2": {"field": "bottom"},
            "color": {"type": "quantitative", "legend": {"gradientLength": 180, "direction": "horizontal"}, **value},
            "tooltip": [{"field": name} for name in tooltip],
        },
        "height": 300,
        "wide": True,
    }


def _participation(shown: dict[str, Any]) -> list[Component]:
    if not _has(shown, "participation"):
        return []
    at = "datum.participation"
    cells: list[Spec] = [
        {"calculate": f"{at}.counts", "as": "line"},
        {"calculate": f"slice({at}.clients, 0, -1)", "as": "client"},
        {"calculate": f"slice({at}.clients, 1)", "as": "below"},
        {"flatten": ["line", "client", "below"]},
        {"calculate": f"slice({at}.rounds, 0, -1)", "as": "round"},
        {"calculate": f"slice({at}.rounds, 1)", "as": "next"},
        {"flatten": ["line", "round", "next"], "as": ["times", "round", "next"]},
        *({"calculate": f"datum.{a} - 0.5", "as": b} for a, b in (("round", "left"), ("next", "right"))),
        *({"calculate": f"datum.{a} - 0.5", "as": b} for a, b in (("client", "top"), ("below", "bottom"))),
        {"calculate": "datum.times / (datum.below - datum.client) / (datum.next - datum.round)", "as": "share"},
    ]
    value = {"field": "share", "scale": {"scheme": "viridis", "domain": [0, 1]}, "title": "share that took part"}
    fields = ("client", "below", "round", "next", "times", "share")
    heat = _cells(_run_choice(shown, "participation"), cells, "client", value, fields)
    found = [run for run in shown["runs"] if run.get("participation", {}).get("evenness")]
    labels = [f"{shown['configurations'][run['configuration']]['label']}, seed {run['seed']}" for run in found]
    names = {"used": "used at all", "effective": "effective share", "gini": "Gini", "largest": "most often"}
    columns: dict[str, list[Any]] = {"run": labels}
    columns |= {title: [run["participation"]["evenness"][name] for run in found] for name, title in names.items()}
    note = (
        "Effective share: (Σu)²/(N Σu²) of the times u that each of N clients took part; 1 and a Gini coefficient of "
        "0: all equally often."
    )
    parts: list[Component] = [("participation", "Clients and rounds", "", heat)]
    if found:
        parts.append(("evenness", "How evenly clients were used", note, _table(columns)))
    return parts


def _views(shown: dict[str, Any]) -> list[Component]:
    """Every client's own scores."""
    views = [run["view"] for run in shown["runs"] if "view" in run]
    if not views:
        return []
    groups, known = shown["configurations"], shown["metrics"]
    parts = ("mean", "worst10", "best10", "std", "jain")
    keys = [f"client_{name}_{part}" for name in CLIENT_SCORES for part in parts]
    columns: dict[str, list[Any]] = {"configuration": [one["label"] for one in groups]}
    columns |= {known[key]: [one["final"].get(key) for one in groups] for key in keys if key in known}
    scores = {name: words for name, words in CLIENT_SCORES.items() if any(name in view for view in views)}
    distribution = {
        "data": {"name": "runs"},
        "params": [_choice("score", "show", scores)],
        "transform": [
            {"filter": "datum.view && datum.view[score]"},
            {"calculate": "datum.view[score]", "as": "at"},
            {"flatten": ["at"]},
            {"filter": "isValid(datum.at)"},
            {"window": [{"op": "cume_dist", "as": "mean"}], "sort": [{"field": "at"}], "groupby": ["number"]},
        ],
        "mark": {"type": "line", "interpolate": "step-after", "tooltip": True},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "title": "score of a client", "scale": {"zero": False}},
            "y": {"field": "mean", "type": "quantitative", "title": "share of the clients"},
            "detail": {"field": "number"},
            **_colours(shown),
        },
        "height": 290,
    }
    note = (
        "Every client counts once. Worst and best 10 %: mean of that tenth of the clients. Jain's index: "
        "(Σa)²/(N Σa²), 1 where all are served alike."
    )
    return [
        ("served", "How clients are served in the end", note, _table(columns)),
        ("view-distribution", "Clients up to a score", "After the last evaluation.", distribution),
    ]


def _strata(shown: dict[str, Any]) -> list[Component]:
    if not _has(shown, "strata"):
        return []
    what = _choice("what", "show", {2: "clients of the stratum", 3: "clients drawn", 4: "share drawn"})
    cells: list[Spec] = [
        {"calculate": "datum.strata", "as": "cell"},
        {"flatten": ["cell"]},
        *({"calculate": f"datum.cell[{i}]", "as": n} for i, n in enumerate(("round", "stratum", "clients", "drawn"))),
        {"window": [{"op": "dense_rank", "as": "place"}], "sort": [{"field": "round"}]},
        {"calculate": "datum.round - 0.5", "as": "left"},
        {"calculate": "datum.round + 0.5", "as": "right"},
        {"calculate": "datum.stratum - 0.5", "as": "top"},
        {"calculate": "datum.stratum + 0.5", "as": "bottom"},
        {
            "calculate": "what === 4 ? (datum.clients ? datum.drawn / datum.clients : 0) : datum.cell[what]",
            "as": "value",
        },
    ]
    value = {"field": "value", "scale": {"scheme": "viridis"}, "title": None}
    spec = _cells(_run_choice(shown, "strata"), cells, "stratum", value, ("round", "stratum", "clients", "drawn"))
    spec["params"].append(what)
    note = "Numbers of strata mean nothing from one clustering to the next."
    return [("strata", "Strata over the rounds", note, spec)]


def _bars(shown: dict[str, Any], names: dict[str, str], unit: str) -> Spec:
    """Stacked bars of the values of some expressions by name."""
    return {
        "data": {"name": "configurations"},
        "transform": [
            {"calculate": json.dumps(list(names), ensure_ascii=False), "as": "what"},
            {"calculate": f"[{', '.join(names.values())}]", "as": "value"},
            {"flatten": ["what", "value"]},
            {"filter": "datum.value > 0"},
        ],
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "y": {"field": "label", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 150}},
            "x": {"field": "value", "type": "quantitative", "title": unit},
            "color": {"field": "what", "type": "nominal", "sort": list(names), "scale": {"range": OKABE_ITO}},
        },
        "height": max(60, 26 * len(shown["configurations"])),
    }


def _costs(shown: dict[str, Any]) -> list[Component]:
    phases = dict.fromkeys(phase for one in shown["configurations"] for phase in one["phases"])
    links = {words: f"datum.traffic.links.{link}" for link, words in LINKS.items()}
    note = "Of the simulated system, whole runs."
    sent = any(one["traffic"]["links"] for one in shown["configurations"])
    parts: list[Component] = [("traffic", "Traffic per link", note, _bars(shown, links, "megabytes"))] * sent
    if phases:
        named = {phase: f"1000 * datum.phases[{json.dumps(phase)}]" for phase in phases}
        note = "Mean of all rounds; evaluation runs beside the next round's training where there are several ranks."
        parts.append(("phases", "Phases of a round", note, _bars(shown, named, "milliseconds")))
    return parts


def page_contents(runs: Sequence[OneRun], title: str = "") -> dict[str, Any]:
    """All that the page shows, as JSON can hold it; numbers to five digits."""
    groups, notes = configurations(runs)
    ordered = [(g, run) for g, group in enumerate(groups) for run in group.runs]
    drawn = [curves([completed(run) for run in group.runs]) for group in groups]
    keys = dict.fromkeys(key for one in drawn for key in one["y"])
    keys = {key: TITLES.get(key, key) for key in [*(k for k in TITLES if k in keys), *keys]}
    return {
        "title": title or _title(groups),
        "version": fedmpi.__version__,
        "axes": {axis: words for axis, words in AXES.items() if any(axis in one["x"] for one in drawn)},
        "metrics": keys,
        "configurations": [_configuration(group) | one for group, one in zip(groups, drawn, strict=True)],
        "notes": [*notes, *_unfinished(ordered), *_not_finite(ordered)],
        "differences": _differences(groups),
        "common": _common(groups),
        "targets": targets(groups),
        "runs": [_run(number, g, run, len(ordered)) for number, (g, run) in enumerate(ordered)],
        "warnings": drawing.warnings([run for _, run in ordered]),
    }


def _unfinished(runs: Sequence[tuple[int, OneRun]]) -> list[str]:
    """That some runs are not finished, though their last scores are among those of the others."""
    some = [run for _, run in runs if run.ending == "stopped"]
    named = ", ".join(f"{run.name} ({len(run.records)} of {run.table.get('rounds')} rounds)" for run in some[:8])
    more = f" and {len(some) - 8} more" if len(some) > 8 else ""
    return [f"not finished, but shown and averaged as far as they are: {named}{more}"] if some else []


def _without_records(runs: Sequence[OneRun]) -> list[str]:
    """Which runs are not on the page, as they have no record of a round, and why where a sweep has noted that."""
    named = [f"{run.name}{f' (failed: {run.failure})' if run.failure else ''}" for run in runs[:8]]
    more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
    return [f"not shown, without a record of a round: {'; '.join(named)}{more}"] if runs else []


def _not_finite(runs: Sequence[tuple[int, OneRun]]) -> list[str]:
    """Which last scores are no finite numbers, and so are in no mean."""
    lost: dict[str, list[str]] = {}
    for _, run in runs:
        last = {key: value for record in run.records for key, value in record.items() if key.startswith(SCORES)}
        for key in (key for key, value in last.items() if value is None):
            lost.setdefault(key, []).append(run.name)
    return [
        f"{TITLES.get(key, key)} in the end is no finite number of {', '.join(names)}" for key, names in lost.items()
    ]


def _title(groups: Sequence[Configuration]) -> str:
    names = list(dict.fromkeys(str(group.table.get("preset") or group.label) for group in groups))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _configuration(group: Configuration) -> dict[str, Any]:
    last = [drawing.scores(run.records) for run in group.runs]
    keys = dict.fromkeys(key for scores in last for key in scores)
    costs = [{axis: values[-1] for axis, values in spent(run.records).items()} for run in group.runs]
    return {
        "label": group.label,
        "seeds": [run.seed for run in group.runs],
        "rounds": max(len(run.records) for run in group.runs),
        "final": {key: _spread([scores[key] for scores in last if key in scores]) for key in keys},
        "best": {
            key: _spread(
                [
                    max(r[key] for r in run.records if r.get(key) is not None)
                    for run in group.runs
                    if any(r.get(key) is not None for r in run.records)
                ]
            )
            for key in keys
            if key.endswith("accuracy")
        },
        "spent": {axis: _spread([cost[axis] for cost in costs if axis in cost]) for axis in AXES},
        "traffic": drawing.traffic(group),
        "phases": drawing.phases(group),
    }


def _spread(values: list[float]) -> list[float | int | None] | None:
    """[mean, deviation over seeds]; None of nothing."""
    spread = Spread.of(values)
    return None if spread is None else rounded([spread.mean, spread.deviation])


def _differences(groups: Sequence[Configuration]) -> list[list[str]]:
    """[key, its value in every configuration] where configurations differ."""
    keys = differing([group.table for group in groups])
    return [[key, *(table_value(group.table.get(key)) for group in groups)] for key in keys]


def _common(groups: Sequence[Configuration]) -> list[list[str]]:
    apart = set(differing([group.table for group in groups]))
    return [[key, table_value(value)] for key, value in groups[0].table.items() if key not in apart]


def _engine(description: str) -> str:
    """The engine's name; of one that was chosen by the run also what it chose, without the counts."""
    name, _, words = description.partition(": ")
    return f"{name}: {words.partition('; so far')[0]}" if name == "auto" and words else name


def _run(number: int, configuration: int, run: OneRun, runs: int) -> dict[str, Any]:
    found = {
        "participation": drawing.participation(run, runs),
        "strata": drawing.strata(run, runs),
        "view": drawing.view(run, runs),
    }
    versions = run.summary.get("versions") or {}
    return {
        "number": number,
        "name": run.name,
        "configuration": configuration,
        "seed": run.seed,
        "rounds": len(run.records),
        "ending": run.ending,
        "engine": _engine(str(run.summary.get("engine", ""))),
        "ranks_count": run.summary.get("ranks"),
        "clients_count": run.summary.get("clients"),
        "parameters": run.summary.get("parameters"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        **{name: value for name, value in found.items() if value is not None},
    }
