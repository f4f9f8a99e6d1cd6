"""Robust aggregation rules instead of a weighted sum of updates: median, trimmed mean, Krum, norm clipping.

An aggregator receives the updates of all m selected clients of a round, in client order, one slice of s coordinates at
a time. A function (updates (m, s), coefficients (m,)) -> (s,) is enough if each coordinate is combined by itself.
Otherwise a class has two methods: `measure` (updates) -> any shape, whose results are summed over all slices in
float64, and `combine` (updates, coefficients, measured) -> (s,), which receives that sum.

The coefficients are those of `server.weights`; normalized ones add up to 1. The median, the trimmed mean and Krum
ignore them and treat all clients equally.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, is_complex, naming, refuse_result, takes
from fedmpi.common.decorators import aggregator
from fedmpi.common.errors import UserError
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")


@aggregator(name="mean")
def mean(updates: Tensor, coefficients: Tensor) -> Tensor:
    """Compute the weighted sum Σ c_k Δ_k, which fedmpi adds up client by client without keeping any update."""
    return (coefficients.double() @ updates.double()).to(updates.dtype)


@aggregator(name="median")
def median(updates: Tensor, coefficients: Tensor) -> Tensor:
    """Compute the median of every coordinate (Yin et al. 2018, Definition 1); the middle two's mean for even m."""
    m = len(updates)
    return _ordered(updates)[:, (m - 1) // 2 : m // 2 + 1].mean(1, dtype=torch.float64).to(updates.dtype)


@aggregator(name="trimmed-mean")
def trimmed_mean(updates: Tensor, coefficients: Tensor, *, trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.1) -> Tensor:
    """Compute the mean of every coordinate without its smallest and largest values (Yin et al. 2018, Definition 2).

    Parameters
    ----------
    trim : float
        β: share of the clients that is cut off at either end, rounded up; at least one value stays.
    """
    m = len(updates)
    cut = min(math.ceil(trim * m - 1e-9), (m - 1) // 2)
    return _ordered(updates)[:, cut : m - cut].mean(1, dtype=torch.float64).to(updates.dtype)


def _ordered(updates: Tensor) -> Tensor:
    """Sort each coordinate's values, (s, m); numpy sorts short rows ten times as fast as torch."""
    return torch.from_numpy(np.sort(np.ascontiguousarray(updates.numpy().T), axis=1))


@aggregator(name="krum")
class Krum:
    """Update with the smallest summed squared distances to its nearest others (Blanchard et al. 2017).

    Krum takes the update whose m − f − 2 nearest others are nearest, Multi-Krum the mean of the first `keep` in that
    order. Ties go to the client of the smaller number.

    Parameters
    ----------
    byzantine : int
        f: largest number of Byzantine clients in a round. Needs 2f + 2 < m (their Proposition 4.2).
    keep : int
        Updates that are averaged: 1 is Krum, more is Multi-Krum; at most m − f − 2 are safe from attackers.
    """

    def __init__(self, *, byzantine: Annotated[int, Field(ge=0)], keep: Annotated[int, Field(ge=1)] = 1):
        self.byzantine, self.keep = byzantine, keep

    def measure(self, updates: Tensor) -> Tensor:
        """Compute inner products of the updates' deviations from their median, float64 (m, m), for the distances.

        A median stays near the honest updates, so small distances are not differences of huge numbers.
        """
        self.check(len(updates))
        middle = torch.from_numpy(np.partition(updates.numpy(), len(updates) // 2, axis=0)[len(updates) // 2])
        apart = updates.double() - middle
        return apart @ apart.T

    def combine(self, updates: Tensor, coefficients: Tensor, measured: Tensor) -> Tensor:
        """Return the mean of the chosen updates."""
        return updates[self.chosen(measured)].mean(0, dtype=torch.float64).to(updates.dtype)

    def chosen(self, measured: Tensor) -> Tensor:
        """Return positions of the chosen clients, sorted, int64 (keep,)."""
        m = len(measured)
        squares = measured.diagonal()
        distances = (squares[:, None] + squares[None, :] - 2 * measured).clamp_(min=0)
        distances.fill_diagonal_(math.inf)  # no update is its own neighbor
        scores = torch.sort(distances, dim=1).values[:, : m - self.byzantine - 2].sum(1)
        return torch.sort(torch.argsort(scores, stable=True)[: self.keep]).values

    def check(self, participants: int) -> None:
        """Reject a round in which the attackers could outvote the others.

        Raises
        ------
        UserError
            m ≤ 2f + 2, or fewer than `keep` updates that are safe from attackers.
        """
        f = self.byzantine
        if participants <= 2 * f + 2:
            raise UserError(
                f'server.aggregator = "krum" with byzantine = {f} needs more than {2 * f + 2} clients that send an '
                f"update, but a round has {participants}: select more, or lower it"
            )
        if self.keep > participants - f - 2:
            raise UserError(
                f"server.aggregator.keep = {self.keep} of {participants} participants leaves no room for "
                f"server.aggregator.byzantine = {f} of them: keep at most {participants - f - 2}"
            )


@aggregator(name="norm-clip")
class NormClip:
    """Weighted sum of updates clipped to a largest norm, Σ c_k Δ_k min(1, bound/‖Δ_k‖) (Sun et al. 2019, §3).

    Parameters
    ----------
    bound : float
        M: Euclidean norm above which an update is scaled down.
    """

    def __init__(self, *, bound: Annotated[float, Field(gt=0, allow_inf_nan=False)]):
        self.bound = bound

    def measure(self, updates: Tensor) -> Tensor:
        """Return squared norms, float64 (m,)."""
        return updates.double().square().sum(1)

    def combine(self, updates: Tensor, coefficients: Tensor, measured: Tensor) -> Tensor:
        """Return the weighted sum of the clipped updates."""
        factors = (self.bound / measured.sqrt()).clamp_(max=1.0)
        return ((coefficients.double() * factors) @ updates.double()).to(updates.dtype)


class Combiner:
    """Aggregator of a run: a function, or an object with `combine` and optionally `measure`."""

    def __init__(self, part: Component, options: Mapping[str, Any]):
        with calling(part):
            self.part, self._chosen = part, part.make(options)
        self._combine = getattr(self._chosen, "combine", self._chosen)
        self._measure = getattr(self._chosen, "measure", None)
        given = ("updates", "coefficients", "measured")[: 3 if self.measures else 2]
        method = "combine" if hasattr(self._chosen, "combine") or not callable(self._chosen) else ""
        takes(part, self._combine, *given, method=method)
        if self._measure is not None:
            takes(part, self._measure, "updates", method="measure")

    @property
    def measures(self) -> bool:
        """True if it first measures all coordinates."""
        return self._measure is not None

    def check(self, participants: int, round: int) -> None:
        """Let the aggregator's optional method `check` reject a round with this number of updates.

        Every rank calls this, also one without coordinates to combine: all end with the same message.
        """
        own = getattr(self._chosen, "check", None)
        if own is not None:
            with calling(self.part, round):
                own(participants)

    def measure(self, updates: Tensor, round: int) -> Tensor:
        """Return its measurement of a slice (m, s), as float64, to be summed over all slices."""
        assert self._measure is not None
        with calling(self.part, round):
            found = self._measure(updates)
        if not isinstance(found, torch.Tensor) or not bool(found.isfinite().all()):
            shown = "values that are not finite" if isinstance(found, torch.Tensor) else type(found).__name__
            raise refuse_result(self.part, f"measure() returned {shown}: return a tensor, to be summed", round)
        if is_complex(found):
            raise refuse_result(self.part, "measure() returned complex numbers: return real ones", round)
        return found.double()

    def combine(self, updates: Tensor, coefficients: Tensor, measured: Tensor | None, round: int) -> Tensor:
        """Return the combined update of a slice."""
        extra = () if measured is None else (measured.clone(),)
        with calling(self.part, round):
            found = self._combine(updates, coefficients.clone(), *extra)
        width = updates.shape[1]
        if not isinstance(found, torch.Tensor) or found.shape != (width,):
            shown = (
                f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
            )
            problem = (
                f"returned {shown} for updates of shape {tuple(updates.shape)}: return a tensor with one value a "
                f"coordinate, shape ({width},)"
            )
            raise refuse_result(self.part, problem, round)
        if is_complex(found):
            raise refuse_result(self.part, "returned complex numbers: return real ones", round)
        with naming(self.part, round):  # an empty tensor, or a type that cannot be converted
            result = found.detach().to(updates.dtype)
            finite = bool(result.isfinite().all())
        if not finite:
            problem = f"returned values that are not finite as {updates.dtype}, from updates that are"
            raise refuse_result(self.part, problem, round)
        return result
