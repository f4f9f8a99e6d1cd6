"""The privacy ledger of the size queries: the ε each client has spent so far, by basic composition.

ε adds up over the answers of a client (Dwork and Roth 2014, Theorem 3.16). A memoised answer is drawn once and
repeated, which reveals nothing new: it is paid for once. A client whose size gets known otherwise, because it answers
unclipped above M − 1 or because n_k is used openly elsewhere, has no guarantee: its ε is infinite from then on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedmpi.common.types import Floats, Ints


@dataclass(frozen=True)
class LedgerEntry:
    """The ledger after a round."""

    epsilon_round: float  # The largest ε a client spent in this round (0 when all answers were repeats)
    # The largest ε a client has spent so far, and the mean over all clients; infinite once one is unprotected
    epsilon_max: float
    epsilon_mean: float
    unprotected: int = 0  # Clients whose size is known by now, whatever they answered


class PrivacyLedger:
    """What every client has spent on answering the size query."""

    def __init__(self, clients: int, epsilon: float, memoise: bool = False):
        self.epsilon = epsilon
        self.memoise = memoise
        self._answers = np.zeros(clients, np.int64)
        self._exposed = np.zeros(clients, bool)

    def record(self, asked: Ints | None, exposed: Ints | None = None) -> LedgerEntry:
        """Enter one query."""
        answering = slice(None) if asked is None else asked
        before = self._answers[answering]
        fresh = bool(before.size) and not (self.memoise and before.min() > 0)
        if self.memoise:
            self._answers[answering] = 1
        else:
            self._answers[answering] += 1
        spent = self.epsilon if fresh else 0.0
        if exposed is not None and not self._exposed[exposed].all():
            self._exposed[exposed] = True
            spent = math.inf
        unprotected = int(np.count_nonzero(self._exposed))
        if unprotected:
            return LedgerEntry(spent, math.inf, math.inf, unprotected)
        largest, mean = self._answers.max(initial=0), self._answers.mean() if self._answers.size else 0.0
        so_far = (float(self.epsilon * largest), float(self.epsilon * mean)) if largest else (0.0, 0.0)
        return LedgerEntry(spent, *so_far)

    def spent(self) -> Floats:
        """ε spent so far by every client, float64 (N,)."""
        if math.isinf(self.epsilon):
            return np.where((self._answers > 0) | self._exposed, math.inf, 0.0)
        return np.where(self._exposed, math.inf, self._answers * self.epsilon)

    def state(self) -> dict[str, Ints]:
        """The ledger as arrays, for a checkpoint."""
        return {"answers": self._answers.copy(), "exposed": np.flatnonzero(self._exposed)}

    def load(self, state: dict[str, Ints]) -> None:
        """Take over the ledger of a checkpoint."""
        self._answers = state["answers"].copy()
        self._exposed[:] = False
        self._exposed[state["exposed"]] = True
