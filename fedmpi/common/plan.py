"""The plan of a round: the server's decisions, sent to every rank as small typed arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fedmpi.common.types import AnyArray, Floats, Ints

Array = TypeVar("Array", bound=AnyArray)


def read_only(array: Array) -> Array:
    """Return a read-only view of the array."""
    seen = array.view()
    seen.flags.writeable = False
    return seen


@dataclass(frozen=True)
class Plan:
    """One round as decided by the server."""

    round: int  # t, counted from 0
    lr: float  # local learning rate of the round
    clients: Ints  # (m,): selected clients, sorted
    # (m,): raw factor of each selected client's update in the sum; times the samples it used, to the power `per_sample`
    coefficients: Floats
    per_sample: int  # unit of a coefficient. 0: an update; 1: a sample used; 2: a pair of samples used
    normalize: bool  # True divides the sum by its total weight
    probability: float = 1.0  # probability p with which a sample of a selected client is used (1 = all samples)
    # (m,): mediator of each selected client; empty in a star
    mediators: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    one_step: bool = False  # True in an initial probing round, in which every client takes a single step
    # (workers,): relative speeds of the workers, 1 on average; empty unless they are measured
    speeds: Floats = field(default_factory=lambda: np.empty(0))
    # (m,) each: local steps (0: those of the configuration), learning rate and number of samples of each selected
    # client; empty unless the cohort or a deadline sets them
    steps: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    rates: Floats = field(default_factory=lambda: np.empty(0))
    budgets: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    # (4, m + f): number, client, version and repeat of each start (`clients.events.Start`) in an asynchronous round:
    # first those of the m selected clients, then those that stay in flight, in the order of arrival
    flight: Ints = field(default_factory=lambda: np.empty((4, 0), np.int64))
    # (m,): staleness weights
    discounts: Floats = field(default_factory=lambda: np.empty(0))
    # Parts of the record about the decision, and columns of the events up to the step (rank 0 only, not sent)
    facts: dict[str, Any] = field(default_factory=dict)
    events: dict[str, AnyArray] = field(default_factory=dict)

    @property
    def own_work(self) -> bool:
        """True if the cohort sets the steps, learning rate or number of samples of each client."""
        return bool(len(self.steps) or len(self.rates) or len(self.budgets))

    def rate_of(self, client: int) -> float:
        """Return the learning rate of a selected client."""
        return float(self.rates[np.searchsorted(self.clients, client)]) if len(self.rates) else self.lr

    def arrays(self) -> list[AnyArray]:
        """Return the plan as arrays to broadcast; neighboring clients and equal coefficients are sent as one value."""
        clients, coefficients, participants = self.clients, self.coefficients, len(self.clients)
        if participants and clients[-1] - clients[0] == participants - 1 and not self.flight.size:
            clients = clients[:1]
        if participants and (coefficients == coefficients[0]).all():
            coefficients = coefficients[:1]
        whole = np.array([self.round, self.per_sample, self.normalize, participants, self.one_step], np.int64)
        real = np.array([self.lr, self.probability], np.float64)
        own = [self.steps, self.rates, self.budgets, self.flight, self.discounts]
        own = own if self.own_work or self.flight.size else []
        return [whole, real, clients, coefficients, self.mediators, self.speeds, *own]

    @classmethod
    def from_arrays(cls, arrays: list[AnyArray]) -> Plan:
        """Build the plan from arrays that another rank has sent."""
        whole, real, clients, coefficients, mediators, speeds, *own = arrays
        participants = int(whole[3])
        more: dict[str, Any] = dict(zip(("steps", "rates", "budgets", "flight", "discounts"), own, strict=False))
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
            normalize=bool(whole[2]),
            probability=float(real[1]),
            mediators=mediators,
            one_step=bool(whole[4]),
            speeds=speeds,
            **more,
        )
