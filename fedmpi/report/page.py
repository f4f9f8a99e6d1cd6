"""The page of a report: one HTML file that contains its data, its figures and Vega-Lite, and needs no network.

Figures are specifications in Vega-Lite over two sets of data, the configurations and the runs; tables are pandas'.
"""

from __future__ import annotations

import base64
import html
import importlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import names_a_file, remedy, write_whole
from fedmpi.records.history import SCORES, json_value
from fedmpi.report import curves as drawing
from fedmpi.report.curves import LINK_NAMES, TITLES, Configuration, configurations, key_title, rounded
from fedmpi.report.finding import Columns, against, cell, compared, counted, finding
from fedmpi.results.comparison import AXES, Spread, rises, spent
from fedmpi.results.loading import OneRun, differing, find_runs, read_runs, shortened, table_value

VEGA_LITE = "6.4"
OKABE_ITO = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#808080", "#B8A800"]
"""Colors that all eyes can distinguish, on white and on black."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
UNITS = {"samples": "samples", "megabytes": "MB", "seconds": "seconds", "virtual_seconds": "simulated s"}
FIRST = ("test_accuracy", "val_accuracy", "test_macro_f1", "val_macro_f1", "test_loss", "val_loss", "train_loss")
"""Keys that are offered first."""
FAIRNESS = {"used": "used at all", "effective": "effective share", "gini": "Gini", "largest": "most often"}
CLIENT_SCORES = {
    "accuracy": "accuracy",
    "tuned_accuracy": "accuracy, fine-tuned",
    "loss": "loss",
    "tuned_loss": "loss, fine-tuned",
}
Spec = dict[str, Any]


class Item(NamedTuple):
    """Component of a section: a figure, a table, or a note only."""

    name: str
    title: str
    note: str
    table: Columns | None = None
    figure: Spec | None = None
    wide: bool = False  # a figure of the page's width
    detail: str = ""  # heading of a table that is folded


def write_report(paths: Sequence[Path], out: Path, title: str = "") -> int:
    """Write the page of some runs, given as their folders or folders above; return its size in bytes."""
    if not names_a_file(out):
        raise UserError(f"the page cannot be written to {out}. Name a file in an existing folder, such as report.html")
    runs = read_runs(find_runs(paths))
    recorded = [run for run in runs if run.records]
    if not recorded:
        raise UserError(f"no run has a record of a round yet ({runs[0].folder}). Wait for the first round")
    contents = page_contents(recorded, title)
    if lost := [run.name for run in runs if not run.records]:
        contents["notes"].append(f"not shown, since they have no record of a round: {shortened(lost)}")
    page = render_page(contents, drawing_library()).encode(errors="replace")  # names may not be UTF-8
    try:
        write_whole(out, page)
    except OSError as error:
        raise UserError(f"the page cannot be written to {out} ({error.strerror}). {remedy(error)}") from None
    return len(page)


def drawing_library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, which defines `vegaEmbed`."""
    try:
        converter = importlib.import_module("vl_convert")
    except ImportError:
        raise UserError("a report needs vl-convert-python. Install it with pip install 'fedmpi[report]'") from None
    return str(converter.javascript_bundle(vl_version=VEGA_LITE))


# --- contents ---


def page_contents(runs: Sequence[OneRun], title: str = "") -> dict[str, Any]:
    """Return everything that the page shows, as JSON; numbers have five digits."""
    groups, notes = configurations(runs)
    comparison = compared(runs)
    ordered = [(g, run) for g, group in enumerate(groups) for run in group.runs]
    curves = [drawing.curves([drawing.completed(run) for run in group.runs]) for group in groups]
    found = dict.fromkeys(key for one in curves for key in one["y"])
    metrics = {key: key_title(key) for key in dict.fromkeys([*FIRST, *TITLES, *found]) if key in found}
    names = list(dict.fromkeys(str(group.table.get("preset") or group.label) for group in groups))
    apart = differing([group.table for group in groups])
    return {
        "title": title or shortened(names, 4),
        "version": fedmpi.__version__,
        "finding": finding(comparison),
        "against": against(comparison),
        "axes": {axis: words for axis, words in AXES.items() if any(axis in one["x"] for one in curves)},
        "metrics": metrics,
        "configurations": [_configuration(group) | one for group, one in zip(groups, curves, strict=True)],
        "notes": [*notes, *_missing([run for _, run in ordered])],
        "differences": [[key, *(table_value(group.table.get(key)) for group in groups)] for key in apart],
        "common": [[key, table_value(value)] for key, value in groups[0].table.items() if key not in apart],
        "target": _target(groups, metrics),
        "runs": [_run(number, g, run) for number, (g, run) in enumerate(ordered)],
        "warnings": drawing.warnings([run for _, run in ordered]),
    }


def _missing(runs: Sequence[OneRun]) -> list[str]:
    """Return notes on runs that are not finished, and on last scores that are not finite."""
    some = [f"{run.name} ({len(run.records)} of {run.table.get('rounds')} rounds)" for run in runs if not run.summary]
    notes = [f"partial results of unfinished runs: {shortened(some)}"] if some else []
    lost: dict[str, list[str]] = {}
    for run in runs:
        last = {key: value for record in run.records for key, value in record.items() if key.startswith(SCORES)}
        for key in (key for key, value in last.items() if value is None):
            lost.setdefault(key, []).append(run.name)
    return notes + [f"the last {key_title(key)} is not finite in {', '.join(some)}" for key, some in lost.items()]


def _configuration(group: Configuration) -> dict[str, Any]:
    last = [drawing.scores(run.records) for run in group.runs]
    keys = dict.fromkeys(key for scores in last for key in scores)
    costs = [{axis: values[-1] for axis, values in spent(run.records).items()} for run in group.runs]
    known = {key: [[r[key] for r in run.records if r.get(key) is not None] for run in group.runs] for key in keys}
    return {
        "label": group.label,
        "seeds": [run.seed for run in group.runs],
        "rounds": max(len(run.records) for run in group.runs),
        "final": {key: _spread([scores[key] for scores in last if key in scores]) for key in keys},
        "best": {key: _spread([max(one) for one in known[key] if one]) for key in keys if key.endswith("accuracy")},
        "spent": {axis: _spread([cost[axis] for cost in costs if axis in cost]) for axis in AXES},
        "totals": drawing.totals(group),
    }


def _spread(values: list[float]) -> list[float | int | None] | None:
    """Return [mean, standard deviation over seeds]; None without values."""
    spread = Spread.of(values)
    return None if spread is None else rounded([spread.mean, spread.deviation])


def _run(number: int, configuration: int, run: OneRun) -> dict[str, Any]:
    found = {
        "participation": drawing.participation(run),
        "strata": drawing.strata(run),
        "view": drawing.view(run),
    }
    versions = run.summary.get("versions") or {}
    return {
        "number": number,
        "name": run.name,
        "configuration": configuration,
        "seed": run.seed,
        "rounds": len(run.records),
        "ending": run.ending,
        "engine": str(run.summary.get("engine", "")).partition(":")[0],
        "ranks": run.summary.get("ranks"),
        "clients": run.summary.get("clients"),
        "parameters": run.summary.get("parameters"),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        **{name: value for name, value in found.items() if value is not None},
    }


def _target(groups: Sequence[Configuration], metrics: dict[str, str]) -> dict[str, Any] | None:
    """Return title and columns of the table of costs to a score."""
    found = drawing.target(groups)
    if found is None:
        return None
    key, level = found
    costs = [drawing.costs(group, key, level) for group in groups]
    columns: Columns = {"configuration": [group.label for group in groups]}
    reached = [cost["round"].n if cost["round"] else 0 for cost in costs]
    columns["runs that reached it"] = [f"{n} of {len(group.runs)}" for n, group in zip(reached, groups, strict=True)]
    for axis in AXES:
        spreads = [cost[axis] for cost in costs]
        if any(spreads) or axis == "round":
            columns[UNITS.get(axis, "rounds")] = [s and rounded([s.mean, s.deviation]) for s in spreads]
    return {"title": f"Cost {'to' if rises(key) else 'down to'} a {metrics[key]} of {level:.4g}", "columns": columns}


# --- HTML ---


def render_page(shown: dict[str, Any], library: str) -> str:
    """Return the page of some contents."""
    sections = {title: items for title, items in _sections(shown).items() if items}
    figures = {item.name: item.figure for items in sections.values() for item in items if item.figure}
    groups = shown["configurations"]
    runs = [run | {"label": groups[run["configuration"]]["label"]} for run in shown["runs"]]
    data = {"common": COMMON, "figures": figures, "datasets": {"configurations": groups, "runs": runs}}
    bands = "; bands and ± are standard deviations over seeds" if _several_seeds(shown) else ""
    rounds = max(one["rounds"] for one in groups)
    counts = {"run": len(runs), "configuration": len(groups), "round": rounds}
    anchors = {title: "s-" + title.lower().replace(" ", "-") for title in sections}
    parts = {
        "title": html.escape(shown["title"]),
        "finding": html.escape(shown["finding"]),
        "about": ", ".join(counted(count, noun) for noun, count in counts.items()) + bands,
        "notes": "".join(f"<li>{html.escape(note)}</li>" for note in shown["notes"]),
        "version": shown["version"],
        "contents": "".join(f'<a href="#{anchors[title]}">{title}</a>' for title in sections),
        "sections": "".join(
            f'<section id="{anchors[title]}"><h2>{title}</h2><div class="grid">{html_items}</div></section>'
            for title, items in sections.items()
            for html_items in ["".join(map(_item, items))]
        ),
        "data": json.dumps(json_value(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
            "<", "\\u003c"
        ),
        "library": library.replace("</script", "<\\/script"),
    }
    pieces = resources.files("fedmpi.report").joinpath("page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _item(item: Item) -> str:
    head = f"<h3>{html.escape(item.title)}</h3>" * bool(item.title)
    head += f'<p class="note">{html.escape(item.note)}</p>' * bool(item.note)
    if item.figure:
        wide = ' class="wide"' * item.wide
        return f'<figure id="{item.name}"{wide}>{head}<div class="chart"></div></figure>'
    table = _table(item.name, item.table) if item.table else ""
    if item.detail:
        table = f"<details><summary>{item.detail}</summary>{table}</details>"
    return f'<div class="card wide" id="{item.name}">{head}{table}</div>'


def _table(name: str, columns: Columns) -> str:
    """Return columns by heading as HTML, with a link that downloads them as CSV."""
    from pandas import DataFrame  # slow to import

    frame = DataFrame({heading: [cell(value) for value in values] for heading, values in columns.items()})
    table = frame.to_html(index=False, border=0, na_rep="–")
    spreads: Columns = {}
    for heading, values in columns.items():
        pairs = [value if isinstance(value, list | tuple) else (value, None) for value in values]
        spreads[heading] = [cell(mean) if isinstance(mean, str) else mean for mean, _ in pairs]
        if any(deviation is not None for _, deviation in pairs):
            spreads[f"{heading}, standard deviation"] = [deviation for _, deviation in pairs]
    content = base64.b64encode(DataFrame(spreads).to_csv(index=False).encode(errors="replace")).decode()
    link = f'<a class="csv" download="{name}.csv" href="data:text/csv;base64,{content}">CSV</a>'
    return f'{link}<div class="scroll">{table}</div>'


def _several_seeds(shown: dict[str, Any]) -> bool:
    return any(len(one["seeds"]) > 1 for one in shown["configurations"])


def _sections(shown: dict[str, Any]) -> dict[str, list[Item]]:
    """Return the contents of the page's sections by title."""
    known, against = shown["metrics"], shown["against"]
    of_clients = [key for key in known if key.startswith(("client_accuracy", "client_loss", "client_tuned"))]
    epsilon = "For the updates at the run's δ, for the size reports without one."
    first, cost = "At the end of the first round whose evaluation reached it, over these runs.", shown["target"]
    corrected = "Mean over paired seeds, with a 95 % confidence interval corrected for the number of comparisons."
    differences = [Item("against", "Differences from the reference", corrected, against)] if against else []
    unrecorded = Item("participation", "", "Participation was not recorded. Set logging.participants = true.")

    def lines(name: str, title: str, keys: Sequence[str], note: str = "", wide: bool = False) -> list[Item]:
        return _lines(shown, name, title, keys, note, wide)

    fairness = ("client_use_gini", "client_use_effective", "clients_used", "sample_use_gini", "sample_use_effective")
    sizes = ("size_estimate", "size_true", "sampling_probability", "clipped_fraction", "size_asked")
    times = ("seconds", "virtual_seconds", "rank_balance", *(f"bytes_{link}" for link in LINK_NAMES))
    return {
        "Curves": [
            *lines("curve", "Scores and other numbers over the run", list(known), wide=True),
            *lines("loss", "Losses", ("test_loss", "val_loss", "train_loss")),
            *lines("training", "Work per round", ("samples", "steps", "participants", "lr")),
        ],
        "Results": [_results(shown), *differences],
        "Cost to a score": [Item("to-target", cost["title"], first, cost["columns"])] if cost else [],
        "Settings": _settings(shown),
        "Participation": [
            *(_participation(shown) or [unrecorded]),
            *lines("use", "Participation fairness over the rounds", fairness),
        ],
        "Clients": [
            *_views(shown),
            *lines("view-rounds", "Scores over the rounds", of_clients * _has(shown, "view"), wide=True),
        ],
        "Strata": _strata(shown) + lines("strata-count", "Number of strata", ("strata",)),
        "Size estimates": [
            *lines("size-ratio", "Estimated size / true size", ("size_ratio",)),
            *lines("sizes", "Estimate, true size and derived numbers", sizes),
        ],
        "Mediators": lines("mediators", "KL divergence of label distributions", ("kl_mean", "kl_client_mean")),
        "Traffic and time": [_totals(shown), *lines("time", "Time and bytes per round", times)],
        "Privacy spent": lines(
            "privacy",
            "ε spent so far",
            ("update_epsilon", "size_epsilon_max", "size_epsilon_mean"),
            epsilon,
            wide=True,
        ),
        "Warnings and runs": _runs(shown),
    }


def _has(shown: dict[str, Any], part: str) -> bool:
    return any(part in run for run in shown["runs"])


# --- tables ---


def _results(shown: dict[str, Any]) -> Item:
    groups, known = shown["configurations"], shown["metrics"]

    def column(part: str, key: str) -> list[Any]:
        return [one[part].get(key) for one in groups]

    columns: Columns = {"configuration": [one["label"] for one in groups]}
    finals = {known[key]: column("final", key) for key in known if key.startswith(("test_", "val_"))}
    best = {f"best {known[key]}": column("best", key) for key in ("test_accuracy", "val_accuracy") if key in known}
    costs = {UNITS[axis]: column("spent", axis) for axis in shown["axes"] if axis in UNITS}
    columns |= {heading: values for heading, values in (finals | best | costs).items() if any(values)}
    columns |= {"seeds": [len(one["seeds"]) for one in groups], "rounds": [one["rounds"] for one in groups]}
    means = ", mean ± standard deviation over seeds" * _several_seeds(shown)
    note = f"Last score of every run{means}; samples, traffic and time of the whole run."
    return Item("results", "Scores and costs", note, columns)


def _settings(shown: dict[str, Any]) -> list[Item]:
    labels, rows, common = [one["label"] for one in shown["configurations"]], shown["differences"], shown["common"]
    columns = {"key": [row[0] for row in rows]}
    columns |= {label: [row[1 + place] for row in rows] for place, label in enumerate(labels)}
    shared: Columns = {"key": [row[0] for row in common], "value": [row[1] for row in common]}
    note = "" if rows else "One configuration: the runs differ only in their seeds."
    return [
        Item("differences", "Different settings", note, columns if rows else None),
        Item("common", "", "", shared, detail=f"{len(common)} common settings"),
    ]


def _totals(shown: dict[str, Any]) -> Item:
    """Return traffic and the phases of a round."""
    groups = shown["configurations"]
    columns: Columns = {"configuration": [one["label"] for one in groups]}
    for name in dict.fromkeys(name for one in groups for name in one["totals"]):
        columns[name] = [one["totals"].get(name) for one in groups]
    note = "Simulated traffic of whole runs; phases per round. Evaluation overlaps with the next round's training."
    return Item("totals", "Traffic per link and phases of a round", note, columns)


def _runs(shown: dict[str, Any]) -> list[Item]:
    runs, found = shown["runs"], shown["warnings"]
    columns: Columns = {"run": [run["name"] for run in runs]}
    columns["configuration"] = [shown["configurations"][run["configuration"]]["label"] for run in runs]
    for key in ("seed", "rounds", "ending", "ranks", "clients", "parameters", "engine", "versions"):
        columns[key] = [run[key] for run in runs]
    listed: Columns = {
        "times": [one["times"] for one in found],
        "warning": [one["text"] for one in found],
        "runs": [shortened(one["runs"], 4) for one in found],
    }
    warnings = [Item("warnings", "Warnings", "", listed)] if found else []
    return [*warnings, Item("runs", "Runs", "", columns)]


# --- figures ---


STATISTICS = ("mean", "deviation", "n")
GRAY = {"labelColor": "#7a8794", "titleColor": "#7a8794"}
LEGEND = {"orient": "bottom", "columns": 2, "labelLimit": 300, "title": None, "symbolOpacity": 1}
COMMON = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "width": "container",
    "background": "transparent",
    "autosize": {"type": "fit-x", "contains": "padding"},
    "config": {
        "view": {"stroke": None},
        "axis": GRAY | {"gridColor": "#80808040", "labelLimit": 180},
        "legend": LEGEND | GRAY,
    },
}


def _calculate(**expressions: str) -> list[Spec]:
    return [{"calculate": expression, "as": name} for name, expression in expressions.items()]


def _choice(name: str, title: str, options: dict[Any, str]) -> Spec:
    """Return a parameter that the reader chooses above the figure."""
    bind = {"input": "select", "options": list(options), "labels": list(options.values()), "name": f"{title} "}
    return {"name": name, "value": next(iter(options)), **({"bind": bind} if len(options) > 1 else {})}


def _lines(
    shown: dict[str, Any], name: str, title: str, keys: Sequence[str], note: str = "", wide: bool = False
) -> list[Item]:
    """Return a figure of some numbers over the run, with a choice of the number and of the horizontal axis.

    Bands show the deviation. The legend selects lines, the pointer shows values.
    """
    options = {key: shown["metrics"][key] for key in keys if key in shown["metrics"]}
    if not options:
        return []
    several, labels = _several_seeds(shown), [one["label"] for one in shown["configurations"]]
    lists = {part: f"datum.y[key] && isArray(datum.y[key].{part}) ? datum.y[key].{part} : []" for part in STATISTICS}
    transform = [
        *_calculate(**lists, at="datum.x[axis]"),
        {"flatten": ["at", *STATISTICS]},
        {"filter": "isValid(datum.mean) && isValid(datum.at)"},
        *_calculate(low="datum.mean - (datum.deviation || 0)", high="datum.mean + (datum.deviation || 0)"),
    ]
    whole = "datum.value === floor(datum.value) ? format(datum.value, ',') : ''"
    ticks = {"grid": False, "labelExpr": f"axis === 'round' ? ({whole}) : datum.label"}
    x = {"field": "at", "type": "quantitative", "title": None, "axis": ticks, "scale": {"zero": False, "nice": False}}
    y = {"field": "mean", "type": "quantitative", "title": None, "scale": {"zero": False}}
    colors = [OKABE_ITO[i % 8] for i in range(len(labels))]
    dashes = [DASHES[i // 8 % len(DASHES)] for i in range(len(labels))]
    color = {"field": "label", "type": "nominal", "scale": {"domain": labels, "range": colors}}
    chosen = {"param": "chosen"}
    band = {
        "mark": "area",
        "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"}, "color": color}
        | {"opacity": {"condition": chosen | {"value": 0.17}, "value": 0.03}},
    }
    line = {
        "mark": "line",
        "encoding": {
            "x": x,
            "y": y,
            "color": color,
            "strokeDash": color | {"scale": {"domain": labels, "range": dashes}},
        }
        | {"opacity": {"condition": chosen | {"value": 1}, "value": 0.15}},
    }
    visible = [{"param": "near", "empty": False, "value": 1}, {"test": "datum.points === 1", "value": 1}]
    tooltip = [{"field": "label", "title": "configuration"}, {"field": "at", "format": ".5~g"}]
    tooltip += [{"field": "mean", "title": "value", "format": ".5~g"}]
    tooltip += [{"field": "deviation", "format": ".5~g"}, {"field": "n", "title": "seeds"}] * several
    near = {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}
    points = {
        "transform": [{"joinaggregate": [{"op": "count", "as": "points"}], "groupby": ["label"]}],
        "params": [{"name": "near", "select": near}],
        "mark": {"type": "point", "filled": True, "size": 70},
        "encoding": {"x": x, "y": y, "color": color, "tooltip": tooltip}
        | {"opacity": {"condition": visible, "value": 0}},
    }
    layers: list[Spec] = [*([band] if several else []), line, points]
    layers[0]["params"] = [{"name": "chosen", "select": {"type": "point", "fields": ["label"]}, "bind": "legend"}]
    params = [_choice("key", "show", options), _choice("axis", "against", shown["axes"])]
    spec = {"data": {"name": "configurations"}, "params": params, "transform": transform, "layer": layers}
    return [Item(name, title, note, None, spec | {"height": 380 if wide else 290}, wide)]


def _heat_map(
    shown: dict[str, Any], part: str, params: list[Spec], cells: list[Spec], y: str, value: Spec, tooltip: Sequence[str]
) -> Spec:
    """Return a heat map of one run, with cells from `left` to `right` and from `top` to `bottom`."""
    runs = {
        run["number"]: f"{shown['configurations'][run['configuration']]['label']}, seed {run['seed']} ({run['name']})"
        for run in shown["runs"]
        if part in run
    }
    axis = {"type": "quantitative", "axis": {"grid": False, "tickMinStep": 1}}
    scale = {"zero": False, "nice": False}
    return {
        "data": {"name": "runs"},
        "params": [_choice("run", "run", runs), *params],
        "transform": [{"filter": "datum.number === run"}, *cells],
        "mark": {"type": "rect", "tooltip": True},
        "encoding": {
            "x": {"field": "left", "title": "round", "scale": scale, **axis},
            "x2": {"field": "right"},
            "y": {"field": "top", "title": y, "scale": scale | {"reverse": True}, **axis},
            "y2": {"field": "bottom"},
            "color": {"type": "quantitative", "legend": {"gradientLength": 180, "direction": "horizontal"}, **value},
            "tooltip": [{"field": name} for name in tooltip],
        },
        "height": 300,
    }


def _participation(shown: dict[str, Any]) -> list[Item]:
    if not _has(shown, "participation"):
        return []
    clients, rounds = "datum.participation.clients", "datum.participation.rounds"
    cells: list[Spec] = [
        *_calculate(line="datum.participation.counts", client=f"slice({clients}, 0, -1)", below=f"slice({clients}, 1)"),
        {"flatten": ["line", "client", "below"]},
        *_calculate(round=f"slice({rounds}, 0, -1)", next=f"slice({rounds}, 1)"),
        {"flatten": ["line", "round", "next"], "as": ["times", "round", "next"]},
        *_calculate(left="datum.round - 0.5", right="datum.next - 0.5"),
        *_calculate(top="datum.client - 0.5", bottom="datum.below - 0.5"),
        *_calculate(share="datum.times / (datum.below - datum.client) / (datum.next - datum.round)"),
    ]
    scale = {"scheme": "viridis", "domain": [0, 1]}
    found = [run for run in shown["runs"] if "participation" in run]
    if all(len(run["participation"]["counts"]) == run["participation"]["clients"][-1] for run in found):
        scale = {"range": ["#dde2e8", OKABE_ITO[0]], "domain": [0, 1]}  # one client per row
    value = {"field": "share", "scale": scale, "title": "share that participated"}
    fields = ("client", "below", "round", "next", "times", "share")
    heat = _heat_map(shown, "participation", [], cells, "client", value, fields)
    items = [Item("participation", "Clients and rounds", "", None, heat, True)]
    found = [run for run in found if run["participation"]["evenness"]]
    if found:
        labels = [f"{shown['configurations'][run['configuration']]['label']}, seed {run['seed']}" for run in found]
        columns: Columns = {"run": labels}
        columns |= {
            title: [run["participation"]["evenness"][name] for run in found] for name, title in FAIRNESS.items()
        }
        note = (
            "Effective share: (Σu)²/(N Σu²) for the numbers u of rounds of each of N clients. 1 and a Gini coefficient "
            "of 0: all participated equally often."
        )
        items.append(Item("evenness", "Participation fairness", note, columns))
    return items


def _views(shown: dict[str, Any]) -> list[Item]:
    """Return the scores of clients: a table of their spread, and their distribution."""
    views = [run["view"] for run in shown["runs"] if "view" in run]
    if not views:
        return []
    groups, known = shown["configurations"], shown["metrics"]
    columns: Columns = {"configuration": [one["label"] for one in groups]}
    for key in known:
        if key.startswith(tuple(f"client_{score}" for score in CLIENT_SCORES)) and not key.endswith("weighted"):
            columns[known[key]] = [one["final"].get(key) for one in groups]
    scores = {name: words for name, words in CLIENT_SCORES.items() if any(name in view for view in views)}
    spec = {
        "data": {"name": "runs"},
        "params": [_choice("score", "show", scores)],
        "transform": [
            {"filter": "datum.view && datum.view[score]"},
            *_calculate(at="datum.view[score]"),
            {"flatten": ["at"]},
            {"filter": "isValid(datum.at)"},
            {"window": [{"op": "cume_dist", "as": "mean"}], "sort": [{"field": "at"}], "groupby": ["number"]},
        ],
        "mark": {"type": "line", "interpolate": "step-after", "tooltip": True},
        "encoding": {
            "x": {"field": "at", "type": "quantitative", "title": "score of a client", "scale": {"zero": False}},
            "y": {"field": "mean", "type": "quantitative", "title": "share of the clients"},
            "detail": {"field": "number"},
            "color": {"field": "label", "type": "nominal", "scale": {"range": OKABE_ITO}},
        },
        "height": 290,
    }
    note = (
        "Every client counts once. Worst and best 10 %: mean of these clients. Jain's index: (Σa)²/(N Σa²), 1 if all "
        "clients have the same score."
    )
    return [
        Item("served", "Scores over clients at the end", note, columns),
        Item("view-distribution", "Share of clients up to a score", "At the last evaluation.", figure=spec),
    ]


def _strata(shown: dict[str, Any]) -> list[Item]:
    if not _has(shown, "strata"):
        return []
    what = _choice("what", "show", {2: "clients in the stratum", 3: "clients drawn", 4: "share drawn"})
    share = "datum.clients ? datum.drawn / datum.clients : 0"
    fields = ("round", "stratum", "clients", "drawn")
    cells: list[Spec] = [
        *_calculate(cell="datum.strata"),
        {"flatten": ["cell"]},
        *_calculate(**{name: f"datum.cell[{i}]" for i, name in enumerate(fields)}),
        *_calculate(left="datum.round - 0.5", right="datum.round + 0.5"),
        *_calculate(top="datum.stratum - 0.5", bottom="datum.stratum + 0.5"),
        *_calculate(value=f"what === 4 ? ({share}) : datum.cell[what]"),
    ]
    value = {"field": "value", "scale": {"scheme": "viridis"}, "title": None}
    spec = _heat_map(shown, "strata", [what], cells, "stratum", value, fields)
    return [Item("strata", "Strata over the rounds", "Each clustering numbers its strata anew.", None, spec, True)]
