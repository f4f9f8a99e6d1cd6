"""Checks of client samplers: valid cohorts, inclusion probabilities as stated, cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import stats

from fedmpi.clients.cohort import Cohort
from fedmpi.clients.sampler import ROUNDING, ClientSampler
from fedmpi.clients.strata import make_strata
from fedmpi.clients.view import ClientNumbers, View
from fedmpi.common.streams import Streams
from fedmpi.common.types import AnyArray, Floats
from fedmpi.testing.check import FALSE_ALARM, Check, Subject, demand, leaves_generators_alone, same_twice
from fedmpi.testing.cost import cost

DRAWS, SEVERAL = 10_000, 50
CLIENTS, COUNT, CLASSES = 14, 4, 5


def sampler_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a client sampler but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: exercise(s)))
    yield subject.check("same draw from the same generator", lambda s: same_twice(lambda: exercise(s)))
    yield subject.check("valid cohorts", valid_cohorts)
    yield subject.check("state survives a checkpoint", survives)
    yield subject.check(f"inclusion probabilities over {DRAWS:,} draws", stated_inclusion)
    yield subject.check("cost with 100,000 clients", lambda s: cost(world, lambda view: checked(s, view)))


def world(clients: int = CLIENTS, round: int = 7, *, away: bool = True, fresh: bool = False) -> View:
    """A made-up round: sizes from 1 to 40, every seventh client away, numbers of two thirds of them."""
    k = np.arange(clients)
    numbers = ClientNumbers(NAMES, clients)
    if not fresh:
        for name in NAMES:
            known = k[k % 3 != 1]
            numbers.enter(name, max(round - 2, 0), known, 0.5 + (known * 7 % 11) / 5.0)
    return View(
        round,
        max(1, COUNT * clients // CLIENTS),
        1 + (k * 13 % 40),
        k[k % 7 != 3] if away else clients,
        Streams(11),
        strata=make_strata(k % 3, np.array([0.5, 1.0, 2.0])[:clients], 0.25 + (k * 5 % 13) / 6.0),
        wanted=lambda among: max(1, COUNT * among // CLIENTS),
        numbers=numbers,
        counts=lambda: (k[:, None] + np.arange(CLASSES)) * 3 % 8,
    )


NAMES = ("loss", "accuracy", "update_norm", "gradient_norm", "seconds")


def draw_cohort(drawer: Any, measures: Sequence[str], view: View) -> Cohort:
    """One round's cohort; the candidates of a sampler that measures are given made-up numbers."""
    if measures:
        candidates = np.asarray(drawer.candidates(view))
        made_up = np.full(len(view.sizes), np.nan)
        made_up[candidates] = 0.5 + (candidates * 3 % 7) / 4.0
        view = replace(view, measured=dict.fromkeys(measures, made_up))
    cohort: Cohort = (drawer.draw if hasattr(drawer, "draw") else drawer)(view)
    return cohort


def checked(subject: Subject, view: View) -> Cohort:
    """A cohort as the server takes it: sorted, and refused where it is none."""
    sampler = ClientSampler(subject.part, subject.options)
    return draw_cohort(sampler, sampler.measures, view)


def measures(subject: Subject) -> Sequence[str]:
    """What the sampler wants measured."""
    return tuple(subject.mark("measures", ()))


def exercise(subject: Subject) -> list[AnyArray]:
    """A few rounds' cohorts, by the part itself, without the care that runs take of generators."""
    made, found = subject.made(), []
    for t in range(3):
        cohort = draw_cohort(made, measures(subject), world(round=t, away=t > 0, fresh=t == 0))
        found += [np.asarray(cohort.clients), np.asarray(cohort.multiplicity)]
    return found


def survives(subject: Subject) -> str:
    """A sampler made anew in a later round must draw what one draws that has been there from the start."""
    there, anew = (ClientSampler(subject.part, subject.options) for _ in range(2))
    for t in range(5):
        draw_cohort(there, there.measures, world(round=t))
    missing = next(iter(there.never_set), None)
    demand(
        missing is None,
        f"state names {missing!r}, but after five rounds there is no such attribute: is it called otherwise?",
    )
    anew.load(there.state())
    first, later = (draw_cohort(sampler, sampler.measures, world(round=5)).clients for sampler in (there, anew))
    demand(
        np.array_equal(first, later),
        "made anew before round 5, as after a resume, it draws other clients: it remembers what no checkpoint holds. "
        "What it may know of earlier rounds are the numbers that it needs=(…), and the attributes, arrays or numbers, "
        "that its class names in state = (…)",
    )
    return "made anew before round 5: the same cohort"


def valid_cohorts(subject: Subject) -> str:
    """Available clients, each once, no more than N; probabilities in (0, 1]; a round of nobody may be chance."""
    sizes = []
    for view in (world(), world(away=False), world(round=0, fresh=True), world(clients=1, away=False)):
        cohort = checked(subject, view)
        clients, available = np.asarray(cohort.clients), view.available
        demand(bool(np.isin(clients, available).all()), f"client {set(clients) - set(available)} is not available")
        demand(
            clients.dtype == np.int64 and bool((np.diff(clients) > 0).all()),
            "clients must be int64, sorted and unique",
        )
        if cohort.inclusion is not None:
            stated = np.asarray(cohort.inclusion)
            demand(stated.shape == clients.shape, "inclusion must have one value a participant")
            most = 1.0 if cohort.draws == len(clients) and not _repeats(subject) else math.inf
            demand(
                bool(((stated > 0) & (stated <= most + ROUNDING)).all()), "inclusion probabilities must lie in (0, 1]"
            )
        sizes.append(len(clients))
    someone = any(sizes) or any(checked(subject, world(round=t)).draws for t in range(SEVERAL))
    demand(someone, f"{SEVERAL} rounds with available clients have no participants")
    return f"{', '.join(map(str, sizes))} participants in four made-up rounds"


def _repeats(subject: Subject) -> bool:
    return any(bool((checked(subject, world(round=t)).multiplicity > 1).any()) for t in range(SEVERAL))


def stated_inclusion(subject: Subject) -> str:
    """Over many rounds every client must be drawn as often as it states.

    Where a client states one probability, the number of its draws is binomial and tested exactly. Where it states
    several, Σ 1/π over its draws has the mean T and, up to its own estimate, the variance Σ (1 − π)/π², or at most
    Σ 1/π² where it can be drawn several times in a round: tested as normal. Two-sided, at FALSE_ALARM over the number
    of clients.

    Raises
    ------
    CheckFailed
        Naming the client that differs most.
    """
    made, wanted = subject.made(), measures(subject)
    stated, times = defaultdict[int, list[float]](list), defaultdict[int, int](int)
    draws, repeated, view = 0, False, world()
    for t in range(DRAWS):
        cohort = draw_cohort(made, wanted, replace(view, round=t))
        if cohort.inclusion is None:
            return "none stated: weights and accounts that need them refuse this sampler"
        draws, repeated = draws + cohort.draws, repeated or cohort.draws > len(np.unique(cohort.clients))
        for client, pi, count in zip(cohort.clients, cohort.inclusion, cohort.multiplicity, strict=True):
            stated[int(client)] += [float(pi)] * int(count)
            times[int(client)] += int(count)
    chances = {client: _chance(np.array(pis), times[client], draws, repeated) for client, pis in stated.items()}
    worst = min(chances, key=lambda client: chances[client])
    limit = FALSE_ALARM / len(chances)
    demand(
        chances[worst] >= limit,
        f"client {worst} states the inclusion probability {np.mean(stated[worst]):.4g}, but was drawn "
        f"{times[worst]:,} times in {DRAWS:,} rounds (chance {chances[worst]:.1g}, refused below {limit:.1g})",
    )
    return f"{len(chances)} clients, smallest chance {chances[worst]:.2g}, refused below {limit:.2g}"


def _chance(stated: Floats, times: int, draws: int, repeated: bool = False) -> float:
    """The probability of a count at least as far from what was stated."""
    if np.ptp(stated) <= 1e-12 * stated.max():
        trials = draws if repeated else DRAWS
        share = min(1.0, float(stated[0]) * DRAWS / trials)
        return float(stats.binomtest(times, trials, share).pvalue)
    variance = float(((1 - stated * (not repeated)) / stated**2).sum())
    score = (float((1 / stated).sum()) - DRAWS) / math.sqrt(max(variance, 1e-12))
    return math.erfc(abs(score) / math.sqrt(2))
