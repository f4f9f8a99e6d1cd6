"""Checks of what makes one update of many: weights and combiners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmpi.clients.cohort import Cohort, Presence, StrataSummary
from fedmpi.common.types import AnyArray, Ints
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice
from fedmpi.testing.cost import cost

PARTICIPANTS, COORDINATES, STRATA = 9, 40, 3
THEIR_SIZES = "sizes holds those of all clients, and sizes[cohort.clients] those of the participants"


def weights_checks(subject: Subject) -> Iterator[Check]:
    """All checks of aggregation weights but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: weigh(s)))
    yield subject.check("same weights of the same cohort", lambda s: same_twice(lambda: weigh(s)))
    yield subject.check("finite weights of the stated normalisation", well_normalised)
    yield subject.check("cost with 100,000 clients", lambda s: cost(whole_cohort, lambda pair: s.made()(*pair)))


def made_up_cohort(away: int = 0) -> tuple[Cohort, Ints]:
    """Nine of thirty clients with their inclusion probabilities, and the sizes of all thirty."""
    sizes = 1 + (np.arange(30) * 17 % 23)
    return _cohort(np.arange(away, away + 3 * PARTICIPANTS, 3), 30), sizes.astype(np.int64)


def whole_cohort(clients: int) -> tuple[Cohort, Ints]:
    """All of many clients."""
    return _cohort(np.arange(clients), clients), 1 + np.arange(clients) % 50


def _cohort(clients: Ints, population: int) -> Cohort:
    """A cohort of three strata that tells all that a cohort can tell."""
    stratum, everybody = clients // 2 % STRATA, np.arange(population) // 2 % STRATA
    sizes, draws = np.bincount(everybody, minlength=STRATA), np.bincount(stratum, minlength=STRATA)
    return Cohort(
        clients,
        (draws / sizes)[stratum],
        stratum=stratum,
        strata=StrataSummary(sizes, draws, np.ones(STRATA), np.ones(STRATA)),
        presence=Presence(population, groups=everybody),
        wanted=60,
    )


def weigh(subject: Subject) -> list[AnyArray]:
    """The weights of two cohorts."""
    made = subject.made()
    return [_weights_of(made, *made_up_cohort(first)) for first in (0, 2)]


def _weights_of(made: Any, cohort: Cohort, sizes: Ints) -> AnyArray:
    """What the weights return; failing that they took the sizes of all clients for the participants' is explained."""
    try:
        return np.asarray(made(cohort, sizes))
    except ValueError as error:
        demand(f"({len(sizes)},)" not in str(error), f"{str(error).rstrip()}: {THEIR_SIZES}")
        raise


def well_normalised(subject: Subject) -> str:
    """One finite number a participant; where the sum is divided by their total, none below 0 and not all 0."""
    marks, totals = subject.part.marks, []
    for first in (0, 2):
        cohort, sizes = made_up_cohort(first)
        before = sizes.copy()
        found = np.asarray(_weights_of(subject.made(), cohort, sizes), np.float64)
        one_each = f"shape {found.shape} for {PARTICIPANTS} participants: one number each; {THEIR_SIZES}"
        demand(found.shape == (PARTICIPANTS,), one_each)
        demand(bool(np.isfinite(found).all()), f"not finite: {found}")
        demand(bool((sizes == before).all()), "it changes the sizes that it is given: copy them")
        normalised = marks.get("normalised", True)
        if normalised(cohort) if callable(normalised) else normalised:
            demand(bool((found >= 0).all()), f"normalised = True, but a coefficient is negative: {found.min():g}")
            demand(float(found.sum()) > 0, "normalised = True, but all coefficients are 0: their total divides the sum")
        counts = sizes[cohort.clients] ** int(marks.get("per_sample", 0))
        totals.append(float((found * counts).sum()))
    return f"total weights {totals[0]:.4g} and {totals[1]:.4g}"


def combiner_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a combiner but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: combine_all(s)))
    yield subject.check("same result from the same updates", lambda s: same_twice(lambda: combine_all(s)))
    yield subject.check("shape and type of the result", shape_and_type)
    yield subject.check("slices of the coordinates agree with the whole", slices_agree)


def made_up_updates(participants: int = PARTICIPANTS) -> tuple[Tensor, Tensor]:
    """Updates (m, s) of which one lies far off, and coefficients (m,) that add up to 1."""
    generator = np.random.Generator(np.random.Philox(5))
    updates = torch.from_numpy(generator.standard_normal((participants, COORDINATES)).astype(np.float32))
    updates[-1] *= 50
    coefficients = torch.arange(1, participants + 1, dtype=torch.float32)
    return updates, coefficients / coefficients.sum()


def combine(subject: Subject, cuts: int = 1, participants: int = PARTICIPANTS) -> Tensor:
    """The combined update, its coordinates cut into slices as they are dealt to ranks."""
    made = subject.made()
    updates, coefficients = made_up_updates(participants)
    parts = [part.clone() for part in updates.chunk(cuts, dim=1)]
    if not hasattr(made, "combine"):
        return torch.cat([made(part, coefficients.clone()) for part in parts])
    measured = sum(made.measure(part.clone()).double() for part in parts)
    return torch.cat([made.combine(part, coefficients.clone(), measured) for part in parts])


def combine_all(subject: Subject) -> list[AnyArray]:
    """The combined updates of nine and of eight participants."""
    return [combine(subject, participants=count).numpy() for count in (PARTICIPANTS, PARTICIPANTS - 1)]


def shape_and_type(subject: Subject) -> str:
    """(m, s), (m,) -> (s,) of the updates' type, finite, also for slices of one coordinate and of none."""
    for cuts in (1, 3, COORDINATES):
        found = combine(subject, cuts)
        demand(isinstance(found, Tensor), f"it returns {type(found).__name__}: return a tensor (s,)")
        demand(found.shape == (COORDINATES,), f"{cuts} slices of {COORDINATES} coordinates gave {tuple(found.shape)}")
        demand(found.dtype == torch.float32, f"float32 updates became {found.dtype}: keep their type")
        demand(bool(found.isfinite().all()), "finite updates became values that are not")
    return f"({PARTICIPANTS}, s) became (s,) for s = {COORDINATES}, {-(-COORDINATES // 3)}, 1"


def slices_agree(subject: Subject) -> str:
    """Ranks see slices: however the coordinates are cut, the same update must come out."""
    whole = combine(subject)
    for cuts in (2, 7):
        apart = float((combine(subject, cuts) - whole).abs().max())
        demand(
            apart <= 1e-5 * max(float(whole.abs().max()), 1e-30),
            f"cut into {cuts} slices the result differs by {apart:.2g}: a coordinate's result may not depend on the "
            "others of its slice. Give the combiner measure(updates), whose results are summed over all slices, and "
            "combine(updates, coefficients, measured)",
        )
    return "1, 2 and 7 slices, the same update"
