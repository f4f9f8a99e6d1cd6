"""Groups of runs compared: means over seeds, what it took to reach a target, differences with confidence intervals.

Methods that were run with the same seeds share partition and initial model, so their difference is taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy import special

from fedmpi.common.errors import UserError
from fedmpi.common.types import Floats
from fedmpi.records.history import LINKS, SCORES, Record
from fedmpi.results.loading import GroupsAlike, OneRun, SeedGroup, blocks_of, plain

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
        "diverged",
        "clipped_fraction",
        "_std",
    ),
    ("kl_", "bytes", "stratum_spread", "client_loss_", "client_tuned_loss_"),
)
"""Ends and beginnings of keys of which less is better."""
MORE_IS_BETTER = ("client_use_effective", "sample_use_effective", "clients_used", "samples_used", "rank_balance")
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
    """Return the spread of the spending (`spent`) of the runs at the end of one round each (`first_reached`)."""
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


def corrected(found: Sequence[Difference], rate: float = 1 - LEVEL) -> list[Difference]:
    """Widen the intervals of one table so that its false discovery rate is at most `rate`.

    Benjamini and Hochberg (1995) reject R of the m hypotheses of no difference. Each interval gets the level
    1 - R rate/m of Benjamini and Yekutieli (2005), with R = 1 where none is rejected. So exactly R intervals exclude
    zero. A single difference keeps its interval.
    """
    m = len(found)
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


COSTS = ("round", "samples", "megabytes", "virtual_seconds")
"""Costs that are counted up to a target."""
ALIKE = 1e-9
"""Differences that are equal but for rounding, relative to the values."""


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
    costs: dict[str, Spread] = field(default_factory=dict)  # What that took, over those


@dataclass(frozen=True)
class Comparison:
    """All tables of a comparison."""

    metric: str
    last: int  # Rounds in the end that are averaged over
    target: float | None
    blocks: list[tuple[GroupsAlike, list[Row]]]  # (GroupsAlike, list of Row)
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
    """Put runs beside one another."""
    finished = [run for run in runs if run.state == "finished"]
    if not finished:
        raise UserError(f"no run is finished: {'; '.join(run.state_text for run in runs)}")
    chosen = metric or judged([record for run in finished for record in run.records])
    without = [run for run in finished if not _has_metric(run, chosen)]
    if len(without) == len(finished):
        if any(_curve(run, chosen) for run in finished):
            raise UserError(f"{chosen} is no finite number in the end of any run: choose another --metric")
        numbers = (
            key for run in finished for record in run.records for key in record if _number(record, key) is not None
        )
        known = sorted(set(numbers))
        if not known:
            raise UserError(f"{finished[0].folder} has no records to compare: its metrics.jsonl is empty")
        lacking = f"no record has {chosen}: there are" if metric else "no run was evaluated: choose a --metric of"
        raise UserError(f"{lacking} {', '.join(known)}")
    blocks = blocks_of([run for run in finished if run not in without], by)
    goal = _usual_target(finished) if target is None and chosen.endswith("accuracy") else target
    pairs = [_references(block.groups, reference) for block in blocks]
    if reference is not None:
        _check_reference(reference, [(block.groups, pair) for block, pair in zip(blocks, pairs, strict=True)])
    tables = [(block, _rows(block.groups, pair, chosen, goal, last)) for block, pair in zip(blocks, pairs, strict=True)]
    left_out = [run for run in runs if run not in finished or run in without]
    return Comparison(chosen, last, goal, tables, left_out, reference)


def in_percent(metric: str) -> bool:
    """Return True if the metric is a share, shown in per cent."""
    return metric.endswith(("accuracy", "f1"))


def _references(groups: Sequence[SeedGroup], wanted: str | None) -> list[SeedGroup | None]:
    """Return the group with which each group is compared; itself for a reference."""
    if wanted is None:
        return [groups[0]] * len(groups)
    named = [group for group in groups if group.label == wanted]
    whole = named or [group for group in groups if group.is_called(wanted)]
    if whole:
        return [whole[0]] * len(groups)
    found: list[SeedGroup | None] = []
    keys = dict.fromkeys(key for group in groups for key, part in group.parts.items() if plain(part) == plain(wanted))
    for group in groups:
        alike = [
            other
            for other in groups
            for key in keys
            if plain(other.parts.get(key, "")) == plain(wanted)
            and all(group.values[named] == other.values[named] for named in _named(other) if named != key)
        ]
        found.append(max(alike, key=lambda other: _in_common(group, other), default=None))
    return found


def _in_common(group: SeedGroup, other: SeedGroup) -> int:
    return sum(group.values[key] == value for key, value in other.values.items())


def _named(group: SeedGroup) -> list[str]:
    """The keys of its name that its own sweep gave it; the others it has because another variant lists such a key."""
    given = [key for key in group.values if all(key in run.labels for run in group.runs.values())]
    return given or list(group.values)


def _check_reference(wanted: str, compared: Sequence[tuple[Sequence[SeedGroup], Sequence[SeedGroup | None]]]) -> None:
    """Reject a name that no group has, and a part of a name that leaves no other group to compare."""
    pairs = [one for groups, others in compared for one in zip(groups, others, strict=True)]
    labels = "; ".join(group.label for group, _ in pairs)
    if not any(other for _, other in pairs):
        raise UserError(f"--reference {wanted}: no group has this name; there are {labels}")
    whole = any(group.is_called(wanted) for group, _ in pairs)
    if not whole and len(pairs) > 1 and not any(other and other is not group for group, other in pairs):
        raise UserError(
            f"--reference {wanted}: every other group differs in more than this part of its name, so nothing would be "
            f"compared; give a whole name: there are {labels}"
        )


def _rows(
    groups: Sequence[SeedGroup],
    references: Sequence[SeedGroup | None],
    metric: str,
    target: float | None,
    last: int,
) -> list[Row]:
    """The rows of one table, their intervals corrected for the number of its comparisons."""
    rows = [_row(group, other, metric, target, last) for group, other in zip(groups, references, strict=True)]
    intervals = iter(corrected([row.interval for row in rows if row.interval is not None]))
    return [replace(row, interval=next(intervals)) if row.interval is not None else row for row in rows]


def _row(group: SeedGroup, reference: SeedGroup | None, metric: str, target: float | None, last: int) -> Row:
    finals = {seed: _late(run, metric, last) for seed, run in group.runs.items()}
    choose = {"more": max, "less": min, None: None}[better(metric)]
    best = [choose(_curve(run, metric).values()) for run in group.runs.values()] if choose else []
    reached = [cost for run in group.runs.values() if (cost := _cost(run, metric, target)) is not None]
    costs = {key: Spread.of([cost[key] for cost in reached if key in cost]) for key in COSTS}
    final, summit = Spread.of(list(finals.values())), Spread.of(best)
    assert final is not None  # a group has a run
    spreads = {key: spread for key, spread in costs.items() if spread is not None}
    row = Row(group, final, summit, reached=len(reached), costs=spreads)
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
    """Values by round, where there is one."""
    found = {int(record["round"]): _number(record, metric) for record in run.records}
    return {round: value for round, value in found.items() if value is not None}


def _has_metric(run: OneRun, metric: str) -> bool:
    """Return True if a run has the metric. The last value of a score must be finite."""
    numbers = [_number(record, metric) for record in run.records if _has(record, metric)]
    return any(value is not None for value in numbers) and not (metric.startswith(SCORES) and numbers[-1] is None)


def _late(run: OneRun, metric: str, last: int) -> float:
    """The mean over the last rounds that have a value."""
    curve = _curve(run, metric)
    end = max(curve)
    return float(np.mean([value for round, value in curve.items() if round > end - last]))


def _cost(run: OneRun, metric: str, target: float | None) -> dict[str, float] | None:
    """Return the amount spent up to the first record that reaches the target."""
    records: list[Record] = [{metric: _number(record, metric)} for record in run.records]
    reached = None if target is None else first_reached(records, target, metric)
    if reached is None:
        return None
    return {axis: float(values[reached]) for axis, values in spent(run.records).items() if axis in COSTS}


def _has(record: Record, key: str) -> bool:
    table, name = _place(record, key)
    return name in table


def _place(record: Record, key: str) -> tuple[Record, str]:
    """Return the table of a record that contains a key, and the key's name in it ("table.name" is in a table)."""
    outer, _, name = key.partition(".")
    table = record.get(outer)
    return (table, name) if name and isinstance(table, dict) else (record, key)


def _number(record: Record, key: str) -> float | None:
    table, name = _place(record, key)
    value = table.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _usual_target(runs: Sequence[OneRun]) -> float | None:
    targets = [run.table.get("evaluation.target_accuracy") for run in runs]
    return float(targets[0]) if targets[0] is not None and targets == [targets[0]] * len(targets) else None
