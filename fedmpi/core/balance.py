"""What rows, steps and workers really cost, learned from measured seconds, so that all workers finish together.

Rank 0 learns it and sends the result with the plan: every rank computes the same assignment from what it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.types import Floats
from fedmpi.core.placement import STEP_ROWS

MEMORY = 0.95
"""Weight of a round in what is learned a round later: the last twenty rounds count most."""
MOST_STEP_ROWS = 1000.0
SLOWEST = 50.0
"""A worker is taken to be at most this much slower or faster than the average one."""
TRUST = 1e-4
"""How much the values assumed beforehand weigh beside measured ones: they decide where measurements say nothing."""
NOISE, LIKELY = 0.1, 30.0
"""Assumed errors: of measured seconds, relative, and of STEP_ROWS, in rows. Where all batches are of one size, rows and
steps tell too little apart, and noise alone would send the cost of a step from one bound to the other."""
PASSES = 3
"""Turns of the fit after a round; it goes on from the last one."""
STATE = "balance.rounds"


@dataclass(frozen=True)
class Balance:
    """What an assignment of participants to workers is made from."""

    step_rows: float = STEP_ROWS  # A step costs as much as this many rows
    speeds: Floats | None = None  # (workers,): Relative speeds of the workers, 1 on average; None = all alike

    def as_array(self) -> Floats:
        """As one array, for the plan, float64 (1 + workers,)."""
        return np.concatenate([[self.step_rows], [] if self.speeds is None else self.speeds])

    @classmethod
    def from_array(cls, values: Floats) -> Balance:
        """What the plan says; an empty array stands for planned costs and equal speeds."""
        return cls(float(values[0]), values[1:]) if len(values) else cls()

    def facts(self) -> dict[str, Any]:
        """For the record of the round that was spread by it; empty unless measured."""
        return {} if self.speeds is None else {"step_rows": self.step_rows, "worker_speeds": self.speeds.tolist()}


class BalanceLearner:
    """Learns the cost of a step and the workers' speeds: seconds = slowness_w · (rows + κ steps) · a.

    Least squares over all workers and past rounds, older ones forgotten slowly, each round weighed by its own length.
    Slownesses and costs are fitted in turns, starting from those of the round before.
    """

    def __init__(self, workers: int):
        # Sums over the rounds, a row a worker: rows², rows · steps, steps², rows · seconds, steps · seconds.
        self._sums = np.zeros((workers, 5))
        self._slowness = np.ones(workers)
        self._step_rows = STEP_ROWS

    @property
    def learns(self) -> bool:
        """Whether a plan depends on the seconds of the rounds before it."""
        return len(self._sums) > 0

    def observe(self, rows: Floats, steps: Floats, seconds: Floats) -> None:
        """Learn from a round."""
        working = (rows > 0) & (seconds > 0)
        if not len(self._sums) or not working.any():
            return
        length = float(seconds[working].mean())
        r, q, s = (np.where(working, values, 0.0) / length for values in (rows, steps, seconds))
        self._sums *= MEMORY
        self._sums += np.stack([r * r, r * q, q * q, r * s, q * s], axis=1)
        self._fit()

    def balance(self) -> Balance | None:
        """What has been learned so far; None before the first round."""
        if not self._sums.any():
            return None
        speeds = 1 / self._slowness
        return Balance(self._step_rows, speeds / speeds.mean())

    def as_array(self) -> Floats:
        """What has been learned so far, for the plan; empty before the first round."""
        learned = self.balance()
        return learned.as_array() if learned else np.empty(0)

    def _fit(self) -> None:
        rr, rq, qq, rs, qs = self._sums.T
        for _ in range(PASSES):
            slow = self._slowness
            pooled = (slow**2 @ rr, slow**2 @ rq, slow**2 @ qq, slow @ rs, slow @ qs)
            k = self._step_rows = _step_rows(*map(float, pooled))
            squares, products = rr + 2 * k * rq + k * k * qq, rs + k * qs
            row_seconds = float(slow @ products) / float(slow**2 @ squares)
            assumed = TRUST * float(squares.mean())
            slow = (products / row_seconds + assumed) / (squares + assumed)
            self._slowness = np.clip(slow / slow.mean(), 1 / SLOWEST, SLOWEST)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: sums and slownesses, float64 (workers, 6); nothing before the first round."""
        if not self._sums.any():
            return {}
        return {STATE: torch.from_numpy(np.column_stack([self._sums, self._slowness]))}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a checkpoint; by another number of workers it is only taken for what a step costs."""
        if STATE not in state or not len(self._sums):
            return
        saved: Floats = state[STATE].numpy()
        sums, slow = saved[:, :5], saved[:, 5:]
        if len(saved) == len(self._sums):
            self._sums, self._slowness = sums.copy(), slow[:, 0].copy()
        else:
            alike = (sums * np.hstack([slow**2] * 3 + [slow] * 2)).sum(axis=0) / len(self._sums)
            self._sums = np.tile(alike, (len(self._sums), 1))
        self._fit()


def _step_rows(rr: float, rq: float, qq: float, rs: float, qs: float) -> float:
    """κ = b/a of the least squares fit a · rows + b · steps = seconds, drawn towards STEP_ROWS, bounded."""
    if qq == 0:  # nothing but merged steps
        return STEP_ROWS
    row_seconds = (rs + STEP_ROWS * qs) / (rr + 2 * STEP_ROWS * rq + STEP_ROWS**2 * qq)
    assumed = (NOISE / (LIKELY * row_seconds)) ** 2
    rr, rq, qq = rr + assumed * STEP_ROWS**2, rq - assumed * STEP_ROWS, qq + assumed
    row, step = qq * rs - rq * qs, rr * qs - rq * rs
    if row <= 0:
        return MOST_STEP_ROWS
    return min(max(step / row, 0.0), MOST_STEP_ROWS)
