"""The page of a report: one HTML file that contains its data, its figures and Vega-Lite, and needs no network."""

from __future__ import annotations

import base64
import html
import importlib
import json
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.common.files import check_named, write_named
from fedmpi.records.history import LINKS, json_value
from fedmpi.report import curves as numbers
from fedmpi.report import figures
from fedmpi.report.curves import key_title
from fedmpi.report.figures import COMMON, Shown, Spec
from fedmpi.results.comparison import (
    AXES,
    UNITS,
    Comparison,
    Row,
    Spread,
    compare_runs,
    correction_of,
    decimals,
    in_percent,
    number,
    rises,
    spent,
    table_of,
)
from fedmpi.results.loading import (
    OneRun,
    SeedGroup,
    differing,
    grouped,
    matters,
    notes_on,
    read_runs,
    shortened,
    table_value,
)

Columns = dict[str, list[Any]]
VEGA_LITE = "6.4"
FIRST = ("test_accuracy", "val_accuracy", "test_macro_f1", "val_macro_f1", "test_loss", "val_loss", "train_loss")
"""Keys that are offered first."""
CLIENT_SCORES = ("client_accuracy_", "client_loss_", "client_tuned_", "client_personal_")
FAIRNESS = {"used": "used at all", "effective": "effective share", "gini": "Gini", "largest": "most often"}
LINES: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("Losses", ("test_loss", "val_loss", "train_loss")),
    "size-ratio": ("Estimated size / true size", ("size_ratio",)),
    "mediators": ("KL divergence of label distributions", ("kl_mean", "kl_client_mean")),
    "privacy": (
        "Privacy ε spent so far: updates at the run's δ, sizes without one",
        ("update_epsilon", "size_epsilon_max", "size_epsilon_mean"),
    ),
    "time": ("Time and bytes per round", ("seconds", "virtual_seconds", *(f"bytes_{link}" for link in LINKS))),
}
"""Title and keys of a figure of some numbers over the run, by its name; the first figure offers all of them."""


class Item(NamedTuple):
    """Component of a section: a figure, a table, or a note only."""

    name: str
    title: str
    note: str = ""
    table: Columns | None = None
    figure: Spec | None = None
    wide: bool = False  # a figure of the page's width


def write_report(paths: Sequence[Path], out: Path, title: str = "") -> int:
    """Write the page of some runs, given as their folders or folders above; return its size in bytes."""
    check_named(out)
    runs = read_runs(paths)
    recorded = [run for run in runs if run.records]
    if not recorded:
        raise UserError(f"no run has a record of a round yet ({runs[0].folder}). Wait for the first round")
    contents = page_contents(recorded, title)
    if lost := [run.name for run in runs if not run.records]:
        contents["notes"].append(f"not shown, since they have no record of a round: {shortened(lost)}")
    page = render_page(contents, drawing_library()).encode(errors="replace")  # names may not be UTF-8
    write_named(out, page)
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
    groups = grouped(runs)
    labels = [", ".join(filter(None, (group.label, group.data))) for group in groups]
    entries = [
        _entry(label, run, numbers.drawn_rounds(list(group.runs.values())))
        for label, group in zip(labels, groups, strict=True)
        for run in group.runs.values()
    ]
    keys = {key for one in entries for key in one["y"]}
    shown = Shown(
        [{"number": number, **one} for number, one in enumerate(entries)],
        {key: key_title(key) for key in dict.fromkeys([*FIRST, *sorted(keys)]) if key in keys},
        {axis: words for axis, words in AXES.items() if any(axis in one["x"] for one in entries)},
    )
    ordered = [run for group in groups for run in group.runs.values()]
    comparison = compared(runs)
    sections = {
        "Curves": _lines(shown),
        "Results": [_results(shown, groups), *(_compared(comparison) if comparison is not None else [])],
        "Settings": _settings(shown, groups),
        "Participation": _participation(shown),
        "Clients": _clients(shown, groups),
        "Runs": [_runs(shown, ordered)],
    }
    names = list(dict.fromkeys(str(group.first.table.get("preset") or group.label) for group in groups))
    return {
        "title": title or shortened(names, 4),
        "finding": "" if comparison is None else finding(comparison),
        "notes": [*notes_on(groups), *_missing(ordered)],
        "rounds": max(len(run.records) for run in runs),
        "shown": shown,
        "sections": {section: items for section, items in sections.items() if items},
    }


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


def _entry(label: str, run: OneRun, rounds: set[int]) -> dict[str, Any]:
    """Return the numbers of a run."""
    facts = {"name": run.name, "label": label, "seed": run.seed} | numbers.curves(run, rounds)
    parts = {"participation": numbers.participation(run), "strata": numbers.strata(run)}
    return facts | {name: value for name, value in parts.items() if value is not None}


def compared(runs: Sequence[OneRun]) -> Comparison | None:
    """Return the comparison of the configurations, with the user's target or else the best score that half of them
    reach; None if no run is finished, or none was evaluated."""
    try:
        found = compare_runs(runs)
    except UserError:
        return None
    best = sorted((row.best.mean for row in found.rows if row.best), reverse=rises(found.metric))
    middle = best[len(best) // 2] if best else 0.0
    return found if found.target is not None or not middle else compare_runs(runs, target=middle)


def finding(comparison: Comparison) -> str:
    """Return the main result in one sentence: the largest significant difference, or the last score."""
    title, scale = key_title(comparison.metric), 100 if in_percent(comparison.metric) else 1

    def begin(row: Row) -> str:
        return f"{row.group.label} ends with a {title} of {row.final.text(scale)}{' %' * (scale == 100)}"

    rows = [(row, one, row.reference.label) for row in comparison.rows if (one := row.interval) and row.reference]
    if not rows:
        row = (max if rises(comparison.metric) else min)(comparison.rows, key=lambda row: row.final.mean)
        most = ", the best result" * (len(comparison.rows) > 1)
        return f"{begin(row)} ({counted(row.final.n, 'seed')}){most}."
    row, one, other = max(rows, key=lambda found: (found[1].significant, abs(found[1].mean)))
    low, high = sorted((math.copysign(1, one.mean) * one.low, math.copysign(1, one.mean) * one.high))
    mean, least, most = (f"{scale * x:,.{decimals(scale * one.half)}f}" for x in (abs(one.mean), low, high))
    words = f"{mean} [{least}, {most}]{' points' * (scale == 100)} {'more' if one.mean > 0 else 'less'} than {other}"
    doubt = "" if one.significant else ", which is not significantly different"
    return f"{begin(row)}, {words}{doubt} ({one.n} seeds, corrected 95 % confidence interval)."


# --- sections ---


def _lines(shown: Shown) -> list[Item]:
    items = [
        Item("curve", "Scores and other numbers", figure=figures.lines(shown, list(shown.metrics), 380), wide=True)
    ]
    for name, (title, keys) in LINES.items():
        if known := [key for key in keys if key in shown.metrics]:
            items.append(Item(name, title, figure=figures.lines(shown, known, 290)))
    return items


def _spreads(shown: Shown, groups: Sequence[SeedGroup], numbers_of: Callable[[OneRun], dict[str, Any]]) -> Columns:
    """Return the columns of the numbers of each run, as their spread by configuration."""
    found = [[numbers_of(run) for run in group.runs.values()] for group in groups]
    headings = dict.fromkeys(heading for rows in found for row in rows for heading in row)
    columns: Columns = {"configuration": shown.labels}
    for heading in headings:
        columns[heading] = [Spread.of([x for row in rows if (x := row.get(heading)) is not None]) for rows in found]
    return columns


def _results(shown: Shown, groups: Sequence[SeedGroup]) -> Item:
    def costs(run: OneRun) -> dict[str, Any]:
        found = {key_title(key): value for key, value in numbers.scores(run.records, ("test_", "val_")).items()}
        found |= {UNITS[axis]: values[-1] for axis, values in spent(run.records).items()}
        sent = {link: sum(record.get(f"bytes_{link}") or 0 for record in run.records) for link in LINKS}
        return found | {f"MB {key_title(link)}": count / 1e6 for link, count in sent.items() if count}

    columns = _spreads(shown, groups, costs)
    columns |= {"seeds": [len(group.runs) for group in groups]}
    means = ", mean ± standard deviation over seeds" * shown.several_seeds
    note = f"Last score of every run{means}; samples, simulated traffic and time of the whole run."
    return Item("results", "Scores and costs", note, columns)


def _compared(comparison: Comparison) -> list[Item]:
    """Return the tables of `fedmpi compare`."""
    items = []
    for place, (data, rows) in enumerate(comparison.tables.items()):
        table = {head or "configuration": cells for head, cells in table_of(comparison, rows).items()}
        title = ": ".join(filter(None, ("Comparison", data)))
        items.append(Item(f"comparison-{place}", title, " ".join(correction_of(rows)), dict(table)))
    return items


def _settings(shown: Shown, groups: Sequence[SeedGroup]) -> list[Item]:
    tables = [group.first.table for group in groups]
    apart = [key for key in differing(tables) if matters(key)]
    columns: Columns = {"key": apart}
    for label, table in zip(shown.labels, tables, strict=True):
        columns[label] = [table_value(table.get(key)) for key in apart]
    return [Item("differences", "Different settings", "", columns)] if apart else []


def _participation(shown: Shown) -> list[Item]:
    items = []
    if runs := shown.having("participation"):
        figure = figures.heat_map(runs, "participation", "client", "share of clients that were selected")
        items.append(Item("participation", "Selected clients by round", figure=figure, wide=True))
    else:
        items.append(Item("participation", "", "Participation was not recorded. Set logging.participants = true."))
    if runs := [run for run in runs if run["participation"]["evenness"]]:
        columns: Columns = {"run": [f"{run['label']}, seed {run['seed']}" for run in runs]}
        columns |= {title: [run["participation"]["evenness"][name] for run in runs] for name, title in FAIRNESS.items()}
        note = (
            "Effective share: (Σu)²/(N Σu²) for the numbers u of rounds of each of N clients. 1 and a Gini coefficient "
            "of 0: all participated equally often."
        )
        items.append(Item("evenness", "Participation fairness", note, columns))
    if runs := shown.having("strata"):
        figure = figures.heat_map(runs, "strata", "stratum", "share of the stratum's clients that were drawn")
        items.append(
            Item("strata", "Strata by round", "Each clustering numbers its strata anew.", None, figure, wide=True)
        )
    return items


def _clients(shown: Shown, groups: Sequence[SeedGroup]) -> list[Item]:
    """Return the table of the spread of scores over clients."""

    def spread(run: OneRun) -> dict[str, Any]:
        return {key_title(key): value for key, value in numbers.scores(run.records, CLIENT_SCORES).items()}

    columns = _spreads(shown, groups, spread)
    note = (
        "Every client counts once, except in weighted means. Worst and best 10 %: mean of these clients. Jain's index: "
        "(Σa)²/(N Σa²), 1 if all clients have the same score."
    )
    return [Item("served", "Scores over clients at the end", note, columns)] if len(columns) > 1 else []


def _runs(shown: Shown, runs: Sequence[OneRun]) -> Item:
    columns: Columns = {"run": [run.name for run in runs], "configuration": [one["label"] for one in shown.runs]}
    columns |= {"seed": [run.seed for run in runs], "rounds": [len(run.records) for run in runs]}
    columns |= {"ending": [run.ending for run in runs]}
    for key in ("ranks", "clients", "parameters"):
        columns[key] = [run.summary.get(key) for run in runs]
    versions = [run.summary.get("versions", {}) for run in runs]
    columns["versions"] = [", ".join(f"{name} {version}" for name, version in one.items()) for one in versions]
    return Item("runs", "Endings and versions", "", columns)


# --- HTML ---


def render_page(contents: dict[str, Any], library: str) -> str:
    """Return the page of some contents."""
    shown, sections = contents["shown"], contents["sections"]
    drawn = {item.name: item.figure for items in sections.values() for item in items if item.figure}
    data = {"common": COMMON, "figures": drawn, "datasets": {"runs": shown.runs}}
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
            f'<section id="{anchors[title]}"><h2>{title}</h2><div class="cards">{"".join(map(_item, items))}</div>'
            "</section>"
            for title, items in sections.items()
        ),
        "data": as_json(data).replace("<", "\\u003c"),
        "library": library.replace("</script", "<\\/script"),
    }
    pieces = resources.files("fedmpi.report").joinpath("page.html").read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def as_json(value: Any) -> str:
    """Return the value as JSON with five digits of every number, null if it is not finite."""
    text = json.dumps(json_value(value))
    short = json.loads(text, parse_float=lambda number: float(f"{float(number):.5g}"))
    return json.dumps(short, separators=(",", ":"), ensure_ascii=False)


def _item(item: Item) -> str:
    head = f"<h3>{html.escape(item.title)}</h3>" * bool(item.title)
    head += f'<p class="note">{html.escape(item.note)}</p>' * bool(item.note)
    if item.figure:
        wide = ' class="wide"' * item.wide
        return f'<figure id="{item.name}"{wide}>{head}<div class="chart"></div></figure>'
    table = _table(item.name, item.table) if item.table else ""
    return f'<div class="card wide" id="{item.name}">{head}{table}</div>'


def _table(name: str, columns: Columns) -> str:
    """Return columns by heading as HTML, with a link that downloads them as CSV."""
    from pandas import DataFrame  # slow to import

    frame = DataFrame({heading: [cell(value) for value in values] for heading, values in columns.items()})
    content = base64.b64encode(frame.to_csv(index=False).encode()).decode()
    link = f'<a class="csv" download="{name}.csv" href="data:text/csv;base64,{content}">CSV</a>'
    return f'{link}<div class="scroll">{frame.to_html(index=False, border=0)}</div>'


def cell(value: Any) -> str:
    """Return the text of a spread, a number or a text in a table."""
    if isinstance(value, Spread):
        return value.text()
    if isinstance(value, int | float):
        return number(value) if isinstance(value, float) else f"{value:,}"
    return "–" if value is None else str(value).strip().encode(errors="replace").decode()


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 run", "3 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
