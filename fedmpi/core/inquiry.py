"""What all ranks find out about single clients for the sampler: of its candidates, and of those who took part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from fedmpi.clients.numbers import ClientNumbers
from fedmpi.clients.sampler import ClientSampler
from fedmpi.common.decorators import MEASURABLE
from fedmpi.common.plan import Plan
from fedmpi.common.types import Floats, Ints
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.mpi import Cluster

Measure = Callable[[int, Tensor, Ints, Sequence[str]], Floats]
TrialNorms = Callable[[int, Tensor, Ints, Ints], Floats]


class Inquiry:
    """Measures clients where their data is, and tells rank 0."""

    def __init__(
        self,
        cluster: Cluster,
        sampler: ClientSampler,
        numbers: ClientNumbers,
        owned: tuple[int, int],
        measure: Measure | None,
        observer: UpdateObserver | None,
        trial: TrialNorms,
    ):
        self.cluster, self.sampler, self.numbers, self.owned = cluster, sampler, numbers, owned
        self.measure, self.observer, self.trial = measure, observer, trial
        self.measured = tuple(name for name in sampler.numbers if name in MEASURABLE)

    @staticmethod
    def measures(sampler: ClientSampler) -> bool:
        """Whether the sampler wants anything measured that training and the clock do not tell."""
        return bool({*sampler.measures, *sampler.numbers} & set(MEASURABLE))

    def candidates(self, t: int, model: Tensor, wanted: Ints | None) -> dict[str, Floats]:
        """Numbers of the sampler's candidates (c,) on the current model, float64 (N,) each, NaN for all others.

        All but the seconds, which rank 0 counts itself. A collective call; `wanted` is rank 0's, and so is the result
        ({} elsewhere).
        """
        (everybody,) = self.cluster.broadcast([wanted] if wanted is not None else None)
        names = tuple(name for name in self.sampler.measures if name != "seconds")
        if not names:
            return {}
        gathered = self._gathered(t, model, everybody, names)
        if gathered is None:
            return {}
        clients, table = gathered
        fresh = {name: np.full(self.numbers.clients, np.nan) for name in names}
        for place, name in enumerate(names):
            fresh[name][clients] = table[:, place]
        return fresh

    def participants(self, plan: Plan, model: Tensor, seconds: Floats | None) -> None:
        """Enter the numbers of a round's participants, measured on the model that they were sent; collective."""
        if self.measured:
            gathered = self._gathered(plan.round, model, plan.clients, self.measured)
            if gathered is not None:
                for place, name in enumerate(self.measured):
                    self._enter(name, plan.round, gathered[0], gathered[1][:, place])
        if "update_norm" in self.numbers.names:
            norms = self.observer.norms if self.observer is not None else {}
            clients = self.cluster.gather(np.fromiter(norms.keys(), np.int64, len(norms)))
            values = self.cluster.gather(np.fromiter(norms.values(), np.float64, len(norms)))
            if clients is not None and values is not None:
                self._enter("update_norm", plan.round, np.concatenate(clients), np.concatenate(values))
        if "seconds" in self.numbers.names and seconds is not None:
            self._enter("seconds", plan.round, plan.clients, seconds)

    def state(self) -> dict[str, Tensor]:
        """The numbers of past participations, for a checkpoint."""
        return self.numbers.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint holds of them."""
        self.numbers.load(state)

    def _gathered(self, t: int, model: Tensor, clients: Ints, names: Sequence[str]) -> tuple[Ints, Floats] | None:
        """The numbers of sorted clients, each measured by its owner: who (k,) and (k, names) on rank 0."""
        first, last = np.searchsorted(clients, self.owned)
        mine = clients[first:last]
        seen = [name for name in names if name in MEASURABLE]
        columns: dict[str, Floats] = {}
        if seen:
            assert self.measure is not None
            columns |= zip(seen, self.measure(t, model, mine, seen).T, strict=True)
        if "update_norm" in names:
            columns["update_norm"] = self.trial(t, model, clients, mine)
        table = np.stack([columns[name] for name in names], axis=1)
        everybody, tables = self.cluster.gather(mine), self.cluster.gather(table.ravel())
        if everybody is None or tables is None:
            return None
        return np.concatenate(everybody), np.concatenate(tables).reshape(-1, len(names))

    def _enter(self, name: str, round: int, clients: Ints, values: Floats) -> None:
        known = ~np.isnan(values)
        self.numbers.enter(name, round, clients[known], values[known])
