"""The page of a report: one HTML file that holds its data, its script and Vega-Lite, and asks nobody for anything.

What is drawn is made here as numbers (`page_contents`); `page.js` draws it. vl-convert brings Vega-Lite.
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
from fedmpi.report import panels
from fedmpi.report.configured import Configuration, configurations
from fedmpi.report.curves import TITLES, completed, curves, rounded, targets
from fedmpi.results.costs import AXES, Spread, spent
from fedmpi.results.gather import OneRun, differing, find_runs, read_runs, table_value

VEGA_LITE = "6.4"


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


def render_page(data: dict[str, Any], library: str) -> str:
    """The page of some contents."""
    files = resources.files("fedmpi.report")
    parts = {
        "title": html.escape(data["title"]),
        "style": files.joinpath("page.css").read_text(encoding="utf-8"),
        "data": json.dumps(json_value(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace(
            "<", "\\u003c"
        ),
        "library": library.replace("</script", "<\\/script"),
        "script": files.joinpath("page.js").read_text(encoding="utf-8"),
    }
    page = files.joinpath("page.html").read_text(encoding="utf-8")
    pieces = page.split("@@")  # text, name, text, name, …: what is put in is not searched again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


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
        "runs": [_run(g, run, len(ordered)) for g, run in ordered],
        "warnings": panels.warnings([run for _, run in ordered]),
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
    last = [panels.scores(run.records) for run in group.runs]
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
        "traffic": panels.traffic(group),
        "phases": panels.phases(group),
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


def _run(configuration: int, run: OneRun, runs: int) -> dict[str, Any]:
    found = {
        "participation": panels.participation(run, runs),
        "strata": panels.strata(run, runs),
        "view": panels.view(run, runs),
        "mediators": panels.mediators(run),
        "ranks": panels.ranks(run),
    }
    versions = run.summary.get("versions") or {}
    return {
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
