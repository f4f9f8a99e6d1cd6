"""Schedules of the local learning rate: (lr, round, rounds) → rate of the round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.registry import Component, register


def rate(part: Component, schedule: Callable[..., Any], lr: float, round: int, rounds: int) -> float:
    """Return the learning rate of a round by a schedule; reject a result that is no rate."""
    with calling(part, round):
        found = schedule(lr, round, rounds)
    if not isinstance(found, int | float | np.number) or not 0 <= found < np.inf:
        raise refuse_result(part, f"returned {found!r}: return a learning rate of at least 0", round)
    return float(found)


@register("schedule", name="constant")
def constant(lr: float, round: int, rounds: int) -> float:
    """η in every round."""
    return lr


@register("schedule", name="inverse")
def inverse(lr: float, round: int, rounds: int) -> float:
    """η/(1 + t) in round t (FedSSO, section 4)."""
    return lr / (1 + round)


@register("schedule", name="cosine")
def cosine(lr: float, round: int, rounds: int) -> float:
    """η/2 (1 + cos(π t/T)): from η to zero over all T rounds."""
    return lr * 0.5 * (1 + float(np.cos(np.pi * round / rounds)))


@register("schedule", name="step")
def step(
    lr: float,
    round: int,
    rounds: int,
    *,
    every: Annotated[int, Field(ge=1, le=2**53)] = 30,
    factor: Annotated[float, Field(ge=1e-30, le=1e30)] = 0.1,
) -> float:
    """η · factor^⌊t/every⌋.

    Parameters
    ----------
    every : int
        Rounds between two changes of the rate.
    factor : float
        Factor of every change.
    """
    return lr * factor ** (round // every)
