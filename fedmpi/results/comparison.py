"""Groups of runs compared: means over seeds, costs up to a target, differences with confidence intervals; as tables.

Methods that were run with the same seeds share partition and initial model, so their difference is taken seed by seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from scipy import special

from fedmpi.common.errors import UserError
from fedmpi.common.terminal import paragraph, show_table
from fedmpi.common.types import Floats
from fedmpi.records.history import LINKS, SCORES, Record
from fedmpi.results.loading import GroupsAlike, OneRun, SeedGroup, blocks_of

AXES = {
    "round": "round",
    "samples": "samples trained on",
    "megabytes": "megabytes on the simulated links",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}
"""Quantities on the horizontal axis of a curve."""
LESS_IS_BETTER = (
    (
        "loss",
        "error",
        "perplexity",
        "mae",
        "rmse",
        "seconds",
        "gini",
        "divergence",
        "drift",
        "clipped_fraction",
        "_std",
    ),
    ("kl_", "bytes", "stratum_spread", "client_loss_", "client_tuned_loss_"),
)
"""Ends and beginnings of keys of which less is better."""
MORE_IS_BETTER = ("client_use_effective", "sample_use_effective", "clients_used", "samples_used")
EQUAL = 1e-12
"""Values that differ by less of the largest are equal but for rounding."""


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
    if records and all(record.get("virtual_seconds") is not None for record in records):
        found["virtual_seconds"] = np.cumsum([record["virtual_seconds"] for record in records], dtype=np.float64)
    return found


def judged(records: Sequence[Record]) -> str:
    """The key that judges a run: its accuracy on the test part, or on the validation part if only that is recorded; the
    loss on them of tasks without one."""
    keys = ("test_accuracy", "val_accuracy", "test_loss", "val_loss")
    return next((key for key in keys if any(key in record for record in records)), "val_accuracy")


def better(key: str) -> Literal["more", "less"] | None:
    """Return whether more or less of a recorded value is better; None if neither is, as for participants."""
    if key.endswith("_jain"):
        return "more"
    if key.endswith(LESS_IS_BETTER[0]) or key.startswith(LESS_IS_BETTER[1]) or "epsilon" in key:
        return "less"
    return "more" if key.startswith(SCORES) or key in MORE_IS_BETTER else None


def rises(key: str) -> bool:
    """Return True if a target of the metric is reached from below."""
    return better(key) != "less"


def first_reached(records: Sequence[Record], target: float, key: str) -> int | None:
    """The index of the first record whose `key` has come up to `target` (a loss: down to it); None without one."""
    known = ((i, record[key]) for i, record in enumerate(records) if record.get(key) is not None)
    return next((i for i, value in known if (value >= target if rises(key) else value <= target)), None)


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


def up_to(spending: Sequence[dict[str, Floats]], firsts: Sequence[int | None], axis: str) -> Spread | None:
    """Return mean and spread of the runs' costs (`spent`), each at the end of its round in `first_reached`."""
    return Spread.of([float(x[axis][i]) for x, i in zip(spending, firsts, strict=True) if i is not None and axis in x])


LEVEL = 0.95


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
    """Return the mean of `values - reference` with its confidence interval (paired t): mean ± t_{n - 1} s/√n.

    Parameters
    ----------
    values, reference : sequence of float (n,)
        Results of two methods, in the same order of seeds; n >= 2.

    Raises
    ------
    ValueError
        Different numbers of seeds, or fewer than two.
    """
    if len(values) != len(reference) or len(values) < 2:
        raise ValueError(f"{len(values)} and {len(reference)} seeds: a paired interval needs the same two or more")
    differences = np.asarray(values, float) - np.asarray(reference, float)
    n = len(differences)
    return Difference(n, float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(n)), level)


COSTS = {"round": ("rounds", 1), "samples": ("samples", 0), "megabytes": ("MB", 1), "virtual_seconds": ("virtual s", 1)}
"""Costs that are counted up to a target, with their unit and number of digits."""
ALIKE = 1e-9
"""Differences that are equal but for rounding, relative to the values."""
MINUS = re.compile(r"(?<![^\s\[(])-(?=\d)")
"""The sign of a number, and no hyphen."""


@dataclass(frozen=True)
class Row:
    """A group in a table."""

    group: SeedGroup
    final: Spread  # The metric in the end
    best: Spread | None  # Of the best round; None of a metric of which neither more nor less is better
    # What it is compared with; None where there is nothing, and for a reference itself
    reference: SeedGroup | None = None
    common: tuple[int, ...] = ()  # Seeds that both have
    difference: float | None = None  # Its mean over those seeds; None where there is none
    # Its interval, corrected for the comparisons of the table; None for fewer than two seeds, and where all differences
    # are equal, which gives no standard error
    interval: Difference | None = None
    reached: int = 0  # Runs that reached the target
    costs: dict[str, Spread] = field(default_factory=dict)  # Costs up to the target, over those


@dataclass(frozen=True)
class Comparison:
    """All tables of a comparison."""

    metric: str
    last: int  # Rounds in the end that are averaged over
    target: float | None
    blocks: list[tuple[GroupsAlike, list[Row]]]
    left_out: list[OneRun]  # Runs that are not finished, or have no such metric in the end
    reference: str | None = None  # As it was asked for


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
    shown = [run for run in finished if _has_metric(run, chosen)]
    if not shown:
        if any(_curve(run, chosen) for run in finished):
            raise UserError(f"no run ends with a finite value of {chosen}. Choose another --metric")
        keys = dict.fromkeys(key for run in finished for record in run.records for key in record)
        known = [key for key in sorted(keys) if any(_curve(run, key) for run in finished)]
        raise UserError(f"no record has {chosen}. Choose a --metric from: {', '.join(known) or 'none'}")
    if target is None and chosen.endswith("accuracy"):
        targets = {run.table.get("evaluation.target_accuracy") for run in finished}
        target = targets.pop() if len(targets) == 1 else None
    blocks = [(block, _rows(block.groups, reference, chosen, target, last)) for block in blocks_of(shown, by)]
    rows = [row for _, table in blocks for row in table]
    alone = len(rows) == 1 and rows[0].group.keys_of(reference)  # there is nothing to compare yet
    if reference is not None and not alone and not any(row.reference or row.group.is_called(reference) for row in rows):
        labels = "; ".join(row.group.label for row in rows)
        raise UserError(
            f"--reference {reference}: no group has this name, or all differ in more than this part of it. "
            f"Choose one of: {labels}"
        )
    return Comparison(chosen, last, target, blocks, [run for run in runs if run not in shown], reference)


def in_percent(metric: str) -> bool:
    """Return True if the metric is a share, shown in per cent."""
    return metric.endswith(("accuracy", "f1"))


def _rows(
    groups: Sequence[SeedGroup], reference: str | None, metric: str, target: float | None, last: int
) -> list[Row]:
    """Return the rows of one table, their intervals corrected for the number of its comparisons."""
    rows = [_row(group, _reference_of(group, groups, reference), metric, target, last) for group in groups]
    intervals = iter(corrected([row.interval for row in rows if row.interval is not None]))
    return [replace(row, interval=next(intervals)) if row.interval is not None else row for row in rows]


def _reference_of(group: SeedGroup, groups: Sequence[SeedGroup], wanted: str | None) -> SeedGroup | None:
    """Return the group with which a group is compared: the one of this name, else the most similar with such a part.

    A group with such a part is equal in all other values that its own sweep gave it.
    """
    if whole := [other for other in groups if wanted is None or other.is_called(wanted)]:
        return whole[0]
    alike = [
        other
        for other in groups
        for key in other.keys_of(wanted)
        if all(group.values[name] == other.values[name] for name in other.given if name != key)
    ]
    return max(alike, key=lambda other: sum(group.values[key] == x for key, x in other.values.items()), default=None)


def _row(group: SeedGroup, reference: SeedGroup | None, metric: str, target: float | None, last: int) -> Row:
    runs = group.runs.values()
    finals = {seed: _late(run, metric, last) for seed, run in group.runs.items()}
    choose = {"more": max, "less": min, None: None}[better(metric)]
    best = [choose(_curve(run, metric).values()) for run in runs] if choose else []
    final = Spread.of(list(finals.values()))
    assert final is not None  # a group has a run
    curves: list[list[Record]] = [[{metric: _number(record, metric)} for record in run.records] for run in runs]
    firsts = [None if target is None else first_reached(curve, target, metric) for curve in curves]
    costs = {key: up_to([spent(run.records) for run in runs], firsts, key) for key in COSTS}
    reached = {key: spread for key, spread in costs.items() if spread is not None}
    row = Row(group, final, Spread.of(best), reached=len(firsts) - firsts.count(None), costs=reached)
    if reference is None or reference is group:
        return row
    theirs = {seed: _late(run, metric, last) for seed, run in reference.runs.items()}
    common = tuple(seed for seed in finals if seed in theirs)
    ours, others = [finals[seed] for seed in common], [theirs[seed] for seed in common]
    differences = np.subtract(ours, others)
    spread = len(common) > 1 and np.ptp(differences) > ALIKE * max(np.abs(ours).max(), np.abs(others).max())
    interval = paired(ours, others) if spread else None
    mean = float(differences.mean()) if common else None
    return replace(row, reference=reference, common=common, difference=mean, interval=interval)


def _curve(run: OneRun, metric: str) -> dict[int, float]:
    """Return values by round, where there is one."""
    found = {int(record["round"]): _number(record, metric) for record in run.records}
    return {round: value for round, value in found.items() if value is not None}


def _has_metric(run: OneRun, metric: str) -> bool:
    """Check whether a run has the metric. The last value of a score must be finite."""
    last = [record[metric] for record in run.records if metric in record][-1:]
    return bool(_curve(run, metric)) and not (metric.startswith(SCORES) and last == [None])


def _late(run: OneRun, metric: str, last: int) -> float:
    """Return the mean over the last rounds that have a value."""
    curve = _curve(run, metric)
    end = max(curve)
    return float(np.mean([value for round, value in curve.items() if round > end - last]))


def _number(record: Record, key: str) -> float | None:
    """Return a number of a record; "table.name" is in a table."""
    outer, _, name = key.partition(".")
    table = record.get(outer)
    value = table.get(name) if name and isinstance(table, dict) else record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- tables ---


def print_comparison(comparison: Comparison, screen: Console) -> None:
    """Print every block as a table, with notes below."""
    several, wanted = len(comparison.blocks) > 1, comparison.reference
    notes = []
    for block, rows in comparison.blocks:
        _show(screen, table_of(comparison, rows), block.title if several else "")
        for line in (*block.notes, *correction_of(rows)):
            print(paragraph(line, "note  ", "    "))
        others = [row.group for row in rows if row.reference is None and wanted is not None]
        if alone := [one.label for one in others if not one.is_called(wanted) and not one.keys_of(wanted)]:
            words = f"no row named {wanted} is otherwise as {'; '.join(alone)}: no difference is shown"
            notes.append(f"{block.title}: {words}" if several else words)
    if several:
        notes.append("runs on other data, or evaluated on another part, are in separate tables and are not compared")
    for line in notes:
        print(paragraph(line, "note  ", "    "))
    for line in _left_out(comparison):
        print(paragraph(line, "left out: ", "    "))


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


def correction_of(rows: Sequence[Row], mark: str = '"significant"') -> list[str]:
    """Return comparisons and seeds of a table and the correction of its intervals; nothing without intervals."""
    found = [row.interval for row in rows if row.interval is not None]
    if not found:
        return []
    seeds = [str(one.n) for one in sorted(found, key=lambda one: one.n)]
    return [
        f"{len(found)} comparison{'s' * (len(found) > 1)} over {' to '.join(dict.fromkeys((seeds[0], seeds[-1])))} "
        f"seeds. In brackets: {100 * found[0].level:.4g} % confidence intervals (paired t), corrected for a false "
        f"discovery rate of 5 % in this table (Benjamini-Hochberg, FCR). {mark}: the interval excludes 0"
    ]


def _left_out(comparison: Comparison) -> list[str]:
    """Return the runs without a place in the tables, those of one reason in a line."""
    kinds: dict[str, list[str]] = {}
    for run in comparison.left_out:
        kinds.setdefault(f"without {comparison.metric} in the end" if run.summary else "not finished", []).append(
            run.where
        )
    return [f"{kind}: {', '.join(runs)}" for kind, runs in kinds.items()]


def as_csv(comparison: Comparison) -> str:
    """Return one line per group: numbers with all digits, the metric as recorded and not in per cent.

    Each key that distinguishes groups has a column, which is empty for groups without the key.
    """
    from pandas import DataFrame  # slow to import

    lines: list[dict[str, object]] = []
    for block, rows in comparison.blocks:
        for row in rows:
            line: dict[str, object] = {"block": block.title, "group": row.group.label, **row.group.values}
            line |= {"metric": comparison.metric, "seeds": " ".join(map(str, row.group.runs)), "n": row.final.n}
            line |= {"mean": row.final.mean, "std": row.final.deviation}
            line |= {"best_mean": row.best and row.best.mean, "best_std": row.best and row.best.deviation}
            line |= {"reference": row.reference.label if row.reference else None, "difference": row.difference}
            line["common_seeds"] = " ".join(map(str, row.common))
            line |= {name: getattr(row.interval, name, None) for name in ("low", "high", "level", "significant")}
            line["comparisons"] = sum(one.interval is not None for one in rows) if row.interval else None
            line |= {"target": comparison.target, "reached": None if comparison.target is None else row.reached}
            for key, cost in row.costs.items():
                line |= {f"{key}_mean": cost.mean, f"{key}_std": cost.deviation}
            lines.append(line)
    return str(DataFrame(lines, dtype=object).to_csv(index=False))


def as_latex(comparison: Comparison) -> str:
    """Return a tabular with the rules of booktabs for each block; stars mark significant differences."""
    from pandas import DataFrame  # slow to import

    texts = []
    for block, rows in comparison.blocks:
        columns = table_of(comparison, rows, "*")
        plain = DataFrame({head: [" ".join(cell.split()) for cell in cells] for head, cells in columns.items()})
        table = str(plain.to_latex(index=False, escape=True, column_format="l" + "r" * (len(columns) - 1)))
        notes = (" ".join(line.split()) for line in (block.title or comparison.metric, *correction_of(rows, "*")))
        texts.append("".join(f"% {line}\n" for line in notes) + MINUS.sub("$-$", table))
    return "\n".join(texts)


def table_of(comparison: Comparison, rows: Sequence[Row], mark: str = " significant") -> dict[str, list[str]]:
    """Return the columns of one block by heading; `mark` follows significant differences."""
    share, target = in_percent(comparison.metric), comparison.target
    late = f" (last {comparison.last} rounds)" if comparison.last > 1 else ""
    references = {row.reference.label for row in rows if row.reference is not None}
    columns = {
        "": [row.group.label for row in rows],
        "n": [str(row.final.n) for row in rows],
        f"{comparison.metric.replace('_', ' ')}{', %' * share}{late}": [_spread(row.final, share) for row in rows],
    }
    if any(row.best is not None for row in rows):
        columns["best"] = [_spread(row.best, share) for row in rows]
    if references:
        name = references.pop() if len(references) == 1 else comparison.reference
        columns[f"difference to {name}"] = [_difference(row, share, mark) for row in rows]
    if target is not None:
        goal = f"{100 * target:g} %" if share else f"{target:g}"
        for key in dict.fromkeys(key for row in rows for key in row.costs) or ["round"]:
            columns[f"{COSTS[key][0]} to {goal}"] = [_cost(row, key) for row in rows]
    return columns


def _difference(row: Row, share: bool, mark: str) -> str:
    if row.reference is None:
        return ""
    if row.difference is None:
        return "no seed in common"
    text = _text(row.difference, share, "+")
    found = row.interval
    if found is None:
        alike = "" if len(row.common) == 1 else " alike"
        return f"{text} (n = {len(row.common)}{alike}: no interval)"
    few = f" (n = {found.n})" if found.n < row.final.n else ""
    interval = f"[{_text(found.low, share, '+')}, {_text(found.high, share, '+')}]"
    return f"{text} {interval}{few}{mark if found.significant else ''}"


def _cost(row: Row, key: str) -> str:
    if key not in row.costs:
        return "not reached"
    cost, digits = row.costs[key], COSTS[key][1]
    text = f"{cost.mean:,.{digits}f}"
    text += f" ± {cost.deviation:,.{digits}f}" if cost.deviation is not None else ""
    return text if row.reached == row.final.n else f"{text} ({row.reached} of {row.final.n})"


def _spread(spread: Spread | None, share: bool) -> str:
    if spread is None:
        return ""
    text = _text(spread.mean, share)
    return text if spread.deviation is None else f"{text} ± {_text(spread.deviation, share)}"


def _text(value: float, share: bool, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f}" if share else f"{value:{sign}.4g}"
