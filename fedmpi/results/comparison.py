"""Groups of runs compared: means over seeds, costs up to a target, differences with confidence intervals; as tables.

Methods that were run with the same seeds share partition and initial model, so their difference is taken seed by seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from scipy import special

from fedmpi.common.errors import UserError
from fedmpi.common.terminal import paragraph, show_table
from fedmpi.common.types import Floats
from fedmpi.records.history import LINKS, SCORES, Record
from fedmpi.records.progress import is_number
from fedmpi.results.loading import OneRun, SeedGroup, by_data, grouped, notes_on

AXES = {
    "round": "round",
    "samples": "samples trained on",
    "megabytes": "megabytes on the simulated links",
    "seconds": "seconds",
    "virtual_seconds": "simulated seconds",
    "joules": "joules",
}
"""Quantities on the horizontal axis of a curve."""
UNITS = dict(zip(AXES, ("rounds", "samples", "MB", "seconds", "simulated s", "J"), strict=True))
LESS_IS_BETTER = re.compile(
    r"(loss|error|perplexity|mae|rmse|seconds|joules|gini|divergence|drift|clipped_fraction|_std)$"
    r"|^(kl_|bytes|stratum_spread|client_loss_|client_(tuned_|personal_)loss_)|epsilon"
)
MORE_IS_BETTER = re.compile(r"_jain$|^(client_use_effective|clients_used)$")
EQUAL = 1e-12
"""Values that differ by less of the largest are equal except for rounding."""
LEVEL = 0.95
"""Confidence level of a single interval."""
MINUS = re.compile(r"(?<![^\s\[(])-(?=\d)")
"""The sign of a number, and no hyphen."""


# --- keys of records ---


def spent(records: Sequence[Record]) -> dict[str, Floats]:
    """Return the amount spent at the end of each round, float64 (rounds,) for each of `AXES`.

    Simulated time only if every record has it (`devices`).
    """
    megabytes = [sum(record.get(f"bytes_{link}") or 0 for link in LINKS) / 1e6 for record in records]
    found = {
        "round": np.array([record["round"] + 1 for record in records], np.float64),
        "samples": np.cumsum([record.get("samples") or 0 for record in records], dtype=np.float64),
        "megabytes": np.cumsum(megabytes, dtype=np.float64),
        "seconds": np.cumsum([record.get("seconds") or 0.0 for record in records], dtype=np.float64),
    }
    for name in ("virtual_seconds", "joules"):
        if records and all(record.get(name) is not None for record in records):
            found[name] = np.cumsum([record[name] for record in records], dtype=np.float64)
    return found


def judged(records: Sequence[Record]) -> str:
    """The key that judges a run: its accuracy on the test part, or on the validation part if only that is recorded; the
    loss on them of tasks without one."""
    keys = ("test_accuracy", "val_accuracy", "test_loss", "val_loss")
    return next((key for key in keys if any(key in record for record in records)), "val_accuracy")


def better(key: str) -> Literal["more", "less"] | None:
    """Return whether more or less of a recorded value is better; None if neither is, as for participants."""
    if MORE_IS_BETTER.search(key):
        return "more"
    return "less" if LESS_IS_BETTER.search(key) else "more" if key.startswith(SCORES) else None


def rises(key: str) -> bool:
    """Return True if a target of the metric is reached from below."""
    return better(key) != "less"


def in_percent(metric: str) -> bool:
    """Return True if the metric is a share, shown in per cent."""
    return metric.endswith(("accuracy", "f1"))


def _curve(run: OneRun, metric: str) -> dict[int, float]:
    """Return the numbers of a run by the place of their record; "table.name" is in a table of a record."""
    outer, _, name = metric.partition(".")
    found: dict[int, Any] = {}
    for place, record in enumerate(run.records):
        table = record.get(outer)
        found[place] = table.get(name) if name and isinstance(table, dict) else record.get(metric)
    return {place: float(value) for place, value in found.items() if is_number(value)}


def _has(run: OneRun, metric: str) -> bool:
    """Check whether a run has the metric. The last value of a score must be finite."""
    last = [record[metric] for record in run.records if metric in record][-1:]
    return bool(_curve(run, metric)) and not (metric.startswith(SCORES) and last == [None])


# --- means and differences ---


def decimals(deviation: float) -> int:
    """Return the number of decimals that show two digits of a deviation; 2 if there is none."""
    return max(0, 1 - math.floor(math.log10(deviation))) if 0 < deviation < math.inf else 2


def number(value: float) -> str:
    """Return a number with four digits."""
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of `n` values; no deviation of fewer than two."""

    n: int
    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of some values; None without values."""
        if not len(values):
            return None
        mean, alike = float(np.mean(values)), np.ptp(values) <= EQUAL * np.max(np.abs(values))
        if len(values) < 2:
            return cls(len(values), mean, None)
        return cls(len(values), mean, 0.0 if alike else float(np.std(values, ddof=1)))

    def text(self, scale: float = 1) -> str:
        """Return the mean ± two digits of the deviation if that is not 0."""
        mean, deviation = scale * self.mean, scale * (self.deviation or 0.0)
        if not 0 < deviation < math.inf:
            return number(mean)
        places = decimals(deviation)
        return f"{mean:,.{places}f}\xa0±\xa0{deviation:,.{places}f}"


@dataclass(frozen=True)
class Difference:
    """Mean difference with its t interval."""

    n: int  # Seeds
    mean: float  # Mean difference and its standard error, in the unit of the values
    error: float
    level: float = LEVEL  # Confidence level of the interval

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return float(special.stdtrit(self.n - 1, (1 + self.level) / 2)) * self.error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference, not corrected."""
        return float(2 * special.stdtr(self.n - 1, -abs(self.mean) / self.error))

    @property
    def significant(self) -> bool:
        """The interval excludes zero."""
        return self.low > 0 or self.high < 0


def corrected(found: Sequence[Difference]) -> list[Difference]:
    """Widen the intervals of one table so that its false discovery rate is at most 1 - `LEVEL`.

    Benjamini and Hochberg (1995) reject R of the m hypotheses of no difference. Each interval gets the level
    1 - R rate/m of Benjamini and Yekutieli (2005), with R = 1 where none is rejected. So exactly R intervals exclude
    zero. A single difference keeps its interval.
    """
    m, rate = len(found), 1 - LEVEL
    passed = np.flatnonzero(np.sort([one.p for one in found]) <= rate * np.arange(1, m + 1) / max(m, 1))
    rejected = passed[-1] + 1 if len(passed) else 1
    return [replace(one, level=float(1 - rejected * rate / m)) for one in found]


def paired(values: Sequence[float], reference: Sequence[float], level: float = LEVEL) -> Difference:
    """Return the mean of `values - reference`, in the same order of two or more seeds, with its confidence interval
    (paired t): mean ± t_{n - 1} s/√n."""
    if len(values) != len(reference) or len(values) < 2:
        raise ValueError(f"{len(values)} and {len(reference)} seeds: a paired interval needs the same two or more")
    differences = np.subtract(values, reference)
    n = len(differences)
    return Difference(n, float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(n)), level)


# --- comparisons ---


@dataclass(frozen=True)
class Row:
    """A group in a table."""

    group: SeedGroup
    final: Spread  # The metric in the end
    best: Spread | None  # Of the best round; None of a metric of which neither more nor less is better
    reached: int  # Runs that reached the target
    costs: dict[str, Spread]  # Costs up to the target, over those
    # Reference of the comparison: the group itself if it is one; None if no reference is otherwise the same
    reference: SeedGroup | None = None
    differences: list[float] = field(default_factory=list)  # By seed that both have
    # Interval of the differences, corrected for the comparisons of the table; None for fewer than two seeds, and for
    # equal differences, which give no standard error
    interval: Difference | None = None


@dataclass(frozen=True)
class Comparison:
    """All tables of a comparison."""

    metric: str
    last: int  # Rounds in the end that are averaged over
    target: float | None
    reference: str | None  # As it was asked for
    tables: dict[str, list[Row]]  # By the name of the data
    left_out: list[OneRun]  # Runs that are not finished, or have no such metric in the end

    @property
    def rows(self) -> list[Row]:
        """The rows of all tables."""
        return [row for rows in self.tables.values() for row in rows]


def compare_runs(
    runs: Sequence[OneRun],
    by: Sequence[str] = (),
    metric: str | None = None,
    target: float | None = None,
    reference: str | None = None,
    last: int = 1,
) -> Comparison:
    """Compare the finished runs."""
    finished = [run for run in runs if run.summary]
    if not finished:
        raise UserError(f"no run is finished: {'; '.join(run.where for run in runs)}")
    chosen = metric or judged([record for run in finished for record in run.records])
    shown = [run for run in finished if _has(run, chosen)]
    if not shown:
        keys = dict.fromkeys(key for run in finished for record in run.records for key in record)
        known = [key for key in sorted(keys) if any(_has(run, key) for run in finished)]
        raise UserError(f"no run ends with a number {chosen}. Choose a --metric from: {', '.join(known) or 'none'}")
    if target is None and chosen.endswith("accuracy"):
        targets = {run.table.get("evaluation.target_accuracy") for run in finished}
        target = targets.pop() if len(targets) == 1 else None
    tables = {}
    for data, groups in by_data(grouped(shown, by)).items():
        finals = [{seed: _late(run, chosen, last) for seed, run in group.runs.items()} for group in groups]
        rows = [_row(group, list(own.values()), chosen, target) for group, own in zip(groups, finals, strict=True)]
        for place, group in enumerate(groups):
            if other := _reference_of(group, groups, reference):
                differences, interval = _difference(finals[place], finals[groups.index(other)])
                rows[place] = replace(rows[place], reference=other, differences=differences, interval=interval)
        intervals = iter(corrected([row.interval for row in rows if row.interval is not None]))
        tables[data] = [replace(row, interval=next(intervals)) if row.interval is not None else row for row in rows]
    found = Comparison(chosen, last, target, reference, tables, [run for run in runs if run not in shown])
    if not any(row.reference for row in found.rows):
        labels = "; ".join(row.group.label for row in found.rows)
        raise UserError(f"--reference {reference}: no group has this name or a part of it. Choose one of: {labels}")
    return found


def _reference_of(group: SeedGroup, groups: Sequence[SeedGroup], requested: str | None) -> SeedGroup | None:
    """Return the group whose name has the requested words and, besides them, only words of the given group's name.

    The longest such name counts; without a request, the first group.
    """

    def words(name: str) -> set[str]:
        return set("".join(name.lower().split()).split(","))

    if requested is None:
        return groups[0]
    own, asked = words(group.label), words(requested)
    fitting = [other for other in groups if asked <= words(other.label) and words(other.label) - asked <= own]
    return max(fitting, key=lambda other: len(words(other.label)), default=None)


def _row(group: SeedGroup, finals: Sequence[float], metric: str, target: float | None) -> Row:
    """Return the row of a group that is not compared yet."""
    curves = [(run, _curve(run, metric)) for run in group.runs.values()]
    choose = {"more": max, "less": min, None: None}[better(metric)]
    final, best = Spread.of(finals), Spread.of([choose(curve.values()) for _, curve in curves] if choose else [])
    assert final is not None  # a group has a run
    sign = 1 if rises(metric) else -1
    reached = []
    for run, curve in curves:
        places = [place for place, value in curve.items() if target is not None and sign * value >= sign * target]
        if places:
            reached.append({axis: x[places[0]] for axis, x in spent(run.records).items()})
    costs = {axis: Spread.of([one[axis] for one in reached if axis in one]) for axis in UNITS if axis != "seconds"}
    return Row(group, final, best, len(reached), {axis: cost for axis, cost in costs.items() if cost is not None})


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[list[float], Difference | None]:
    """Return the differences over the seeds that both have, and their interval."""
    if ours is theirs:
        return [], None
    common = [seed for seed in ours if seed in theirs]
    values, others = ([finals[seed] for seed in common] for finals in (ours, theirs))
    differences = np.subtract(values, others)
    if len(common) < 2 or np.ptp(differences) <= EQUAL * np.abs([values, others]).max():
        return differences.tolist(), None
    return differences.tolist(), paired(values, others)


def _late(run: OneRun, metric: str, last: int) -> float:
    """Return the mean over the last rounds that have a value."""
    curve = _curve(run, metric)
    return float(np.mean([value for place, value in curve.items() if place > max(curve) - last]))


# --- tables ---


def print_comparison(comparison: Comparison, screen: Console) -> None:
    """Print all tables, with notes below."""
    for data, rows in comparison.tables.items():
        _show(screen, table_of(comparison, rows), data)
    for line in _notes(comparison):
        print(paragraph(line, "note  ", "    "))


def _show(screen: Console, table: dict[str, list[str]], title: str) -> None:
    """Print a table; on a narrow terminal its columns below one another, each time after the first one."""
    heads, widths = list(table), [max(map(cell_len, (head, *cells))) + 3 for head, cells in table.items()]
    parts: list[list[int]] = [[0]]
    for number in range(1, len(heads)):
        if len(parts[-1]) > 1 and 1 + sum(widths[one] for one in [*parts[-1], number]) > screen.width:
            parts.append([0])
        parts[-1].append(number)
    for part in parts:
        shown = [heads[one] for one in part]
        show_table(screen, shown, [list(cells) for cells in zip(*(table[head] for head in shown), strict=True)], title)


def table_of(comparison: Comparison, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the columns of one table by heading."""
    scale, target = 100 if in_percent(comparison.metric) else 1, comparison.target
    late = f" (last {comparison.last} rounds)" if comparison.last > 1 else ""
    title = f"{comparison.metric.replace('_', ' ')}{', %' * (scale == 100)}{late}"
    columns = {
        "": [row.group.label for row in rows],
        "n": [str(row.final.n) for row in rows],
        title: [row.final.text(scale) for row in rows],
    }
    if any(row.best for row in rows):
        columns["best"] = [row.best.text(scale) if row.best else "" for row in rows]
    if others := {row.reference.label for row in rows if row.reference not in (None, row.group)}:
        name = others.pop() if len(others) == 1 else comparison.reference
        columns[f"difference to {name}"] = [_difference_text(row, scale) for row in rows]
    if target is not None:
        goal = f"{100 * target:g} %" if scale == 100 else f"{target:g}"
        for axis in dict.fromkeys(axis for row in rows for axis in row.costs) or ["round"]:
            columns[f"{UNITS[axis]} to {goal}"] = [_cost_text(row, axis) for row in rows]
    return columns


def _difference_text(row: Row, scale: float) -> str:
    if row.reference in (None, row.group):
        return ""
    if not row.differences:
        return "no seed in common"
    n, found = len(row.differences), row.interval
    if found is None:
        return f"{scale * np.mean(row.differences):+,.4g} (n = {n}{' alike' * (n > 1)}: no interval)"
    places, few = decimals(scale * found.half), f" (n = {n})" * (n < row.final.n)
    mean, low, high = (f"{scale * value:+,.{places}f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]{few}{' significant' * found.significant}"


def _cost_text(row: Row, axis: str) -> str:
    if axis not in row.costs:
        return "not reached"
    return row.costs[axis].text() + f" ({row.reached} of {row.final.n})" * (row.reached < row.final.n)


def correction_of(rows: Sequence[Row]) -> list[str]:
    """Return comparisons and seeds of a table and the correction of its intervals; nothing without intervals."""
    found = [row.interval for row in rows if row.interval is not None]
    if not found:
        return []
    fewest, most = (choose(one.n for one in found) for choose in (min, max))
    return [
        f"{len(found)} comparison{'s' * (len(found) > 1)} over {f'{fewest} to ' * (fewest < most)}{most} seeds. "
        f"In brackets: {100 * found[0].level:.4g} % confidence intervals (paired t), corrected for a false "
        'discovery rate of 5 % in this table (Benjamini-Hochberg, FCR). "significant": the interval excludes 0'
    ]


def _notes(comparison: Comparison) -> list[str]:
    """Return what has to be known besides the tables."""
    notes = notes_on(row.group for row in comparison.rows)
    for rows in comparison.tables.values():
        notes += correction_of(rows)
    if alone := [row.group.label for row in comparison.rows if row.reference is None]:
        notes.append(f"no row named {comparison.reference} is otherwise as {'; '.join(alone)}: no difference is shown")
    if len(comparison.tables) > 1:
        notes.append("runs on other data, or evaluated on another part, are in separate tables and are not compared")
    for finished, words in ((True, f"without {comparison.metric} in the end"), (False, "not finished")):
        if left := [run.where for run in comparison.left_out if bool(run.summary) == finished]:
            notes.append(f"left out, {words}: {', '.join(left)}")
    return notes


def as_csv(comparison: Comparison) -> str:
    """Return one line per group: numbers with all digits, the metric as recorded and not in per cent.

    Each key that distinguishes groups has a column, which is empty for groups without the key.
    """
    from pandas import DataFrame  # slow to import

    lines = []
    for row in comparison.rows:
        line: dict[str, Any] = {"data": row.group.data, "group": row.group.label, **row.group.values}
        line |= {"metric": comparison.metric, "seeds": " ".join(map(str, row.group.runs)), "n": row.final.n}
        line |= {"mean": row.final.mean, "std": row.final.deviation}
        line |= {"best_mean": row.best and row.best.mean, "best_std": row.best and row.best.deviation}
        line |= {"reference": row.reference.label if row.reference else None}
        line |= {"difference": np.mean(row.differences) if row.differences else None, "pairs": len(row.differences)}
        line |= {name: getattr(row.interval, name, None) for name in ("low", "high", "level", "significant")}
        line |= {"target": comparison.target, "reached": None if comparison.target is None else row.reached}
        for axis, cost in row.costs.items():
            line |= {f"{axis}_mean": cost.mean, f"{axis}_std": cost.deviation}
        lines.append(line)
    return str(DataFrame(lines, dtype=object).to_csv(index=False))


def as_latex(comparison: Comparison) -> str:
    """Return a tabular with the rules of booktabs for each table; stars mark significant differences."""
    from pandas import DataFrame  # slow to import

    texts = []
    for data, rows in comparison.tables.items():
        columns = table_of(comparison, rows)
        plain = DataFrame({head: [" ".join(cell.split()) for cell in cells] for head, cells in columns.items()})
        table = str(plain.to_latex(index=False, escape=True, column_format="l" + "r" * (len(columns) - 1)))
        notes = [" ".join(line.split()) for line in (data or comparison.metric, *correction_of(rows))]
        text = "".join(f"% {line}\n" for line in notes) + MINUS.sub("$-$", table)
        texts.append(text.replace(" significant", "*").replace('"significant"', "*"))
    return "\n".join(texts)
