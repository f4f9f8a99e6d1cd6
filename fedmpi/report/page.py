"""The page of a report: one HTML file that contains its data, its figures and Vega-Lite, and needs no network."""

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
from fedmpi.records.history import LINKS, json_value
from fedmpi.report import curves as numbers
from fedmpi.report import figures
from fedmpi.report.curves import LINK_NAMES, TITLES, Configuration, configurations, key_title, rounded
from fedmpi.report.figures import COMMON, Shown, Spec
from fedmpi.report.finding import cell, compared, counted, finding
from fedmpi.results.comparison import AXES, Comparison, Spread, correction_of, spent, table_of
from fedmpi.results.loading import OneRun, differing, find_runs, read_runs, shortened, table_value

Columns = dict[str, list[Any]]
VEGA_LITE = "6.4"
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
LINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "Curves": ("loss", "Losses over the run", ("test_loss", "val_loss", "train_loss")),
    "Size estimates": ("size-ratio", "Estimated size / true size over the run", ("size_ratio",)),
    "Mediators": ("mediators", "KL divergence of label distributions over the run", ("kl_mean", "kl_client_mean")),
    "Traffic and time": (
        "time",
        "Time and bytes per round over the run",
        ("seconds", "virtual_seconds", *(f"bytes_{link}" for link in LINKS)),
    ),
    "Privacy spent": (
        "privacy",
        "Privacy ε spent so far: updates at the run's δ, sizes without one",
        ("update_epsilon", "size_epsilon_max", "size_epsilon_mean"),
    ),
}
"""Name, title and keys of a figure of some numbers, by section; the first figure offers all of them."""


class Item(NamedTuple):
    """Component of a section: a figure, a table, or a note only."""

    name: str
    title: str
    note: str = ""
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
    """Return title, finding, notes, numbers and sections of the page."""
    groups, notes = configurations(runs)
    ordered = [(group.label, run) for group in groups for run in group.runs]
    curves = [numbers.curves([run.records for run in group.runs]) for group in groups]
    found = dict.fromkeys(key for one in curves for key in one["y"])
    shown = Shown(
        [
            {"label": group.label, "seeds": [run.seed for run in group.runs]} | one
            for group, one in zip(groups, curves, strict=True)
        ],
        [_run(number, label, run) for number, (label, run) in enumerate(ordered)],
        {key: key_title(key) for key in dict.fromkeys([*FIRST, *TITLES, *found]) if key in found},
        {axis: words for axis, words in AXES.items() if any(axis in one["x"] for one in curves)},
    )
    comparison = compared(runs)
    sections = {
        "Curves": [_lines(shown, "curve", "Scores and other numbers over the run", list(shown.metrics), True)],
        "Results": [_results(groups), *(_compared(comparison) if comparison is not None else [])],
        "Settings": _settings(groups),
        "Participation": _participation(shown),
        "Clients": _views(shown, groups),
        "Strata": _strata(shown),
        "Size estimates": [],
        "Mediators": [],
        "Traffic and time": [_traffic(groups)],
        "Privacy spent": [],
        "Warnings and runs": _runs(shown, [run for _, run in ordered]),
    }
    for section, (name, words, keys) in LINES.items():
        if known := [key for key in keys if key in shown.metrics]:
            sections[section].append(_lines(shown, name, words, known))
    names = list(dict.fromkeys(str(group.table.get("preset") or group.label) for group in groups))
    return {
        "title": title or shortened(names, 4),
        "finding": "" if comparison is None else finding(comparison),
        "notes": [*notes, *_missing([run for _, run in ordered])],
        "rounds": max(len(run.records) for run in runs),
        "shown": shown,
        "sections": {section: items for section, items in sections.items() if items},
    }


def _lines(shown: Shown, name: str, title: str, keys: Sequence[str], wide: bool = False) -> Item:
    return Item(name, title, figure=figures.lines(shown, keys, 380 if wide else 290), wide=wide)


def _missing(runs: Sequence[OneRun]) -> list[str]:
    """Return notes on runs that are not finished, and on last scores that are not finite."""
    some = [f"{run.name} ({len(run.records)} of {run.table.get('rounds')} rounds)" for run in runs if not run.summary]
    notes = [f"partial results of unfinished runs: {shortened(some)}"] if some else []
    lost: dict[str, list[str]] = {}
    for run in runs:
        for key, value in numbers.scores(run.records).items():
            if value is None:
                lost.setdefault(key, []).append(run.name)
    return notes + [f"the last {key_title(key)} is not finite in {', '.join(some)}" for key, some in lost.items()]


def _run(number: int, label: str, run: OneRun) -> dict[str, Any]:
    found = {
        "participation": numbers.participation(run),
        "strata": numbers.strata(run),
        "view": numbers.view(run),
    }
    facts = {"number": number, "name": run.name, "label": label, "seed": run.seed}
    return facts | {name: value for name, value in found.items() if value is not None}


# --- sections ---


def _over_seeds(groups: Sequence[Configuration], values: Any) -> list[Any]:
    """Return [mean, standard deviation] of a number of each run, by configuration; None without values."""
    spreads = [Spread.of([x for run in group.runs if (x := values(run)) is not None]) for group in groups]
    return [spread and rounded([spread.mean, spread.deviation]) for spread in spreads]


def _final_scores(groups: Sequence[Configuration], beginnings: tuple[str, ...]) -> Columns:
    """Return the columns of the last scores whose keys begin in this way."""
    last = {run.folder: numbers.scores(run.records) for group in groups for run in group.runs}
    keys = dict.fromkeys(key for one in last.values() for key in one if key.startswith(beginnings))
    return {key_title(key): _over_seeds(groups, lambda run, key=key: last[run.folder].get(key)) for key in keys}


def _results(groups: Sequence[Configuration]) -> Item:
    def whole(axis: str) -> list[Any]:
        return _over_seeds(groups, lambda run: spent(run.records).get(axis, [None])[-1])

    columns: Columns = {"configuration": [group.label for group in groups]}
    found = _final_scores(groups, ("test_", "val_"))
    found |= {unit: whole(axis) for axis, unit in UNITS.items()}
    columns |= {heading: values for heading, values in found.items() if any(values)}
    columns |= {"seeds": [len(group.runs) for group in groups]}
    columns |= {"rounds": [max(len(run.records) for run in group.runs) for group in groups]}
    means = ", mean ± standard deviation over seeds" * any(len(group.runs) > 1 for group in groups)
    note = f"Last score of every run{means}; samples, traffic and time of the whole run."
    return Item("results", "Scores and costs", note, columns)


def _compared(comparison: Comparison) -> list[Item]:
    """Return the tables of `fedmpi compare`."""
    items = []
    for place, (block, rows) in enumerate(comparison.blocks):
        table = {head or "configuration": cells for head, cells in table_of(comparison, rows).items()}
        title = "Comparison" + f": {block.title}" * (len(comparison.blocks) > 1)
        items.append(Item(f"comparison-{place}", title, " ".join(correction_of(rows)), dict(table)))
    return items


def _settings(groups: Sequence[Configuration]) -> list[Item]:
    apart = differing([group.table for group in groups])
    columns: Columns = {"key": apart}
    columns |= {group.label: [table_value(group.table.get(key)) for key in apart] for group in groups}
    common = {key: value for key, value in groups[0].table.items() if key not in apart}
    shared: Columns = {"key": list(common), "value": [table_value(value) for value in common.values()]}
    note = "" if apart else "One configuration: the runs differ only in their seeds."
    return [
        Item("differences", "Different settings", note, columns if apart else None),
        Item("common", "", "", shared, detail=f"{len(common)} common settings"),
    ]


def _participation(shown: Shown) -> list[Item]:
    runs = shown.having("participation")
    if not runs:
        return [Item("participation", "", "Participation was not recorded. Set logging.participants = true.")]
    items = [Item("participation", "Selected clients by round", figure=figures.participation_map(runs), wide=True)]
    if runs := [run for run in runs if run["participation"]["evenness"]]:
        columns: Columns = {"run": [f"{run['label']}, seed {run['seed']}" for run in runs]}
        columns |= {title: [run["participation"]["evenness"][name] for run in runs] for name, title in FAIRNESS.items()}
        note = (
            "Effective share: (Σu)²/(N Σu²) for the numbers u of rounds of each of N clients. 1 and a Gini coefficient "
            "of 0: all participated equally often."
        )
        items.append(Item("evenness", "Participation fairness", note, columns))
    return items


def _views(shown: Shown, groups: Sequence[Configuration]) -> list[Item]:
    """Return the scores of clients: a table of their spread, and their distribution."""
    views = [run["view"] for run in shown.having("view")]
    if not views:
        return []
    found = _final_scores(groups, tuple(f"client_{score}" for score in CLIENT_SCORES))
    columns = {"configuration": shown.labels} | {k: v for k, v in found.items() if not k.endswith("weighted")}
    scores = {name: words for name, words in CLIENT_SCORES.items() if any(name in view for view in views)}
    note = (
        "Every client counts once. Worst and best 10 %: mean of these clients. Jain's index: (Σa)²/(N Σa²), 1 if all "
        "clients have the same score."
    )
    drawn = figures.distribution(shown, scores)
    return [
        Item("served", "Scores over clients at the end", note, columns),
        Item("view-distribution", "Share of clients up to a score at the last evaluation", figure=drawn),
    ]


def _strata(shown: Shown) -> list[Item]:
    runs = shown.having("strata")
    note = "Each clustering numbers its strata anew."
    return [Item("strata", "Strata over the rounds", note, figure=figures.strata_map(runs), wide=True)] if runs else []


def _traffic(groups: Sequence[Configuration]) -> Item:
    def megabytes(link: str) -> list[Any]:
        return _over_seeds(groups, lambda run: sum(r.get(f"bytes_{link}") or 0 for r in run.records) / 1e6 or None)

    found = {f"MB {words}": megabytes(link) for link, words in LINK_NAMES.items()}
    columns: Columns = {"configuration": [group.label for group in groups]}
    columns |= {heading: values for heading, values in found.items() if any(values)}
    return Item("traffic", "Simulated traffic of whole runs", "", columns)


def _runs(shown: Shown, runs: Sequence[OneRun]) -> list[Item]:
    columns: Columns = {"run": [run.name for run in runs], "configuration": [one["label"] for one in shown.runs]}
    columns |= {"seed": [run.seed for run in runs], "rounds": [len(run.records) for run in runs]}
    columns |= {"ending": [run.ending for run in runs]}
    for key in ("ranks", "clients", "parameters"):
        columns[key] = [run.summary.get(key) for run in runs]
    versions = [run.summary.get("versions", {}) for run in runs]
    columns["versions"] = [", ".join(f"{name} {version}" for name, version in one.items()) for one in versions]
    found = numbers.warnings(runs)
    listed: Columns = {"warning": [text for text, _ in found], "times": [times for _, times in found]}
    return [*([Item("warnings", "Warnings", "", listed)] if found else []), Item("runs", "Runs", "", columns)]


# --- HTML ---


def render_page(contents: dict[str, Any], library: str) -> str:
    """Return the page of some contents."""
    shown, sections = contents["shown"], contents["sections"]
    drawn = {item.name: item.figure for items in sections.values() for item in items if item.figure}
    data = {"common": COMMON, "figures": drawn}
    data["datasets"] = {"configurations": shown.configurations, "runs": shown.runs}
    counts = {"run": len(shown.runs), "configuration": len(shown.labels), "round": contents["rounds"]}
    bands = "; bands and ± are standard deviations over seeds" if shown.several_seeds else ""
    anchors = {title: "s-" + title.lower().replace(" ", "-") for title in sections}
    parts = {
        "title": html.escape(contents["title"]),
        "finding": html.escape(contents["finding"]),
        "about": ", ".join(counted(count, noun) for noun, count in counts.items()) + bands,
        "notes": "".join(f"<li>{html.escape(note)}</li>" for note in contents["notes"]),
        "version": fedmpi.__version__,
        "contents": "".join(f'<a href="#{anchors[title]}">{title}</a>' for title in sections),
        "sections": "".join(
            f'<section id="{anchors[title]}"><h2>{title}</h2><div class="grid">{"".join(map(_item, items))}</div>'
            "</section>"
            for title, items in sections.items()
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
    content = base64.b64encode(frame.to_csv(index=False).encode()).decode()
    link = f'<a class="csv" download="{name}.csv" href="data:text/csv;base64,{content}">CSV</a>'
    return f'{link}<div class="scroll">{frame.to_html(index=False, border=0)}</div>'
