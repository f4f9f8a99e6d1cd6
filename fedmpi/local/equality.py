"""Two engines' updates of two clients beside one another: on real samples, of texts those with most padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedmpi.common.errors import ClientFailure, Divergence
from fedmpi.common.types import Floats
from fedmpi.local.schedule import batch_rows
from fedmpi.local.timing import COMPARED_CLIENTS, Observed, differ_by_rounding, relative_difference
from fedmpi.local.work import ClientTask, DataSource, LocalRule, task_size

MOST_APART = 1e-3
"""Relative difference of two engines' updates after a few steps that is looked into: whether rounding explains it."""
MOST_LOOKED_AT = 64
"""Clients whose texts are searched for padding."""
PADDING = 0


@dataclass(frozen=True)
class Apart:
    """How far two engines lie apart on a rank's clients."""

    apart: float  # Relative to the first one's update; 0 without clients
    by_rounding: bool  # Whether `MOST_APART` or what one engine alone makes of a rounding explains it


def difference(
    engines: tuple[Observed, Observed],
    tasks: Sequence[ClientTask],
    start: Tensor,
    rule: LocalRule,
    round: int,
    source: DataSource,
) -> Apart:
    """How far the engines' updates of two of these tasks lie apart; nothing of the comparison is kept."""
    work = comparison_tasks(tasks, source, rule), start, rule, round, source.sizes
    apart = relative_difference(engines, *work)
    return Apart(apart, apart <= MOST_APART or differ_by_rounding(apart, engines[0], *work))


def diverges(failure: ClientFailure) -> bool:
    """Whether a client's training left the numbers in which anything is learned, and nothing else failed."""
    return isinstance(failure.__cause__, Divergence)


def comparison_tasks(tasks: Sequence[ClientTask], source: DataSource, rule: LocalRule) -> Sequence[ClientTask]:
    """The tasks on which engines are compared: of texts the two with most padding, cut to two batches of their most
    padded ones; all of them where nothing is padded."""
    if source.description.task != "text" or not tasks:
        return tasks
    places = np.unique(np.linspace(0, len(tasks) - 1, min(MOST_LOOKED_AT, len(tasks))).round().astype(int))
    found = []
    for task in (tasks[place] for place in places):
        shares = _padding(source.load(task.client, task.rows)[0])
        most = np.sort(np.argsort(-shares, kind="stable")[: 2 * batch_rows(rule, task_size(task, source.sizes))])
        rows = most if task.rows is None else task.rows[most]
        found.append((float(shares[most].mean()), replace(task, rows=rows)))
    found.sort(key=lambda one: -one[0])
    return [task for _, task in found[:COMPARED_CLIENTS]] if found[0][0] > 0 else tasks


def _padding(texts: Tensor) -> Floats:
    """Share of padding in every text, float64 (n,); none in an empty one, which shows little."""
    shares = (texts == PADDING).flatten(1).double().mean(1).cpu().numpy()
    return np.where(shares < 1, shares, 0.0)
