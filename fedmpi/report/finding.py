"""The finding of a report: its sentence, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.report.curves import key_title
from fedmpi.results.comparison import Comparison, Difference, Row, compare_runs, in_percent, rises
from fedmpi.results.loading import OneRun, SeedGroup


def counted(count: int, noun: str) -> str:
    """Return a number of things: "1 run", "3 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cell(value: Any) -> str:
    """Return a number with four digits, a mean ± two digits of its deviation if that is not 0, or a text."""
    if isinstance(value, list | tuple):
        mean, deviation = value
        if not deviation or not math.isfinite(deviation):
            return cell(mean)
        return "\xa0±\xa0".join(with_decimals_of(1, mean, deviation, deviation))
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else str(value).strip().encode(errors="replace").decode()


def with_decimals_of(scale: float, value: float, spread: float, *others: float) -> list[str]:
    """Return numbers with the decimals that two digits of a spread have."""
    decimals = max(0, 1 - math.floor(math.log10(scale * spread))) if spread > 0 and math.isfinite(spread) else 2
    return [f"{scale * one:,.{decimals}f}" for one in (value, *others)]


def compared(runs: Sequence[OneRun]) -> Comparison | None:
    """Return the comparison of the configurations, with the user's target or else the best score that half of them
    reach; None if no run is finished, or none was evaluated."""
    try:
        found = compare_runs(runs)
    except UserError:
        return None
    best = sorted((row.best.mean for row in _rows(found) if row.best), reverse=rises(found.metric))
    middle = best[len(best) // 2] if best else 0.0
    return found if found.target is not None or not middle else compare_runs(runs, target=middle)


def _rows(comparison: Comparison) -> list[Row]:
    return [row for _, table in comparison.blocks for row in table]


def _differences(comparison: Comparison) -> list[tuple[Row, Difference, SeedGroup]]:
    """Return the rows that are compared with a reference, with their intervals and references."""
    return [(row, one, row.reference) for row in _rows(comparison) if (one := row.interval) and row.reference]


def finding(comparison: Comparison) -> str:
    """Return the main result in one sentence: the largest significant difference, or the last score."""
    title, scale = key_title(comparison.metric), 100 if in_percent(comparison.metric) else 1
    unit = " points" if scale == 100 else ""

    def score(row: Row) -> str:
        text = cell((scale * row.final.mean, row.final.deviation and scale * row.final.deviation))
        return f"{text}{' %' * (scale == 100)}"

    compared = _differences(comparison)
    if not compared:
        rows = _rows(comparison)
        best = (max if rises(comparison.metric) else min)(rows, key=lambda row: row.final.mean)
        most = "" if len(rows) == 1 else ", the best result"
        return f"{best.group.label} ends with a {title} of {score(best)} ({counted(best.final.n, 'seed')}){most}."
    row, one, other = max(compared, key=lambda found: (found[1].significant, abs(found[1].mean)))
    low, high = sorted((math.copysign(1, one.mean) * one.low, math.copysign(1, one.mean) * one.high))
    mean, low_text, high_text = with_decimals_of(scale, abs(one.mean), one.half, low, high)
    words = f"{mean} [{low_text}, {high_text}]{unit} {'more' if one.mean > 0 else 'less'} than {other.label}"
    doubt = "" if one.significant else ", which is not significantly different"
    about = f"{doubt} ({one.n} seeds, corrected 95 % confidence interval)"
    return f"{row.group.label} ends with a {title} of {score(row)}, {words}{about}."
