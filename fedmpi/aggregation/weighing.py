"""Aggregation weights of a run: a cohort's coefficients before the round, and their correction by a client's work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import LARGEST, Accumulator, FloatSum, ReducedValues
from fedmpi.aggregation.weights import ClientWork
from fedmpi.clients.cohort import Cohort
from fedmpi.common.calling import calling, is_complex, refuse_result, takes
from fedmpi.common.errors import ComponentFailure, UserError
from fedmpi.common.plan import Plan, read_only
from fedmpi.common.registry import Component
from fedmpi.common.types import Floats, Ints
from fedmpi.mpi import Cluster

GRID = 2.0**40
"""Reciprocal of a step: sums of multiples of 1/GRID are bit-identical in any order."""
LEAST_EXACT = 2.0**-12
"""Smallest sum of judged weights that exact sums, in steps of 1/GRID, still represent to about 1e-8 of it."""
LARGEST_TOTAL = 1e200
"""Largest sum of normalized weights before scaling."""
MOST_AT_ONCE = 120
"""Largest exponent of two in float32; terms beyond it are negligible beside the rest."""
TOTAL_BITS = 9
"""Exponent of the scaled sum of unnormalized weights: between 2**9 and 2**10, then rounded to 1e-12 of the sum."""


class Weighing:
    """Aggregation weights of the selected clients."""

    def __init__(self, part: Component, options: Mapping[str, Any]):
        with calling(part):
            self.part, self._chosen = part, part.make(options)
        takes(part, self._chosen, "cohort", "sizes", method="" if callable(self._chosen) else "__call__")
        if self.judges:
            takes(part, self._chosen.after, "work", method="after")
        self.per_sample = int(part.marks.get("per_sample", 0))
        self._normalized = part.marks.get("normalized", True)
        self.averages_models = bool(part.marks.get("averages_models", False))
        if self.judges and self.averages_models:
            raise UserError(
                f"server.weights = {part.name!r} averages models, of whose weights after() would change the sum: "
                "leave out averages_models or after()"
            )

    @property
    def name(self) -> str:
        """Name in a configuration."""
        return self.part.name

    @property
    def judges(self) -> bool:
        """True if coefficients depend on the result of the clients' work."""
        return callable(getattr(self._chosen, "after", None))

    def normalizes(self, cohort: Cohort) -> bool:
        """Return whether the sum of updates is divided by the total weight."""
        return bool(self._normalized(cohort) if callable(self._normalized) else self._normalized)

    def of(self, cohort: Cohort, sizes: Ints, round: int) -> Floats:
        """Return the coefficient of every selected client, float64 (m,); for weights per sample (or pair), the factor
        of one.
        """
        try:
            with calling(self.part, round):
                found = self._chosen(_closed(cohort), read_only(sizes))
        except ComponentFailure as failure:
            raise _with_reason(failure, cohort, sizes) from failure.__cause__
        coefficients = self._checked(found, cohort, round)
        normalizes, total = self.normalizes(cohort), self._total(coefficients, cohort.clients, sizes)
        if not total and normalizes and self.part.foreign and sizes[cohort.clients].any():
            problem = "gave all participants the coefficient 0, and their sum is divided by: give some of them more"
            raise refuse_result(self.part, problem, round)
        if not total < (LARGEST_TOTAL if normalizes else LARGEST):
            problem = f"gave coefficients that add up to {total:.3g}, more than a sum can hold: make them smaller"
            raise refuse_result(self.part, problem, round)
        return on_grid(coefficients, total) if normalizes else coefficients

    def _total(self, coefficients: Floats, clients: Ints, sizes: Ints) -> float:
        """Return Σ |coefficient| · n^per_sample."""
        own = sizes if len(clients) == len(sizes) else sizes[clients]
        counts = own if self.per_sample == 1 else own**self.per_sample  # NumPy's x ** 1 is slow
        return float((np.abs(coefficients) * counts).sum())

    @property
    def _divides(self) -> bool:
        """True if sums are always divided by the total weight."""
        return self._normalized is True

    def check_total(self, total: float, participants: int, round: int) -> None:
        """Reject judged weights whose sum cannot be a divisor."""
        if participants and not total > 0:
            problem = (
                f"the shares that after() returned for {participants} clients add up to {total:g}: the sum of updates "
                "is divided by them, so that some must be above 0"
            )
            raise refuse_result(self.part, problem, round)

    def surplus(self, coefficients: Floats) -> float:
        """Return Σ c_k − 1 if the next model is Σ c_k w_k and not w + Σ c_k Δ_k; 0 for all other weights.

        Σ c_k w_k = w + Σ c_k Δ_k + (Σ c_k − 1) w. A round without selected clients does not change the model.
        """
        return float(coefficients.sum()) - 1.0 if self.averages_models and coefficients.size else 0.0

    def after(self, work: ClientWork) -> tuple[float, float]:
        """Return a client's factor in the sum, and its share of the divisor."""
        with calling(self.part, work.round, work.client):
            found = self._chosen.after(work)
        try:
            pair = found if isinstance(found, tuple) else (found, found)
            factor, share = (math.nan if is_complex(value) else float(value) for value in pair)
        except (TypeError, ValueError, RuntimeError):
            factor = share = math.nan
        if not (math.isfinite(factor) and math.isfinite(share)) or (self._divides and share < 0):
            problem = (
                f"after() returned {found!r}: return two finite numbers, or one that is both, the second of them (a "
                "share of what the sum is divided by) not below 0"
            )
            raise refuse_result(self.part, problem, work.round, work.client)
        return factor, share

    def _checked(self, found: Any, cohort: Cohort, round: int) -> Floats:
        participants = len(cohort.clients)
        try:
            coefficients = np.asarray(np.real(found), np.float64)
        except (TypeError, ValueError, RuntimeError):
            raise refuse_result(self.part, f"returned {type(found).__name__}: return numbers", round) from None
        if np.iscomplexobj(found):
            raise refuse_result(self.part, "returned complex numbers: return real ones", round)
        if coefficients.shape != (participants,):
            problem = (
                f"returned an array of shape {coefficients.shape} for {participants} participants: return one "
                f"coefficient a participant, shape ({participants},); sizes holds those of all clients, and "
                "sizes[cohort.clients] those of the participants"
            )
            raise refuse_result(self.part, problem, round)
        wrong = ~np.isfinite(coefficients)
        if self.normalizes(cohort):
            wrong |= coefficients < 0
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            problem = (
                f"gave client {cohort.clients[place]} the coefficient {coefficients[place]}: coefficients are finite, "
                "and not below 0 where the sum is normalized"
            )
            raise refuse_result(self.part, problem, round)
        return coefficients


def on_grid(coefficients: Floats, total: float) -> Floats:
    """Round coefficients so that sums are bit-identical in any order, with ratios kept to 1e-12 of their sum."""
    scaled = coefficients * GRID
    if not total or (total < GRID**0.5 and bool((scaled == np.rint(scaled)).all())):
        return coefficients
    shift = 2.0 ** (TOTAL_BITS - math.frexp(total)[1] + 1)
    return np.asarray(np.rint(coefficients * shift * GRID) / GRID)


def _with_reason(failure: ComponentFailure, cohort: Cohort, sizes: Ints) -> ComponentFailure:
    """Return the failure, with its reason if the cause is clear.

    Weights may need probabilities that the sampler does not give, or confuse the sizes of all clients with those of the
    selected clients.
    """
    cause, problem = failure.__cause__, failure.problem
    if isinstance(cause, TypeError) and "None" in problem and cohort.inclusion is None:
        problem += (
            ": cohort.inclusion is None, since clients.sampler does not return the probabilities of its draw. "
            "Choose a sampler that does, or other weights"
        )
    elif isinstance(cause, ValueError) and f"({len(sizes)},)" in problem:
        problem = (
            f"{problem.rstrip()}: sizes holds those of all {len(sizes)} clients, and sizes[cohort.clients] those of "
            f"the {len(cohort.clients)} participants"
        )
    return ComponentFailure(failure.kind, failure.name, problem, failure.where, failure.trace, failure.round)


def _closed(cohort: Cohort) -> Cohort:
    """Return the same cohort with read-only arrays."""
    held = vars(cohort).items()
    arrays: dict[str, Any] = {name: read_only(value) for name, value in held if isinstance(value, np.ndarray)}
    return replace(cohort, **arrays)


class JudgedSum:
    """Accumulator that gets the weights' factor for every update before adding it to another accumulator.

    Powers of losses are tiny or huge, and only ratios matter. Unless sums are exact, Σ c_k Δ_k and Σ h_k are both
    scaled by the power of two that brings Σ h_k between 1/2 and 1.

    After `flush`, `weight` is Σ h_k of all clients, scaled, and sums are the true ones times 2**`power`, on rank 0;
    both are 0 on the others.
    """

    def __init__(
        self, inner: Accumulator, weighing: Weighing, loss: Callable[[int, Tensor, int], float], cluster: Cluster
    ):
        self.inner, self.weighing, self.loss, self.cluster = inner, weighing, loss, cluster
        self.weight, self.power = 0.0, 0
        self._round, self._lr, self._start = 0, 0.0, torch.empty(0)
        self._normalize = True
        self._shares: list[float] = []
        self._power: int | None = None

    def begin(self, plan: Plan, start: Tensor) -> None:
        """Set the round, its local learning rate and the global model (d,)."""
        self._round, self._lr, self._start = plan.round, plan.lr, start
        self._normalize = plan.normalize

    def add(self, vector: Tensor, coefficient: float, client: int = -1) -> None:
        """Add a client's update (d,) times the factor of the weights."""
        norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
        work = ClientWork(client, self._round, coefficient, self.loss(client, self._start, self._round), norm, self._lr)
        factor, share = self.weighing.after(work)
        power = -math.frexp(share)[1]
        if share and isinstance(self.inner, FloatSum) and (self._power is None or power < self._power):
            self._scale(self.inner, power)
        self.inner.add(vector, math.ldexp(factor, self._power or 0), client)
        self._shares.append(share)

    def _scale(self, inner: FloatSum, power: int) -> None:
        """Rescale the sum so far, which is the true one times a power of two, to the true one times 2**power."""
        if self._shares:
            inner.scale(math.ldexp(1.0, min(power - (self._power or 0), MOST_AT_ONCE)))
        self._power = power

    def reset(self) -> None:
        self.inner.reset()
        self.weight, self.power, self._shares, self._power = 0.0, 0, [], None

    def flush(self) -> None:
        """Divide the common factor of all ranks' shares out of the sum; collective."""
        gathered = self.cluster.gather(np.array(self._shares, np.float64))
        shares = None if gathered is None else np.concatenate(gathered)
        whole = None if shares is None else [np.array([math.fsum(shares), len(shares)])]
        total, participants = self.cluster.broadcast(whole)[0].tolist()
        if self._normalize:
            self.weighing.check_total(total, int(participants), self._round)
        if isinstance(self.inner, FloatSum):
            power = -math.frexp(total)[1]
            self._scale(self.inner, power)
            total = math.ldexp(total, power)
        elif 0 < total < LEAST_EXACT:
            raise UserError(
                f'server.weights = "{self.weighing.name}" add up to {total:.3g} in round {self._round}, too '
                "little for exact sums: switch server.exact off"
            )
        self.weight, self.power = (total, self._power or 0) if self.cluster.is_server else (0.0, 0)
        self.inner.flush()

    def to_update(self, reduced: ReducedValues) -> Tensor:
        return self.inner.to_update(reduced)
