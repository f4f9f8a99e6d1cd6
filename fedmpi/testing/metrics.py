"""Checks of metrics: sums that add up over batches, of the samples given alone, and numbers of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedmpi.common.task_kinds import KINDS
from fedmpi.common.types import AnyArray
from fedmpi.tasks.metrics import Metric, MetricTally
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice
from fedmpi.testing.losses import made_up_outputs, task_of

CUTS = ((24,), (9, 15), (1, 1, 20, 2))
"""Sizes of the batches into which the same samples are cut."""
TOLERANCE = 1e-6
"""Of sums of float32 in another order, relative to the largest."""


def metric_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a metric but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: bare(s)))
    yield subject.check("same sums of the same outputs", lambda s: same_twice(lambda: bare(s)))
    yield subject.check("sums add up over batches", adds_up)
    yield subject.check("finite numbers", finite)


def bare(subject: Subject) -> list[AnyArray]:
    """The sums of some samples, by the part itself, without the care that runs take of it."""
    outputs, targets = made_up_outputs(task_of(subject))
    found = subject.made()(outputs, targets)
    demand(isinstance(found, dict), f"it returns {type(found).__name__}: return a dictionary of sums over the samples")
    return [np.asarray(found[name]) for name in sorted(found)]


def numbers(subject: Subject, batches: Sequence[int]) -> dict[str, float]:
    """What a run would record of some samples, cut into batches of these sizes."""
    kind = KINDS[task_of(subject)]
    outputs, targets = made_up_outputs(kind.name)
    tally = MetricTally([Metric(subject.part, subject.options)], kind)
    for x, y in zip(torch.split(outputs, list(batches)), torch.split(targets, list(batches)), strict=True):
        tally.add(x, y)
    return tally.numbers()


def adds_up(subject: Subject) -> str:
    """However the samples are cut into batches, the same numbers must come out."""
    whole = numbers(subject, CUTS[0])
    for cut in CUTS[1:]:
        _same(whole, numbers(subject, cut), f"in batches of {cut}")
    return f"{len(CUTS)} ways to cut {sum(CUTS[0])} samples, the same {', '.join(whole)}"


def _same(whole: dict[str, float], found: dict[str, float], how: str) -> None:
    for name, value in whole.items():
        near = np.isclose(found.get(name, np.nan), value, rtol=TOLERANCE, atol=TOLERANCE)
        demand(
            bool(near) and found.keys() == whole.keys(),
            f"{name} is {found.get(name, 'missing')} {how}, and {value} of all at once: return sums over the samples, "
            "which add up, and divide by their number in result(sums, samples) alone",
        )


def finite(subject: Subject) -> str:
    """Numbers that a record can hold; outputs and targets are left as they are."""
    outputs, targets = made_up_outputs(task_of(subject))
    kept, labels = outputs.clone(), targets.clone()
    bare_metric = subject.made()
    bare_metric(outputs, targets)
    demand(torch.equal(outputs, kept) and torch.equal(targets, labels), "it changes what it is given: copy it first")
    found = numbers(subject, CUTS[1])
    wrong = [name for name, value in found.items() if not np.isfinite(value)]
    demand(not wrong, f"{wrong and wrong[0]} is {wrong and found[wrong[0]]} for finite outputs")
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())
