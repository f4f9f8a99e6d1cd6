"""Contracts of components that plan a round: client and data samplers, availability, weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from fedmpi.aggregation.aggregators import Aggregator
from fedmpi.aggregation.weights import Weighing
from fedmpi.clients.availability import chances
from fedmpi.clients.cohort import Cohort, Presence, StrataSummary
from fedmpi.clients.devices import rates_of
from fedmpi.clients.features import FeatureVectors
from fedmpi.clients.sampler import SKETCH_SIZE, ClientNumbers, ClientSampler, PastRound, View
from fedmpi.clients.strata import make_strata
from fedmpi.common.decorators import NUMBERS, VECTORS
from fedmpi.common.streams import Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.samples.rules import RowRule
from fedmpi.testing.check import CLIENTS, FALSE_ALARM, TOLERANCE, Contract, Results, Subject, cost, demand, demand_equal
from fedmpi.testing.runs import in_a_run

DRAWS = 10_000
"""Rounds of the check of inclusion probabilities."""
FEW, COUNT, CLASSES, STRATA = 14, 4, 5, 3
"""Clients of a small round, clients drawn, classes, and strata."""


def world(clients: int = FEW, round: int = 7) -> View:
    """Return a synthetic round: sizes from 1 to 40, every seventh client unavailable, numbers of two thirds of them."""
    k = np.arange(clients)
    numbers, known = ClientNumbers(NUMBERS, clients), k[k % 3 != 1]
    for name in NUMBERS:
        numbers.enter(name, max(round - 2, 0), known, _synthetic(name, known * 7 % 11))
    return View(
        round,
        max(1, COUNT * clients // FEW),
        1 + (k * 13 % 40),
        k[k % 7 != 3],
        Streams(11),
        strata=make_strata(k % 3, np.array([0.5, 1.0, 2.0])[:clients], 0.25 + (k * 5 % 13) / 6.0),
        wanted=lambda among: max(1, COUNT * among // FEW),
        numbers=numbers,
        counts=lambda: (k[:, None] + np.arange(CLASSES)) * 3 % 8,
        past=[
            PastRound(
                t, k[t % 3 :: 3], k[t % 3 :: 3][1:], {"train_loss": 2 / (t + 1), "test_accuracy": t / 10}, 9.0 + t
            )
            for t in range(round)
        ],
        clock=sum(9.0 + t for t in range(round)),
    )


def _synthetic(name: str, codes: Ints) -> AnyArray:
    """Return a number of each code (m,) from 0.5 on, or a vector (m, k)."""
    if name in VECTORS:
        return np.sin(np.outer(codes + 1, np.arange(1, SKETCH_SIZE + 1)))
    return 0.5 + codes / 5.0


def _draw(sampler: Any, view: View, measures: tuple[str, ...]) -> Cohort:
    """Return one round's cohort; the candidates of a sampler that measures get synthetic numbers."""
    if measures:
        view = replace(view, measured={})  # the same view for both calls: its generator continues
        candidates = np.asarray(sampler.candidates(view))
        measured = ClientNumbers(measures, len(view.sizes))
        for name in measures:
            measured.enter(name, view.round, candidates, _synthetic(name, candidates * 3 % 7))
        view.measured.update(measured.values)
    cohort: Cohort = (sampler.draw if hasattr(sampler, "draw") else sampler)(view)
    return cohort


def _of_one_round(subject: Subject, view: View) -> Cohort:
    sampler = ClientSampler(subject.part, subject.options)
    return _draw(sampler, view, sampler.measures)


def few_available(subject: Subject) -> str:
    """Require a cohort from rounds in which fewer clients are available than requested."""
    for count in range(1, COUNT):
        view = world()
        _of_one_round(subject, replace(view, present=view.available[:count]))
    return f"1 to {COUNT - 1} of {COUNT} requested clients"


def stated_inclusion(subject: Subject) -> str:
    """Require that over many rounds every client is drawn as often as it states.

    If a client states one probability, the number of its draws is binomial and tested exactly. If it states several, Σ
    1/π over its draws has the mean T and, up to its own estimate, the variance Σ (1 − π)/π², or at most Σ 1/π² if it
    can be drawn several times in a round. It is tested as normal. Tests are two-sided, at FALSE_ALARM over the number
    of clients.
    """
    sampler, measures = subject.made(), tuple(subject.part.marks.get("measures", ()))  # unchecked: called often
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


def _rows_of_many(subject: Subject, sizes: Ints) -> None:
    """Draw the samples of all clients by a pooled rule, of every fiftieth by one that is called client by client."""
    budget = subject.settings.get("samples.budget")

    def measure(round: int, client: int, names: Sequence[str]) -> dict[str, Floats]:
        return {name: 0.5 + np.arange(sizes[client]) * 7 % 11 / 5.0 for name in names}

    rule = RowRule(subject.part, subject.options, Streams(13), budget, lambda k: np.arange(sizes[k]) % 4, measure)
    if rule.pooled:
        rule.positions(3, sizes)
    else:
        some = np.arange(0, len(sizes), 50)
        rule.rows(3, some, sizes[some], int(sizes.sum()))


def _everybody(population: int) -> Cohort:
    """Return a cohort of all clients in three strata."""
    stratum = np.arange(population) // 2 % STRATA
    sizes, ones = np.bincount(stratum, minlength=STRATA), np.ones(STRATA)
    return Cohort(
        np.arange(population),
        np.ones(population),
        stratum=stratum,
        strata=StrataSummary(sizes, sizes, ones, ones),
        presence=Presence(population, groups=stratum),
        wanted=60,
    )


def _weigh(subject: Subject, cohort: Cohort) -> None:
    sizes = 1 + np.arange(len(cohort.clients)) % 50
    Weighing(subject.part, subject.options, len(sizes)).of(cohort, sizes, 0)


def slices_agree(subject: Subject) -> str:
    """Require that the combined updates of nine clients do not depend on how ranks share the coordinates."""
    draws = np.random.Generator(np.random.Philox(5)).standard_normal((9, 40)).astype(np.float32)
    coefficients = torch.arange(1.0, 10.0) / 45

    def combined(slices: int) -> Results:
        aggregator, clients, measured = Aggregator(subject.part, subject.options, 9), np.arange(9), None
        parts, found = torch.from_numpy(draws).chunk(slices, dim=1), {}
        for t in range(2):  # what it keeps of the first round may change the second
            if aggregator.measures:
                measured = torch.stack([aggregator.measure(part.clone(), t, clients) for part in parts]).sum(0)
            whole = torch.cat([aggregator.combine(part.clone(), coefficients, measured, t, clients) for part in parts])
            found[f"the combined update of round {t}"] = whole.numpy()
            aggregator.after(measured, clients, t)
        return found

    problem = (
        "a coordinate's result may not depend on the others of its slice. Define measure(updates), to be summed over "
        "all slices, and combine(updates, coefficients, measured)"
    )
    apart = max(demand_equal(combined(1), combined(slices), problem, TOLERANCE) for slices in (2, 7, 40))
    return f"equal within {apart:.1g}"


def rows_agree(subject: Subject) -> str:
    """Require that the features of seven clients do not depend on the blocks in which they are measured."""
    vectors, draws = FeatureVectors(subject.part, subject.made(), 0.1), np.random.Generator(np.random.Philox(6))
    block = draws.integers(1, 30, (7, 40)) if vectors.of_labels else draws.standard_normal((7, 40)).astype(np.float32)
    whole = {"the features": vectors(block)[0]}
    alone = {"the features": np.concatenate([vectors(row[None])[0] for row in block])}
    apart = demand_equal(whole, alone, "compute the vector of a client from its own row only", TOLERANCE)
    return f"equal within {apart:.1g}"


MANY = f"cost with {CLIENTS:,} clients"
CONTRACTS = {
    "client sampler": Contract(
        in_a_run,
        more=(
            ("rounds with few available clients", few_available),
            (f"inclusion probabilities over {DRAWS:,} draws", stated_inclusion),
            (MANY, lambda subject: cost(world, lambda view: _of_one_round(subject, view))),
        ),
    ),
    "aggregator": Contract(in_a_run, more=(("slices of the coordinates agree with the whole", slices_agree),)),
    "availability": Contract(
        in_a_run, more=((MANY, lambda subject: cost(world, lambda view: chances(subject.part, subject.made(), view))),)
    ),
    "feature": Contract(in_a_run, more=(("features of a client do not depend on others", rows_agree),)),
    "device rate": Contract(
        in_a_run, more=((MANY, lambda subject: cost(world, lambda view: rates_of(subject.part, subject.made(), view))),)
    ),
    "data sampler": Contract(
        in_a_run,
        more=((MANY, lambda subject: cost(lambda n: 1 + np.arange(n) % 20, lambda n_k: _rows_of_many(subject, n_k))),),
    ),
    "weights": Contract(
        in_a_run, more=((MANY, lambda subject: cost(_everybody, lambda cohort: _weigh(subject, cohort))),)
    ),
}
