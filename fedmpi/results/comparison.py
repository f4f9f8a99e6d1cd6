"""Groups of runs compared: means and spreads over seeds, differences seed by seed, what it took to reach a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.records.history import LINKS, Record
from fedmpi.results.folders import FolderOfRun
from fedmpi.results.grouping import Block, Group, blocks_of
from fedmpi.results.intervals import Difference, paired

COSTS = ("rounds", "samples", "bytes", "virtual_seconds")
"""What is counted up to a target."""
ALIKE = 1e-9
"""Differences that are equal but for rounding, relative to the values."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds.

    Attributes
    ----------
    n : int
    mean : float
    std : float or None
        None for one seed.
    """

    n: int
    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value a seed."""
        return cls(len(values), float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Row:
    """A group in a table.

    Attributes
    ----------
    group : Group
    final, best : Spread
        The metric in the end, and of the best evaluation.
    reference : Group or None
        What it is compared with; None where there is nothing, and for a reference itself.
    common : tuple of int
        Seeds that both have.
    difference : float or None
        Its mean over those seeds; None where there is none.
    interval : Difference or None
        Its interval; None for fewer than two seeds, and where all differences are alike and tell no spread.
    reached : int
        Runs that reached the target.
    costs : dict
        What that took, over those.
    """

    group: Group
    final: Spread
    best: Spread
    reference: Group | None = None
    common: tuple[int, ...] = ()
    difference: float | None = None
    interval: Difference | None = None
    reached: int = 0
    costs: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """All tables of a comparison.

    Attributes
    ----------
    metric : str
    last : int
        Rounds in the end that are averaged over.
    target : float or None
    blocks : list of (Block, list of Row)
    left_out : list of FolderOfRun
        Runs that are not finished, or have no such metric.
    reference : str or None
        As it was asked for.
    """

    metric: str
    last: int
    target: float | None
    blocks: list[tuple[Block, list[Row]]]
    left_out: list[FolderOfRun]
    reference: str | None = None


def compare_runs(
    runs: Sequence[FolderOfRun],
    by: Sequence[str] = (),
    metric: str | None = None,
    target: float | None = None,
    reference: str | None = None,
    last: int = 1,
) -> Comparison:
    """Put runs beside one another.

    Parameters
    ----------
    runs : sequence of FolderOfRun
    by : sequence of str
        Keys that tell groups apart; what differs unless given.
    metric : str, optional
        A key of the records; test accuracy unless given, or validation accuracy where there is no other.
    target : float, optional
        A value of the metric; that of the configurations unless given.
    reference : str, optional
        A group's label, or a part of it: each group is compared with the one that differs in that part only. The first
        group unless given.
    last : int
        Rounds in the end that are averaged over.

    Raises
    ------
    UserError
        No run is finished, no record has the metric, no group has the reference, or runs cannot be put together.
    """
    finished = [run for run in runs if run.state == "finished"]
    if not finished:
        raise UserError(f"no run is finished: {'; '.join(run.told for run in runs)}")
    chosen = metric or _usual_metric(finished)
    without = [run for run in finished if not any(_number(record, chosen) is not None for record in run.records)]
    if len(without) == len(finished):
        known = sorted({key for run in finished for record in run.records for key in record if _number(record, key)})
        raise UserError(f"no record has {chosen}: there are {', '.join(known)}")
    blocks = blocks_of([run for run in finished if run not in without], by)
    goal = _usual_target(finished) if target is None and chosen.endswith("accuracy") else target
    pairs = [_references(block.groups, reference) for block in blocks]
    if reference is not None and not any(other for pair in pairs for other in pair):
        labels = [group.label for block in blocks for group in block.groups]
        raise UserError(f"--reference {reference}: no group has this name; there are {'; '.join(labels)}")
    tables = [
        (block, [_row(group, other, chosen, goal, last) for group, other in zip(block.groups, pair, strict=True)])
        for block, pair in zip(blocks, pairs, strict=True)
    ]
    left_out = [run for run in runs if run not in finished or run in without]
    return Comparison(chosen, last, goal, tables, left_out, reference)


def rises(metric: str) -> bool:
    """Whether more of it is better."""
    return not metric.endswith(("loss", "seconds")) and not metric.startswith("bytes")


def in_percent(metric: str) -> bool:
    """Whether it is a share, shown in per cent."""
    return metric.endswith(("accuracy", "f1"))


def _references(groups: Sequence[Group], wanted: str | None) -> list[Group | None]:
    """What each group is compared with; itself where it is a reference."""
    if wanted is None:
        return [groups[0]] * len(groups)
    whole = [group for group in groups if group.label.lower() == wanted.lower()]
    if whole:
        return [whole[0]] * len(groups)
    found: list[Group | None] = []
    keys = {key for group in groups for key, value in group.parts.items() if value.lower() == wanted.lower()}
    for group in groups:
        alike = [
            other
            for other in groups
            for key in keys
            if other.parts.get(key, "").lower() == wanted.lower()
            and all(group.parts.get(part) == value for part, value in other.parts.items() if part != key)
        ]
        found.append(alike[0] if alike else None)
    return found


def _row(group: Group, reference: Group | None, metric: str, target: float | None, last: int) -> Row:
    finals = {seed: _late(run, metric, last) for seed, run in group.runs.items()}
    best = [(max if rises(metric) else min)(_curve(run, metric).values()) for run in group.runs.values()]
    reached = [cost for run in group.runs.values() if (cost := _cost(run, metric, target)) is not None]
    counted = [key for key in COSTS if reached and all(key in cost for cost in reached)]
    costs = {key: Spread.of([cost[key] for cost in reached]) for key in counted}
    row = Row(
        group,
        Spread.of(list(finals.values())),
        Spread.of(best),
        reached=len(reached),
        costs=costs,
    )
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


def _curve(run: FolderOfRun, metric: str) -> dict[int, float]:
    """Values by round, where there is one."""
    found = {int(record["round"]): _number(record, metric) for record in run.records}
    return {round: value for round, value in found.items() if value is not None}


def _late(run: FolderOfRun, metric: str, last: int) -> float:
    """The mean over the last rounds that have a value."""
    curve = _curve(run, metric)
    return float(np.mean([value for round, value in curve.items() if round > max(curve) - last]))


def _cost(run: FolderOfRun, metric: str, target: float | None) -> dict[str, float] | None:
    """Rounds, samples, bytes and virtual seconds up to the first record that reaches the target."""
    if target is None:
        return None
    spent = {"rounds": 0.0, "samples": 0.0, "bytes": 0.0}
    if any("virtual_seconds" in record for record in run.records):
        spent["virtual_seconds"] = 0.0
    for record in run.records:
        spent["rounds"] += 1
        spent["samples"] += float(record.get("samples") or 0)
        spent["bytes"] += sum(float(record.get(f"bytes_{link}", 0)) for link in LINKS)
        if "virtual_seconds" in spent:
            spent["virtual_seconds"] += float(record.get("virtual_seconds") or 0)
        value = _number(record, metric)
        if value is not None and (value >= target if rises(metric) else value <= target):
            return spent
    return None


def _number(record: Record, key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _usual_metric(runs: Sequence[FolderOfRun]) -> str:
    tested = any("test_accuracy" in record for run in runs for record in run.records)
    return "test_accuracy" if tested else "val_accuracy"


def _usual_target(runs: Sequence[FolderOfRun]) -> float | None:
    targets = {run.config.get("evaluation.target_accuracy") for run in runs}
    return float(targets.pop()) if len(targets) == 1 and None not in targets else None
