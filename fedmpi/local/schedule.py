"""The batches of one client: the local samples of every step. All engines share this one definition.

Epochs: each is a fresh permutation cut into batches of B; the last one is short or left out. Steps: each draws
min(B, n) new distinct samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.types import Ints

if TYPE_CHECKING:
    from fedmpi.local.work import LocalRule

STEPS_DRAWN_TOGETHER = 32


def batch_rows(rule: LocalRule, n: int) -> int:
    """Return the number of samples in a full batch of a client with n samples: min(B, n)."""
    return n if rule.batch_size is None else min(rule.batch_size, n)


def step_count(rule: LocalRule, n: int) -> int:
    """Return the number of steps of a client with n samples, without drawing any randomness."""
    if n == 0:
        return 0
    if rule.steps is not None:
        return rule.steps
    assert rule.epochs is not None
    size = batch_rows(rule, n)
    return rule.epochs * (n // size if rule.drop_last else -(-n // size))


def shrinking_sum(steps: int, shrinking: float) -> float:
    """Return Σ_{j<τ} (1 − s)^j, which is τ for s = 0; infinite on overflow.

    Parameters
    ----------
    steps : int
        τ.
    shrinking : float
        s.
    """
    if shrinking == 0:
        return float(steps)
    try:
        shrunk = -math.expm1(steps * math.log1p(-shrinking)) if shrinking < 0.5 else 1 - (1 - shrinking) ** steps
    except OverflowError:
        return math.inf
    return shrunk / shrinking


def effective_steps(steps: int, shrinking: float) -> float:
    """Return ‖a‖₁ of SGD with a proximal term: Σ_{j<τ} |1 − ημ|^j, which is τ without one (Wang et al. 2020).

    Parameters
    ----------
    steps : int
        τ.
    shrinking : float
        ημ; above 1 every step overshoots the start, and the weights of the gradients alternate in sign.
    """
    return shrinking_sum(steps, shrinking if shrinking <= 1 else 2 - shrinking)


def needs_order(rule: LocalRule, n: int) -> bool:
    """Check whether the batches depend on the random stream: not if every batch is the whole local set."""
    return batch_rows(rule, n) < n


def passes(rule: LocalRule, n: int, generator: np.random.Generator | None) -> Iterator[Ints | None]:
    """Yield the samples in the order of visits, one pass at a time; a pass is cut into batches of `batch_rows`."""
    if n == 0:
        return
    if not needs_order(rule, n):
        for _ in range(step_count(rule, n)):
            yield None
        return
    if generator is None:
        raise ValueError("batches smaller than the local set need a generator")
    size = batch_rows(rule, n)
    if rule.epochs is not None:
        for _ in range(rule.epochs):
            yield generator.permutation(n)[: n - n % size if rule.drop_last else n]
        return
    assert rule.steps is not None
    for first in range(0, rule.steps, STEPS_DRAWN_TOGETHER):
        count = min(STEPS_DRAWN_TOGETHER, rule.steps - first)
        yield np.concatenate([generator.choice(n, size, replace=False, shuffle=False) for _ in range(count)])


def schedule(rule: LocalRule, n: int, generator: np.random.Generator | None) -> list[Ints | None]:
    """Return all batches of a client."""
    size = batch_rows(rule, n)
    batches: list[Ints | None] = []
    for order in passes(rule, n, generator):
        if order is None:
            batches.append(None)
        else:
            batches.extend(order[first : first + size] for first in range(0, len(order), size))
    return batches
