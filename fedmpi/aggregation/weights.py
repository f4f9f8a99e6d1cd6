"""Aggregation weights: one coefficient c_k per selected client, and whether the sum is normalized.

The server's update is Σ c_k Δ_k, divided by Σ c_k of the returned updates if the sum is to be normalized.

=============  ==================================  ==========  =====================================================
name           c_k (times the multiplicity)        normalized  source
=============  ==================================  ==========  =====================================================
samples        samples used                        yes         McMahan et al. 2017, Algorithm 1
uniform        1                                   yes         FedSampling §3.3; Li et al. 2020, Scheme I
gradient-sum   samples used / K                    no          FedSampling, Algorithm 1 (with one full-batch step)
   …-squared   (samples used)² / K                 no          what FedSampling's published code does for texts
stratified     N_h / (N m_h P_h)                   no          FedSTaS, Algorithm 2; FedSTS
normalized     ρ_k / (π_k r_h)                     yes         FedSSO, Eq 3 for unequal n_k (Hájek's ratio)
unbiased       ρ_k / (π_k a_k)                     no          Horvitz-Thompson (Hansen-Hurwitz with replacement)
literal        (N / m) ρ_k                         no          FedSSO, Eq 3 as printed (an average of models)
=============  ==================================  ==========  =====================================================

π_k is the probability to be drawn given the available clients. Unavailable clients are corrected for by r_h, the
available share of the stratum's weight Σ ρ_k (every stratum then keeps its share of the mean, whichever of its clients
are available), or by a_k, the known probability of being available. P_h is the probability that stratum h has a
selected client at all, and N there counts the clients of the strata with available clients. If strata leave clients
out, ρ_k and N are those of the others. ρ_k is n_k / n with population = "samples" (the usual federated objective), 1 /
N with "clients" (the target of FedSTaS's stratified mean).

A selected client without used samples sends nothing. It does not count if the sum is normalized; otherwise it counts as
if it returned the received model. The coefficients of all kinds except the gradient sum and the unbiased one are
multiples of 2**-40 or of a power of two, so that Σ c_k is bit-identical in any order.

Weights may depend on the result of a client's work, as in q-FFL: a class of weights may have a second method, `after`
(work), called by the rank that trained a client once its update is computed. It returns the factor c of the update in
the sum and its share h of the divisor: Σ c_k Δ_k / Σ h_k. A single number is used for both. `work` is a `ClientWork`.

A class may keep arrays or numbers between rounds, named in `state`. Both methods may use them. `after` sets only the
entries of its own client, which the ranks exchange at the end of the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedmpi.clients.cohort import Cohort
from fedmpi.common.calling import Remembering, calling, refuse_result, result_array, takes
from fedmpi.common.decorators import weights
from fedmpi.common.errors import UserError
from fedmpi.common.plan import read_only
from fedmpi.common.registry import Component
from fedmpi.common.types import Floats, Ints

if TYPE_CHECKING:
    from fedmpi.config import Config
    from fedmpi.mpi import Cluster

Population = Literal["samples", "clients"]

GRID = 2.0**40
"""Reciprocal of a step: sums of multiples of 1/GRID are bit-identical in any order."""
LARGEST = 2.0**50
"""Largest number that a metric can hold, and hence sum of weights that are not normalized."""
TOTAL_BITS = 9
"""Exponent of the scaled sum of unnormalized weights: between 2**9 and 2**10, then rounded to 1e-12 of the sum."""
SMALLEST_LOSS = 1e-10
"""Lower bound of a loss: negative powers of a zero loss would be infinite."""


@weights(name="samples", per_sample=True)
def samples(cohort: Cohort, sizes: Ints) -> Floats:
    """Weigh by the samples used (McMahan et al. 2017, Algorithm 1)."""
    return cohort.multiplicity.astype(np.float64) * _power_of_two_share(int(sizes[cohort.clients].sum()))


@weights(name="uniform")
def uniform(cohort: Cohort, sizes: Ints) -> Floats:
    """Weigh all selected clients equally (FedSampling §3.3; Li et al. 2020, Scheme I)."""
    return _sending(cohort, sizes) * _on_grid(np.full(cohort.clients.size, 1 / max(cohort.draws, 1)))


@weights(name="gradient-sum", per_sample=True, normalized=False, opening="samples")
def gradient_sum(cohort: Cohort, sizes: Ints) -> Floats:
    """Weigh by samples used over sample budget K (FedSampling, Algorithm 1, with one full-batch step)."""
    assert cohort.wanted is not None
    return cohort.multiplicity / cohort.wanted


@weights(name="gradient-sum-squared", per_sample=2, normalized=False, opening="samples")
def gradient_sum_squared(cohort: Cohort, sizes: Ints) -> Floats:
    """Weigh by the square of the samples used over K, as in FedSampling's published code for texts.

    Its loop visits a client once for every sample drawn of it and adds n/K of the client's mean gradient each time, so
    that n samples count n²/K. The paper's text says n/K (`gradient-sum`).
    """
    return gradient_sum(cohort, sizes)


@weights(name="stratified", normalized=False, opening="normalized")
def stratified(cohort: Cohort, sizes: Ints) -> Floats:
    """Average the strata's means, N_h / (N m_h P_h) (FedSTaS, Algorithm 2; FedSTS).

    A client without a drawn sample returns the received model (Algorithm 3): it counts in m_h and changes nothing.
    """
    return _sending(cohort, sizes) * _on_grid(_stratum_weights(cohort))


@weights(name="normalized")
def normalized(cohort: Cohort, sizes: Ints, *, population: Population = "samples") -> Floats:
    """Weigh by ρ_k / π_k, normalized, strata in their shares (FedSSO, Eq 3 for unequal n_k: Hájek's ratio).

    Parameters
    ----------
    population : str
        Estimated quantity: the mean over all samples, or over all clients.
    """
    rho = _population_weights(cohort, sizes, population)
    inclusion = _inclusion(cohort, "normalized")
    return _sending(cohort, sizes) * _on_grid(rho[cohort.clients] / (inclusion * _share_there(cohort, rho)))


@weights(name="unbiased", normalized=False)
def unbiased(cohort: Cohort, sizes: Ints, *, population: Population = "samples") -> Floats:
    """Weigh by ρ_k / π_k (Horvitz-Thompson; Hansen-Hurwitz for draws with replacement).

    Parameters
    ----------
    population : str
        Estimated quantity: the mean over all samples, or over all clients.
    """
    chance = None if cohort.presence is None else cohort.presence.chance
    inclusion = _inclusion(cohort, "unbiased")
    there = inclusion if chance is None else inclusion * chance[cohort.clients]
    return _sending(cohort, sizes) * _population_weights(cohort, sizes, population)[cohort.clients] / there


@weights(name="literal", normalized=False, averages_models=True, opening="normalized")
def literal(cohort: Cohort, sizes: Ints, *, population: Population = "samples") -> Floats:
    """Set the next model to (N/m) Σ ρ_k w_k (FedSSO, Eq 3 as printed).

    Parameters
    ----------
    population : str
        Estimated quantity: the mean over all samples, or over all clients.
    """
    rho = _population_weights(cohort, sizes, population)
    expansion = np.count_nonzero(_selectable(cohort, sizes)) / max(cohort.draws, 1)
    return cohort.multiplicity * _on_grid(expansion * rho[cohort.clients])


def _sending(cohort: Cohort, sizes: Ints) -> Ints:
    """Return how often each selected client counts, (m,): 0 without samples."""
    return np.where(sizes[cohort.clients] > 0, cohort.multiplicity, 0)


def _inclusion(cohort: Cohort, name: str) -> Floats:
    if cohort.inclusion is None:
        raise UserError(
            f'server.weights = "{name}" divides by inclusion probabilities, which the sampler of '
            'clients.sampler does not return. Return them in its Cohort, or choose "samples" or "uniform"'
        )
    return cohort.inclusion


def _power_of_two_share(total: int) -> float:
    """Return the power of two just below 1 / total: products with counts, and their sums, are then exact."""
    return 0.5 ** total.bit_length()


def _on_grid(values: Floats) -> Floats:
    """Round to multiples of 2**-40, whose float64 sum does not depend on the order in which ranks add them."""
    return np.rint(values * GRID) / GRID


def _selectable(cohort: Cohort, sizes: Ints) -> NDArray[np.bool_]:
    """Return a mask of the clients that can be selected, (N,): all, unless the cohort's strata leave some out."""
    groups = None if cohort.presence is None else cohort.presence.groups
    if cohort.stratum is None or groups is None:
        return np.broadcast_to(np.True_, sizes.shape)
    return groups >= 0


def _population_weights(cohort: Cohort, sizes: Ints, population: Population) -> Floats:
    """Return ρ_k of all clients, (N,): their share of all samples, or of all clients; 0 for those left out."""
    counted = _selectable(cohort, sizes) * (sizes if population == "samples" else 1)
    share: Floats = counted / int(counted.sum())
    return share


def _share_there(cohort: Cohort, rho: Floats) -> Floats | float:
    """Return Σ ρ_k over the available clients of each client's group, over Σ ρ_k of the whole group; (m,), or 1."""
    presence = cohort.presence
    if presence is None or presence.groups is None or isinstance(presence.present, int):
        return 1.0
    group, present = presence.groups + 1, presence.present
    whole = np.bincount(group, rho)
    there = np.bincount(group[present], rho[present], minlength=whole.size)
    share = np.divide(there, whole, out=np.ones_like(whole), where=there > 0)  # a group without any ρ_k has no weight
    return np.asarray(share[group[cohort.clients]])


def _stratum_weights(cohort: Cohort) -> Floats:
    """Return N_h / (N m_h P_h) of each selected client's stratum, m_h counted in the cohort itself."""
    if cohort.stratum is None or cohort.strata is None:
        raise UserError(
            'server.weights = "stratified" needs a cohort drawn from strata. This sampler returns no strata'
        )
    sizes, represented = cohort.strata.sizes, cohort.strata.represented
    represented = np.ones(sizes.size) if represented is None else represented
    drawn = np.bincount(cohort.stratum, cohort.multiplicity, minlength=sizes.size)
    of_stratum = sizes / max(1, int(sizes[represented > 0].sum()))
    h = cohort.stratum
    weights: Floats = of_stratum[h] / (drawn[h] * represented[h])
    return weights


@dataclass(frozen=True)
class ClientWork:
    """Result of a selected client's work in a round, for weights."""

    client: int
    round: int
    coefficient: float  # Coefficient before the round; times the samples used if weights count per sample
    loss: float  # Mean loss of the global model, before any work, over all samples of the client
    update_norm: float  # Euclidean norm ‖Δ_k‖ of the update that the server receives, without buffers
    lr: float  # Its local learning rate


@weights(name="q-ffl")
class QFFL:
    """Higher weight for clients with a higher loss: q-FedAvg (Li et al. 2020, "Fair Resource Allocation in FL").

    Algorithm 2: with Δ_k = w_k − w, F_k the client's loss at w and L the Lipschitz constant of the gradients, the step
    is Σ L F_k^q Δ_k / Σ (q F_k^{q−1} L² ‖Δ_k‖² + L F_k^q). q = 0 is the plain mean.

    Parameters
    ----------
    q : float
        Degree of fairness: 0 weighs all equally, larger values weigh clients with a high loss more; at most 100, beyond
        which powers of losses exceed the range of floats.
    lipschitz : float, optional
        L; 1 / lr of the round by default, as in the paper, whose clients take steps of SGD: L (w − w_k) is then a
        gradient. With another local optimizer it must be given.
    """

    def __init__(
        self,
        *,
        q: Annotated[float, Field(ge=0, le=100)] = 1.0,
        lipschitz: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None,
    ):
        self.q, self.lipschitz = q, lipschitz

    def refuses(self, config: Config) -> str | None:
        """Explain why it has no effect with this configuration, and what to do; None if it has."""
        optimizer = config.local.optimizer.name
        if optimizer == "sgd" or self.lipschitz is not None:
            return None
        return (
            "it takes the Lipschitz constant for 1 / local.lr, as SGD's steps allow, which local.optimizer = "
            f'"{optimizer}" does not: set local.optimizer = "sgd", or server.weights.lipschitz'
        )

    def __call__(self, cohort: Cohort, sizes: Ints) -> Floats:
        """Return how often each client was drawn, (m,)."""
        return cohort.multiplicity.astype(np.float64)

    def after(self, work: ClientWork) -> tuple[float, float]:
        """Return F_k^q and q F_k^{q−1} L ‖Δ_k‖² + F_k^q, times the number of draws; both are divided by L."""
        lipschitz = 1 / work.lr if self.lipschitz is None else self.lipschitz
        loss = max(work.loss, SMALLEST_LOSS)
        factor = loss**self.q
        slope = self.q * loss ** (self.q - 1) * lipschitz * work.update_norm**2
        return work.coefficient * factor, work.coefficient * (slope + factor)


class Weighing(Remembering):
    """Aggregation weights of the selected clients."""

    prefix = "weights."

    def __init__(self, part: Component, options: Mapping[str, Any], clients: int = 0):
        super().__init__(part, options, clients)
        self._clients = clients
        self._judged: list[int] = []  # clients of this rank whose work has been weighed in the round
        takes(part, self._made, "cohort", "sizes", method="" if callable(self._made) else "__call__")
        if self.judges:
            takes(part, self._made.after, "work", method="after")
        self.per_sample = int(part.marks.get("per_sample", 0))
        self.normalizes = bool(part.marks.get("normalized", True))  # the sum of updates is divided by the total weight
        self.averages_models = bool(part.marks.get("averages_models", False))
        if self.judges and self.averages_models:
            raise UserError(
                f"server.weights = {part.name!r} averages models, but after() would change the sum of their weights. "
                "Leave out averages_models or after()"
            )

    @property
    def name(self) -> str:
        """Name in a configuration."""
        return self.part.name

    @property
    def judges(self) -> bool:
        """True if coefficients depend on the result of the clients' work."""
        return callable(getattr(self._made, "after", None))

    def of(self, cohort: Cohort, sizes: Ints, round: int) -> Floats:
        """Return the coefficient of every selected client, float64 (m,); for weights per sample (or pair), the factor
        of one.
        """
        with calling(self.part, round):
            found = self._made(_closed(cohort), read_only(sizes))
        coefficients = self._checked(found, cohort, round)
        total = self._total(coefficients, cohort.clients, sizes)
        if not total and self.normalizes and self.part.foreign and sizes[cohort.clients].any():
            problem = "gave all participants the coefficient 0, and their sum is divided by: give some of them more"
            raise refuse_result(self.part, problem, round)
        if not total < LARGEST:
            problem = f"gave coefficients that add up to {total:.3g}, more than a sum can hold: make them smaller"
            raise refuse_result(self.part, problem, round)
        return on_grid(coefficients, total) if self.normalizes else coefficients

    def _total(self, coefficients: Floats, clients: Ints, sizes: Ints) -> float:
        """Return Σ |coefficient| · n^per_sample."""
        own = sizes if len(clients) == len(sizes) else sizes[clients]
        counts = own if self.per_sample == 1 else own**self.per_sample  # NumPy's x ** 1 is slow
        return float((np.abs(coefficients) * counts).sum())

    def surplus(self, coefficients: Floats) -> float:
        """Return Σ c_k − 1 if the next model is Σ c_k w_k and not w + Σ c_k Δ_k; 0 for all other weights.

        Σ c_k w_k = w + Σ c_k Δ_k + (Σ c_k − 1) w. A round without selected clients does not change the model.
        """
        return float(coefficients.sum()) - 1.0 if self.averages_models and coefficients.size else 0.0

    def after(self, work: ClientWork) -> tuple[float, float]:
        """Return a client's factor in the sum, and its share of the divisor."""
        with calling(self.part, work.round, work.client):
            found = self._made.after(work)
        self._judged.append(work.client)
        try:
            factor, share = map(float, found if isinstance(found, tuple) else (found, found))
        except (TypeError, ValueError):
            factor = share = math.nan
        if not (math.isfinite(factor) and math.isfinite(share)) or (self.normalizes and share < 0):
            problem = f"after() returned {found!r}: return a finite factor, and a share of the divisor not below 0"
            raise refuse_result(self.part, problem, work.round, work.client)
        return factor, share

    def collect(self, cluster: Cluster) -> None:
        """Send rank 0 the entries of the state that `after` has set for this rank's clients; collective."""
        clients, self._judged = np.array(self._judged, np.int64), []
        arrays = [np.asarray(getattr(self._made, name)) for name in self.remembers]
        for kept in arrays if cluster.size > 1 else ():
            if kept.shape[:1] == (self._clients,):
                owned, values = cluster.gather(clients), cluster.gather(kept[clients])
                for one, several in zip(owned or (), values or (), strict=True):
                    kept[one] = several

    def _checked(self, found: Any, cohort: Cohort, round: int) -> Floats:
        coefficients: Floats = result_array(self.part, found, cohort.clients.shape, "coefficients", round)
        if self.normalizes and (coefficients < 0).any():
            worst = coefficients.argmin()
            problem = (
                f"gave client {cohort.clients[worst]} the coefficient {coefficients[worst]}: none may be below "
                "0 where the sum is normalized"
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


def _closed(cohort: Cohort) -> Cohort:
    """Return the same cohort with read-only arrays."""
    held = vars(cohort).items()
    arrays: dict[str, Any] = {name: read_only(value) for name, value in held if isinstance(value, np.ndarray)}
    return replace(cohort, **arrays)
