"""The plan of a round: what the server decides and sends to every rank, as small typed arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fedmpi.common.types import AnyArray, Floats, Ints

Array = TypeVar("Array", bound=AnyArray)


def read_only(array: Array) -> Array:
    """The same values, for those who shall not change them."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


@dataclass(frozen=True)
class Plan:
    """One round as decided by the server."""

    round: int  # t, counted from 0
    lr: float  # Local learning rate of the round
    clients: Ints  # (m,): Participants, sorted
    # (m,): Raw factor of each participant's update in the sum; times the samples it used, to the power `per_sample`
    coefficients: Floats
    per_sample: int  # 0: coefficients are those of updates; 1: of every sample used; 2: of every pair of samples used
    normalise: bool  # Whether the sum is divided by its total weight
    probability: float = 1.0  # Probability p with which a sample of a participant is used (1 = all of them)
    # (m,): Mediator of each participant; empty in a star
    mediators: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    one_step: bool = False  # Whether this is an opening round: everybody takes a single step
    # (c,): Clients that will take part in the next round, to be read ahead; empty where that is not known or of no use
    coming: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    # (1 + workers,): What a step costs in rows, and the workers' relative speeds, where they are measured
    # (`Balance.as_array`)
    balance: Floats = field(default_factory=lambda: np.empty(0))
    # What the record says about the decision (rank 0 only, not sent)
    facts: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> list[AnyArray]:
        """The plan as arrays to broadcast; neighbouring clients and equal coefficients are sent as one value."""
        clients, coefficients, participants = self.clients, self.coefficients, len(self.clients)
        if participants and clients[-1] - clients[0] == participants - 1:
            clients = clients[:1]
        if participants and (coefficients == coefficients[0]).all():
            coefficients = coefficients[:1]
        whole = np.array([self.round, self.per_sample, self.normalise, participants, self.one_step], np.int64)
        real = np.array([self.lr, self.probability], np.float64)
        return [whole, real, clients, coefficients, self.mediators, self.coming, self.balance]

    @classmethod
    def from_arrays(cls, arrays: list[AnyArray]) -> Plan:
        """The plan as another rank receives it."""
        whole, real, clients, coefficients, mediators, coming, balance = arrays
        participants = int(whole[3])
        if len(clients) < participants:
            clients = np.arange(clients[0], clients[0] + participants)
        if len(coefficients) < participants:
            coefficients = np.broadcast_to(coefficients[0], participants)
        return cls(
            round=int(whole[0]),
            lr=float(real[0]),
            clients=clients,
            coefficients=coefficients,
            per_sample=int(whole[1]),
            normalise=bool(whole[2]),
            probability=float(real[1]),
            mediators=mediators,
            one_step=bool(whole[4]),
            coming=coming,
            balance=balance,
        )


def learning_rate(schedule: str, lr: float, round: int, rounds: int, every: int = 1, factor: float = 1.0) -> float:
    """The local learning rate of a round.

    constant; inverse: η/(1 + t) (FedSSO, section 4); cosine: η/2 (1 + cos(π t/T)); step: η · factor^⌊t/every⌋.
    """
    if schedule == "inverse":
        return lr / (1 + round)
    if schedule == "cosine":
        return lr * 0.5 * (1 + float(np.cos(np.pi * round / rounds)))
    if schedule == "step":
        return lr * factor ** (round // every)
    return lr
