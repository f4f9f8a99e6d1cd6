"""Which worker trains which participant when any rank may map any shard: equal planned work, whoever owns the data.

Pure functions of the plan, so that every rank comes to the same answer. Seconds measured in earlier rounds play no
part: they would make the sums of two equal runs differ in their last bits.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from fedmpi.local.work import Ints, LocalRule

Floats = NDArray[np.float64]

STEP_ROWS = 8.0
"""A step costs as much as this many more rows in its batch (measured: 6 to 12 for small dense and convolutional
networks)."""
LONGEST_FIRST_UP_TO = 4096
"""Participants up to which the exact rule's loop is worth its time; more are dealt out in turns, as evenly."""


def planned_cost(rule: LocalRule, rows: Ints, merged: bool) -> Floats:
    """The work that each participant is, in gradients of one sample.

    Parameters
    ----------
    rule : LocalRule
    rows : int64 (m,)
        Samples of each participant.
    merged : bool
        Whether participants with a single step are merged into one gradient and so have no step of their own.

    Returns
    -------
    float64 (m,)
    """
    batch = np.maximum(rows if rule.batch_size is None else np.minimum(rows, rule.batch_size), 1)
    if rule.steps is not None:
        steps, seen = np.where(rows > 0, rule.steps, 0), rule.steps * np.minimum(rows, batch)
    else:
        assert rule.epochs is not None
        steps, seen = rule.epochs * -(-rows // batch), rule.epochs * rows
    alone = np.where(steps == 1, 0, steps) if merged else steps
    return seen + STEP_ROWS * alone


def longest_first(costs: Floats, workers: int, head_start: float = 0.0) -> Ints:
    """Give the costliest participant to the worker with the least to do, then the next one, and so on (Graham 1969).

    Parameters
    ----------
    costs : float64 (m,)
    workers : int
    head_start : float
        What worker 0 has to do besides, in the same unit.

    Returns
    -------
    int64 (m,)
        The worker of each participant. The busiest has at most the largest cost more than the least busy.
    """
    order = np.argsort(-costs, kind="stable")
    owners = np.empty(len(costs), np.int64)
    loads = [(head_start if worker == 0 else 0.0, worker) for worker in range(workers)]
    heapq.heapify(loads)
    for place in order[:LONGEST_FIRST_UP_TO].tolist():
        load, worker = loads[0]
        owners[place] = worker
        heapq.heapreplace(loads, (load + costs[place], worker))
    rest = order[LONGEST_FIRST_UP_TO:]
    if len(rest):
        least_busy_first = np.array([worker for _, worker in sorted(loads)])
        there_and_back = np.concatenate([least_busy_first, least_busy_first[::-1]])
        owners[rest] = np.resize(there_and_back, len(rest))
    return owners


def equal_parts(offsets: Ints, workers: int, head_start: float = 0.0) -> Ints:
    """Cut the participants, in their order, into neighbouring parts of equally many samples.

    For sampled rows: neighbours are drawn together, so that no rank draws the whole cohort's rows.

    Parameters
    ----------
    offsets : int64 (m + 1,)
        Where each participant's samples begin, and how many all have.
    workers : int
    head_start : float
        Samples by which worker 0 gets fewer, but at least none.

    Returns
    -------
    int64 (workers + 1,)
        Worker w trains the participants at the places boundaries[w] … boundaries[w + 1] − 1 of the cohort.
    """
    whole, rank = float(offsets[-1]), np.arange(workers + 1)
    share = (whole + head_start) / workers
    if share <= head_start and workers > 1:
        targets = np.maximum(rank - 1, 0) * (whole / (workers - 1))
    else:
        targets = np.clip(rank * share - head_start, 0, whole)
    after = np.searchsorted(offsets, targets)
    before = np.maximum(after - 1, 0)
    boundaries: Ints = np.where(targets - offsets[before] < offsets[after] - targets, before, after)
    boundaries[0], boundaries[-1] = 0, len(offsets) - 1
    return boundaries
