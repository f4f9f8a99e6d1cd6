"""Which worker trains which participant when any rank may map any shard: equal planned work, whoever owns the data.

Pure functions of the plan, so that every rank comes to the same answer. Seconds measured in earlier rounds play no
part unless `topology.balance` = "measured" (see `balance`): they make the sums of two equal runs differ in their last
bits.
"""

from __future__ import annotations

import heapq

import numpy as np

from fedmpi.common.types import Floats, Ints
from fedmpi.local.work import LocalRule

STEP_ROWS = 8.0
"""A step costs as much as this many more rows in its batch (measured: 6 to 12 for small dense and convolutional
networks)."""
LONGEST_FIRST_UP_TO = 4096
"""Participants up to which the exact rule's loop is worth its time; more are dealt out in turns, as evenly."""
COMPARISONS = 1 << 14
"""Participants times workers up to which the same holds where workers differ in speed and all have to be compared."""
DEALS = 8
"""Parts in which the others are then dealt out, each making up for what the one before left uneven."""


def planned_work(rule: LocalRule, rows: Ints, merged: bool) -> tuple[Ints, Ints]:
    """The gradients of one sample and the steps that each participant is."""
    batch = np.maximum(rows if rule.batch_size is None else np.minimum(rows, rule.batch_size), 1)
    if rule.steps is not None:
        steps, seen = np.where(rows > 0, rule.steps, 0), rule.steps * np.minimum(rows, batch)
    else:
        assert rule.epochs is not None
        used = rows - rows % batch if rule.drop_last else rows
        steps, seen = rule.epochs * -(-used // batch), rule.epochs * used
    return seen, np.where(steps == 1, 0, steps) if merged else steps


def planned_cost(rule: LocalRule, rows: Ints, merged: bool, step_rows: float = STEP_ROWS) -> Floats:
    """The work that each participant is, in gradients of one sample, float64 (m,); see `planned_work`."""
    seen, steps = planned_work(rule, rows, merged)
    return seen + step_rows * steps


def longest_first(costs: Floats, workers: int, head_start: float = 0.0, speeds: Floats | None = None) -> Ints:
    """Give the costliest participant to the worker that would finish it first, then the next one, and so on.

    With equal speeds that is the worker with the least to do (Graham 1969).
    """
    if speeds is not None and (speeds != speeds[0]).any():
        return _first_to_finish(costs, speeds, head_start)
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
        in_turns = np.concatenate([least_busy_first, least_busy_first[::-1]])
        owners[rest] = np.resize(in_turns, len(rest))
    return owners


def _first_to_finish(costs: Floats, speeds: Floats, head_start: float) -> Ints:
    """`longest_first` for workers of unequal speeds; the smallest of many participants are taken to be alike."""
    order = np.argsort(-costs, kind="stable")
    owners = np.empty(len(costs), np.int64)
    compared = min(LONGEST_FIRST_UP_TO, COMPARISONS // len(speeds))
    slowness = (1 / speeds).tolist()
    finished = [head_start * slowness[0]] + [0.0] * (len(speeds) - 1)
    for place in order[:compared].tolist():
        cost = float(costs[place])
        would = [time + cost * slow for time, slow in zip(finished, slowness, strict=True)]
        owner = would.index(min(would))
        finished[owner] = would[owner]
        owners[place] = owner
    seconds = np.array(finished)
    for part in np.array_split(order[compared:], DEALS):
        if len(part):
            owners[part] = _dealt_out(len(part), float(costs[part].mean()) / speeds, seconds)
            seconds += np.bincount(owners[part], costs[part], len(speeds)) / speeds
    return owners


def _dealt_out(count: int, seconds: Floats, finished: Floats) -> Ints:
    """The workers of `count` like participants, each of `seconds` (workers,), given to who would finish them first."""
    if not seconds.any():
        return np.resize(np.arange(len(seconds)), count)
    # All stop together: so much each can finish until then, and as many more as rounding may take.
    end = (count + float((finished / seconds).sum())) / float((1 / seconds).sum())
    turns = np.maximum(0, np.ceil((end - finished) / seconds)).astype(np.int64) + 1
    workers = np.repeat(np.arange(len(seconds)), turns)
    turn = np.arange(len(workers)) - np.repeat(np.cumsum(turns) - turns, turns)
    ends = finished[workers] + (turn + 1) * seconds[workers]
    return workers[np.argsort(ends, kind="stable")[:count]]


def equal_parts(offsets: Ints, workers: int, head_start: float = 0.0, speeds: Floats | None = None) -> Ints:
    """Cut the participants, in their order, into neighbouring parts of equally many samples.

    Workers of unequal speeds get parts in proportion to them.
    For sampled rows: neighbours are drawn together, so that no rank draws the whole cohort's rows.
    """
    shares = np.ones(workers) if speeds is None else speeds / speeds.mean()
    whole, ends = float(offsets[-1]), np.concatenate([[0.0], np.cumsum(shares)])
    share = (whole + head_start) / workers
    if shares[0] * share <= head_start and workers > 1:
        targets = np.minimum(np.maximum(ends - ends[1], 0) * (whole / (ends[-1] - ends[1])), whole)
    else:
        targets = np.clip(ends * share - head_start, 0, whole)
    after = np.searchsorted(offsets, np.ceil(targets).astype(np.int64))  # as numbers of the offsets' type: no copy
    before = np.maximum(after - 1, 0)
    boundaries: Ints = np.where(targets - offsets[before] < offsets[after] - targets, before, after)
    boundaries[0], boundaries[-1] = 0, len(offsets) - 1
    return boundaries
