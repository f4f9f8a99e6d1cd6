"""Checks of components that plan a round: client and data samplers, availability, mediators, weights, aggregators."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import stats

from fedmpi.aggregation.aggregators import Aggregator
from fedmpi.aggregation.weights import Weighing
from fedmpi.clients.availability import chances
from fedmpi.clients.cohort import Cohort, Presence, StrataSummary
from fedmpi.clients.sampler import ClientNumbers, ClientSampler, View
from fedmpi.clients.strata import make_strata
from fedmpi.common.decorators import NUMBERS
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.statistics import target_distribution
from fedmpi.mediators.groups import checked_mediators
from fedmpi.samples.rules import RowRule
from fedmpi.testing.check import CLIENTS, FALSE_ALARM, Alike, Contract, Subject, cost, demand

DRAWS, ROUNDS = 10_000, 20
"""Rounds of the check of inclusion probabilities, and of the others."""
FEW, COUNT, CLASSES = 14, 4, 5
"""Clients of a small round, clients drawn, and classes."""
SIZES = np.array([5, 1, 40, 12, 300, 2, 17])
"""Sizes of the clients on which a data sampler is tried."""
STREAMS = Streams(13)
PARTICIPANTS, COORDINATES, STRATA = 9, 40, 3


def world(clients: int = FEW, round: int = 7, *, away: bool = True, fresh: bool = False) -> View:
    """Return a synthetic round: sizes from 1 to 40, every seventh client unavailable, numbers of two thirds of them."""
    k = np.arange(clients)
    numbers = ClientNumbers(NUMBERS, clients)
    if not fresh:
        for name in NUMBERS:
            known = k[k % 3 != 1]
            numbers.enter(name, max(round - 2, 0), known, 0.5 + (known * 7 % 11) / 5.0)
    return View(
        round,
        max(1, COUNT * clients // FEW),
        1 + (k * 13 % 40),
        k[k % 7 != 3] if away else clients,
        Streams(11),
        strata=make_strata(k % 3, np.array([0.5, 1.0, 2.0])[:clients], 0.25 + (k * 5 % 13) / 6.0),
        wanted=lambda among: max(1, COUNT * among // FEW),
        numbers=numbers,
        counts=lambda: (k[:, None] + np.arange(CLASSES)) * 3 % 8,
    )


def _sampler(subject: Subject) -> ClientSampler:
    return ClientSampler(subject.part, subject.options)


def _draw(sampler: Any, view: View, measures: tuple[str, ...] | None = None) -> Cohort:
    """Return one round's cohort; the candidates of a sampler that measures get synthetic numbers."""
    measures = sampler.measures if measures is None else measures
    if measures:
        candidates = np.asarray(sampler.candidates(view))
        measured = np.full(len(view.sizes), np.nan)
        measured[candidates] = 0.5 + (candidates * 3 % 7) / 4.0
        view = replace(view, measured=dict.fromkeys(measures, measured))
    cohort: Cohort = (sampler.draw if hasattr(sampler, "draw") else sampler)(view)
    return cohort


def _cohorts(subject: Subject) -> list[AnyArray]:
    """Draw cohorts of rounds with and without absent clients, and with one client."""
    sampler, cohorts = _sampler(subject), []
    for t in range(ROUNDS):
        cohorts.append(_draw(sampler, world(round=t, away=t % 4 > 0, fresh=t == 0)))
    demand(any(cohort.draws for cohort in cohorts), f"{ROUNDS} rounds with available clients have no participants")
    cohorts.append(_draw(_sampler(subject), world(clients=1, away=False)))
    return [array for cohort in cohorts for array in (cohort.clients, cohort.multiplicity)]


def stated_inclusion(subject: Subject) -> str:
    """Require that over many rounds every client is drawn as often as it states.

    If a client states one probability, the number of its draws is binomial and tested exactly. If it states several, Σ
    1/π over its draws has the mean T and, up to its own estimate, the variance Σ (1 − π)/π², or at most Σ 1/π² if it
    can be drawn several times in a round. It is tested as normal. Tests are two-sided, at FALSE_ALARM over the number
    of clients.
    """
    sampler, measures = subject.made(), tuple(subject.mark("measures", ()))  # unchecked, as it is called often
    stated, times = defaultdict[int, list[float]](list), defaultdict[int, int](int)
    draws, repeated, view = 0, False, world()
    for t in range(DRAWS):
        cohort = _draw(sampler, replace(view, round=t), measures)
        if cohort.inclusion is None:
            return "none stated: weights and accounts that need them reject this sampler"
        draws, repeated = draws + cohort.draws, repeated or cohort.draws > len(np.unique(cohort.clients))
        for client, pi, count in zip(cohort.clients, cohort.inclusion, cohort.multiplicity, strict=True):
            stated[int(client)] += [float(pi)] * int(count)
            times[int(client)] += int(count)
    found = {client: _chance(np.array(pis), times[client], draws, repeated) for client, pis in stated.items()}
    worst = min(found, key=lambda client: found[client])
    limit = FALSE_ALARM / len(found)
    demand(
        found[worst] >= limit,
        f"client {worst} states the inclusion probability {np.mean(stated[worst]):.4g}, but was drawn "
        f"{times[worst]:,} times in {DRAWS:,} rounds (chance {found[worst]:.1g}, rejected below {limit:.1g})",
    )
    return f"{len(found)} clients, smallest chance {found[worst]:.2g}, rejected below {limit:.2g}"


def _chance(stated: Floats, times: int, draws: int, repeated: bool = False) -> float:
    """Return the probability of a count at least as far from the stated one."""
    if np.ptp(stated) <= 1e-12 * stated.max():
        trials = draws if repeated else DRAWS
        share = min(1.0, float(stated[0]) * DRAWS / trials)
        return float(stats.binomtest(times, trials, share).pvalue)
    variance = float(((1 - stated * (not repeated)) / stated**2).sum())
    score = (float((1 / stated).sum()) - DRAWS) / math.sqrt(max(variance, 1e-12))
    return math.erfc(abs(score) / math.sqrt(2))


def _probabilities(subject: Subject) -> list[AnyArray]:
    """Return each round's availability probabilities (N,)."""
    made, found = subject.made(), []
    for t in range(ROUNDS):
        found.append(chances(subject.part, made, world(round=t, away=False)))
    return found


def _rows(
    subject: Subject, order: tuple[int, ...] = tuple(range(len(SIZES))), cuts: tuple[int, ...] = ()
) -> list[Ints]:
    """Return every client's samples, drawn in this order, or the pool's positions, drawn in parts."""
    total, wanted, found = int(SIZES.sum()), subject.settings.get("samples.budget"), []
    labels = [(np.arange(size) ** 2 // 3 + k) % 4 for k, size in enumerate(SIZES)]  # classes of unequal frequency
    rule = RowRule(subject.part, subject.options, STREAMS, wanted, lambda k: labels[k])
    probability = 1.0 if wanted is None else min(1.0, wanted / total)
    for round in (0, *range(5, 10, 2)):
        if rule.pooled:
            parts = pairwise((0, *cuts, total))
            found.append(np.concatenate([rule.positions(round, SIZES, probability, *part) for part in parts]))
        else:
            drawn = {k: rule.rows(round, np.array([k]), SIZES[[k]], total).rows for k in order}
            found += [drawn[k] for k in range(len(SIZES))]
    return found


def _rows_of_many(subject: Subject, sizes: Ints) -> None:
    """Draw the samples of all clients by a pooled rule, of every fiftieth by one that is called client by client."""
    rule = RowRule(
        subject.part,
        subject.options,
        STREAMS,
        subject.settings.get("samples.budget"),
        lambda k: np.arange(sizes[k]) % 4,
    )
    if rule.pooled:
        rule.positions(3, sizes)
        return
    some = np.arange(0, len(sizes), 50)
    rule.rows(3, some, sizes[some], int(sizes.sum()))


def _mediators(subject: Subject) -> list[AnyArray]:
    """Return the mediators of rounds with 1, 7 and 9 selected clients, at most three clients each."""
    made, found = subject.made(), []
    for t, participants in enumerate((1, 7, 9)):
        counts = (np.arange(participants)[:, None] * 3 + np.arange(5) * 2) % 7 + (np.arange(5) == 0)
        counts.flags.writeable = False
        mediators = made(counts, 3, Streams(11).generator(Purpose.SCHEDULE, t), target_distribution(5, None))
        found.append(checked_mediators(subject.part, mediators, participants, 3, t))
    return found


def _cohort(clients: Ints, population: int) -> Cohort:
    """Return a cohort of three strata with all fields that a cohort can have."""
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


def _weigh(subject: Subject, cohort: Cohort, sizes: Ints) -> AnyArray:
    return Weighing(subject.part, subject.options).of(cohort, sizes, 0)


def _weights(subject: Subject) -> list[AnyArray]:
    """Weigh nine of thirty clients with stated inclusion probabilities, twice."""
    sizes = (1 + (np.arange(30) * 17 % 23)).astype(np.int64)
    cohorts = [_cohort(np.arange(first, first + 3 * PARTICIPANTS, 3), 30) for first in (0, 2)]
    return [_weigh(subject, cohort, sizes) for cohort in cohorts]


def _combined(subject: Subject, slices: int = 1) -> list[AnyArray]:
    """Return the combined updates of nine and of six clients, one an outlier, with coordinates sliced as by ranks."""
    aggregator, found = Aggregator(subject.part, subject.options), []
    for participants in (PARTICIPANTS, PARTICIPANTS - 3):  # their coefficients have odd sums, so that no votes tie
        generator = np.random.Generator(np.random.Philox(5))
        updates = torch.from_numpy(generator.standard_normal((participants, COORDINATES)).astype(np.float32))
        updates[-1] *= 50
        coefficients = torch.arange(1, participants + 1, dtype=torch.float32)
        coefficients /= coefficients.sum()
        parts = [part.clone() for part in updates.chunk(slices, dim=1)]
        measured: Any = sum(aggregator.measure(part.clone(), 0) for part in parts) if aggregator.measures else None
        found.append(torch.cat([aggregator.combine(part, coefficients, measured, 0) for part in parts]).numpy())
    return found


MANY = f"cost with {CLIENTS:,} clients"
CONTRACTS = {
    "client sampler": Contract(
        _cohorts,
        "valid cohorts",
        "same draw from the same generator",
        more=(
            (f"inclusion probabilities over {DRAWS:,} draws", stated_inclusion),
            (MANY, lambda s: cost(world, lambda view: _draw(_sampler(s), view))),
        ),
    ),
    "availability": Contract(
        _probabilities,
        "a probability for each client",
        "same probabilities in the same round",
        more=((MANY, lambda s: cost(world, lambda view: chances(s.part, s.made(), view))),),
    ),
    "data sampler": Contract(
        _rows,
        "samples sorted and in range",
        "same samples from the same generator",
        (
            Alike(
                "samples do not depend on the order of clients",
                ({"order": (*range(1, len(SIZES)), 0), "cuts": (9, 60, 61)},),
                "each rank draws one part. Keep nothing between calls, and draw from client.generator, or from "
                "pool.generator(block) for every block of the axis",
            ),
        ),
        ((MANY, lambda s: cost(lambda n: 1 + np.arange(n) % 20, lambda sizes: _rows_of_many(s, sizes))),),
    ),
    "scheduling": Contract(
        _mediators, "a mediator for each client, none too large", "same groups from the same generator"
    ),
    "weights": Contract(
        _weights,
        "finite weights of the stated normalization",
        "same weights of the same cohort",
        more=(
            (
                MANY,
                lambda s: cost(
                    lambda n: (_cohort(np.arange(n), n), 1 + np.arange(n) % 50), lambda pair: _weigh(s, *pair)
                ),
            ),
        ),
    ),
    "aggregator": Contract(
        _combined,
        "shape and type of the result",
        "same result from the same updates",
        (
            Alike(
                "slices of the coordinates agree with the whole",
                ({"slices": 2}, {"slices": 7}, {"slices": COORDINATES}),
                "a coordinate's result may not depend on the others of its slice. Define measure(updates), to be "
                "summed over all slices, and combine(updates, coefficients, measured)",
                1e-5,
            ),
        ),
    ),
}
