"""The engine trial: engines that could do the same work are timed on a few real clients, their results thrown away.

Streams are keyed by client and round, so a trial uses up no random numbers and changes no result but the rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.arithmetic import explained_by_rounding
from fedmpi.common.types import Floats, Ints
from fedmpi.local.hooks import Hooks
from fedmpi.local.schedule import batch_rows, step_count
from fedmpi.local.work import ClientTask, Engine, LocalRule, Observer, task_size
from fedmpi.models.stacked.ahead import LEAST_STEPS

MOST_CLIENTS = 8
MOST_STEPS = 20
SECONDS = 0.3
PASSES = 2
COMPARED_CLIENTS, COMPARED_STEPS = 2, LEAST_STEPS
"""Fewer steps, and a wide first layer would be compared in another way than it is trained in."""


class Observed(Engine, Protocol):
    """An engine that shows every update to somebody."""

    observe: Observer | None
    hooks: Hooks | None


def time_engines(
    engines: Sequence[Observed], tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, sizes: Ints
) -> Floats:
    """Seconds that each engine needs for the same few tasks, measured after a pass that warms it up.

    The tasks are a spread over small and large ones, cut to at most MOST_STEPS steps, and as many of them as the first
    engine's warm-up manages in SECONDS (at least two).
    """
    if not tasks:
        return np.zeros(1 + len(engines))
    discarded = FloatSum(np.zeros(start.numel(), np.float32), start.device)
    short = _shortened(rule, max(task_size(task, sizes) for task in tasks))
    sample = [_cut(task, rule, sizes) for task in _spread(tasks, sizes)]
    seconds = []
    with _unobserved(engines):
        sample = _affordable(engines[0], sample, start, short, round, discarded)
        for engine in engines:
            engine.train(sample, start, short, round, discarded)
            seconds.append(min(_timed(engine, sample, start, short, round, discarded) for _ in range(PASSES)))
    return np.array([len(sample), *seconds])


def relative_difference(
    engines: Sequence[Observed], tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, sizes: Ints
) -> float:
    """How far the sums of two engines lie apart, relative to the first one's, after few steps of few clients.

    The steps are SGD's: Adam magnifies the rounding of gradients that are zero. Parameters are those of `time_engines`.
    """
    with _unobserved(engines):
        return _relative_difference(engines, (start, start), _few(tasks, sizes), rule, round)


def differ_by_rounding(
    apart: float,
    engine: Observed,
    tasks: Sequence[ClientTask],
    start: Tensor,
    rule: LocalRule,
    round: int,
    sizes: Ints,
) -> bool:
    """Whether the engine's own sum moves about as far as two engines lie apart, when the model is off by a rounding."""
    few = _few(tasks, sizes)
    with _unobserved([engine]):
        return explained_by_rounding(
            apart, lambda beside: _relative_difference((engine, engine), (start, beside), few, rule, round), start
        )


def _few(tasks: Sequence[ClientTask], sizes: Ints) -> list[ClientTask]:
    """The tasks on which engines are compared."""
    return _spread(tasks, sizes)[:COMPARED_CLIENTS] if tasks else []


def _relative_difference(
    engines: Sequence[Engine], starts: Sequence[Tensor], tasks: list[ClientTask], rule: LocalRule, round: int
) -> float:
    """How far the tasks' mean updates by two engines, each from its start, lie apart, relative to the first one's."""
    total = FloatSum(np.zeros(starts[0].numel(), np.float32), starts[0].device)
    rule = replace(rule, optimizer="sgd", epochs=None, steps=COMPARED_STEPS)
    lengths = []
    for engine, start, sign in zip(engines, starts, (1, -1), strict=True):
        if tasks:
            signed = [replace(task, coefficient=sign / len(tasks)) for task in tasks]
            engine.train(signed, start, rule, round, total)
        lengths.append(float(total.tensor.norm()))
    length, apart = lengths
    if not length:
        return math.inf if apart else 0.0
    return apart / length


@contextmanager
def _unobserved(engines: Sequence[Observed]) -> Iterator[None]:
    """Within: updates are formed one by one where somebody looks at them, but shown to nobody, and no algorithm keeps
    anything of them."""
    observers = [engine.observe for engine in engines]
    for engine, observer in zip(engines, observers, strict=True):
        engine.observe = None if observer is None else _ignore_update
    hooks = engines[0].hooks
    try:
        with on_trial(hooks) if hooks is not None else nullcontext():
            yield
    finally:
        for engine, observer in zip(engines, observers, strict=True):
            engine.observe = observer


@contextmanager
def on_trial(hooks: Hooks) -> Iterator[None]:
    """Within: clients are trained on trial, and nothing of it is kept or summed."""
    before, hooks.on_trial = hooks.on_trial, True
    try:
        yield
    finally:
        hooks.on_trial = before


def _ignore_update(client: int, update: Tensor) -> None:
    return None


def _spread(tasks: Sequence[ClientTask], sizes: Ints) -> list[ClientTask]:
    """Up to MOST_CLIENTS tasks, evenly over their order by size, mixed so that any first few span the range."""
    by_size = sorted(tasks, key=lambda task: (task_size(task, sizes), task.client))
    places = np.linspace(0, len(by_size) - 1, min(MOST_CLIENTS, len(by_size))).round().astype(int)
    return [by_size[place] for place in (*places[1::2], *places[0::2])]


def _shortened(rule: LocalRule, largest: int) -> LocalRule:
    """The rule with no more epochs, or steps, than give the largest client MOST_STEPS steps."""
    if rule.steps is not None:
        return replace(rule, steps=min(rule.steps, MOST_STEPS))
    assert rule.epochs is not None
    per_epoch = step_count(rule, largest) // rule.epochs
    return replace(rule, epochs=min(rule.epochs, max(1, MOST_STEPS // per_epoch)))


def _cut(task: ClientTask, rule: LocalRule, sizes: Ints) -> ClientTask:
    """The task on the first MOST_STEPS batches of its rows."""
    n = task_size(task, sizes)
    most = MOST_STEPS * batch_rows(rule, n)
    if n <= most:
        return task
    return replace(task, rows=np.arange(most) if task.rows is None else task.rows[:most])


def _affordable(
    engine: Engine, tasks: list[ClientTask], start: Tensor, rule: LocalRule, round: int, total: FloatSum
) -> list[ClientTask]:
    spent = 0.0
    for count, task in enumerate(tasks, 1):
        spent += _timed(engine, [task], start, rule, round, total)
        if spent > SECONDS and count >= 2:
            return tasks[:count]
    return tasks


def _timed(
    engine: Engine, tasks: list[ClientTask], start: Tensor, rule: LocalRule, round: int, total: FloatSum
) -> float:
    began = time.perf_counter()
    engine.train(tasks, start, rule, round, total)
    if start.device.type == "cuda":
        torch.cuda.synchronize(start.device)
    return time.perf_counter() - began
