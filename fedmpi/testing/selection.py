"""Contracts of components that plan a round: client and data samplers, availability, mediators, weights, combiners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from fedmpi.clients.cohort import Cohort, Presence, StrataSummary
from fedmpi.clients.sampler import ROUNDING, ClientSampler
from fedmpi.clients.strata import make_strata
from fedmpi.clients.turnout import chances
from fedmpi.clients.view import ClientNumbers, View
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.statistics import target_distribution
from fedmpi.mediators.groups import checked_mediators
from fedmpi.samples.row_rule import Pool, RowClient
from fedmpi.testing.check import CLIENTS, FALSE_ALARM, Contract, Subject, cost, demand

DRAWS, SEVERAL = 10_000, 50
FEW, COUNT, CLASSES = 14, 4, 5
"""Clients of a small round, clients drawn, and classes."""
NAMES = ("loss", "accuracy", "update_norm", "gradient_norm", "seconds")
ROUNDS = 5
SIZES = np.array([5, 1, 40, 12, 300, 2, 17])
"""Sizes of the clients on which a data sampler is tried."""
STREAMS = Streams(13)
PARTICIPANTS, COORDINATES, STRATA = 9, 40, 3
THEIR_SIZES = "sizes holds those of all clients, and sizes[cohort.clients] those of the participants"


def world(clients: int = FEW, round: int = 7, *, away: bool = True, fresh: bool = False) -> View:
    """Return a synthetic round: sizes from 1 to 40, every seventh client unavailable, numbers of two thirds of them."""
    k = np.arange(clients)
    numbers = ClientNumbers(NAMES, clients)
    if not fresh:
        for name in NAMES:
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


# --- client samplers ---


def draw_cohort(drawer: Any, measures: Sequence[str], view: View) -> Cohort:
    """Return one round's cohort; the candidates of a sampler that measures get synthetic numbers."""
    if measures:
        candidates = np.asarray(drawer.candidates(view))
        measured = np.full(len(view.sizes), np.nan)
        measured[candidates] = 0.5 + (candidates * 3 % 7) / 4.0
        view = replace(view, measured=dict.fromkeys(measures, measured))
    cohort: Cohort = (drawer.draw if hasattr(drawer, "draw") else drawer)(view)
    return cohort


def _checked(subject: Subject, view: View) -> Cohort:
    """Return a cohort as the server takes it: sorted, and rejected if it is invalid."""
    sampler = ClientSampler(subject.part, subject.options)
    return draw_cohort(sampler, sampler.measures, view)


def _cohorts(subject: Subject) -> list[AnyArray]:
    made, found = subject.made(), []
    for t in range(3):
        cohort = draw_cohort(made, tuple(subject.mark("measures", ())), world(round=t, away=t > 0, fresh=t == 0))
        found += [np.asarray(cohort.clients), np.asarray(cohort.multiplicity)]
    return found


def _sampler_survives(subject: Subject) -> str:
    """Require that a sampler made anew in a later round draws the same as one that has existed from the start."""
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


def _valid_cohorts(subject: Subject) -> str:
    """Require available clients, each once, at most N; probabilities in (0, 1]; empty rounds only by chance."""
    sizes = []
    for view in (world(), world(away=False), world(round=0, fresh=True), world(clients=1, away=False)):
        cohort = _checked(subject, view)
        clients, available = np.asarray(cohort.clients), view.available
        demand(bool(np.isin(clients, available).all()), f"client {set(clients) - set(available)} is not available")
        rising = clients.dtype == np.int64 and bool((np.diff(clients) > 0).all())
        demand(rising, "clients must be int64, sorted and unique")
        if cohort.inclusion is not None:
            stated = np.asarray(cohort.inclusion)
            demand(stated.shape == clients.shape, "inclusion must have one value a participant")
            often = any(bool((_checked(subject, world(round=t)).multiplicity > 1).any()) for t in range(SEVERAL))
            most = 1.0 if cohort.draws == len(clients) and not often else math.inf
            fits = bool(((stated > 0) & (stated <= most + ROUNDING)).all())
            demand(fits, "inclusion probabilities must lie in (0, 1]")
        sizes.append(len(clients))
    someone = any(sizes) or any(_checked(subject, world(round=t)).draws for t in range(SEVERAL))
    demand(someone, f"{SEVERAL} rounds with available clients have no participants")
    return f"{', '.join(map(str, sizes))} participants in four synthetic rounds"


def stated_inclusion(subject: Subject) -> str:
    """Require that over many rounds every client is drawn as often as it states.

    If a client states one probability, the number of its draws is binomial and tested exactly. If it states several, Σ
    1/π over its draws has the mean T and, up to its own estimate, the variance Σ (1 − π)/π², or at most Σ 1/π² if it
    can be drawn several times in a round. It is tested as normal. Tests are two-sided, at FALSE_ALARM over the number
    of clients.
    """
    made, measures = subject.made(), tuple(subject.mark("measures", ()))
    stated, times = defaultdict[int, list[float]](list), defaultdict[int, int](int)
    draws, repeated, view = 0, False, world()
    for t in range(DRAWS):
        cohort = draw_cohort(made, measures, replace(view, round=t))
        if cohort.inclusion is None:
            return "none stated: weights and accounts that need them refuse this sampler"
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
        f"{times[worst]:,} times in {DRAWS:,} rounds (chance {found[worst]:.1g}, refused below {limit:.1g})",
    )
    return f"{len(found)} clients, smallest chance {found[worst]:.2g}, refused below {limit:.2g}"


def _chance(stated: Floats, times: int, draws: int, repeated: bool = False) -> float:
    """Return the probability of a count at least as far from the stated one."""
    if np.ptp(stated) <= 1e-12 * stated.max():
        trials = draws if repeated else DRAWS
        share = min(1.0, float(stated[0]) * DRAWS / trials)
        return float(stats.binomtest(times, trials, share).pvalue)
    variance = float(((1 - stated * (not repeated)) / stated**2).sum())
    score = (float((1 / stated).sum()) - DRAWS) / math.sqrt(max(variance, 1e-12))
    return math.erfc(abs(score) / math.sqrt(2))


# --- availability ---


def _answers(subject: Subject) -> list[AnyArray]:
    made = subject.made()
    return [np.asarray(made(world(round=t, away=False))) for t in range(ROUNDS)]


def _present(subject: Subject, rounds: range = range(ROUNDS)) -> list[Floats]:
    """Return each round's probabilities (N,); reject invalid ones."""
    made = subject.made()
    return [chances(subject.part, made, world(round=t, away=False)) for t in rounds]


def _probabilities(subject: Subject) -> str:
    found = np.concatenate(_present(subject))
    return f"from {found.min():.3g} to {found.max():.3g}"


def _rounds_alone(subject: Subject) -> str:
    """Require that a model made anew in a later round gives the same as one that has existed from the start."""
    first, later = _present(subject)[-1], _present(subject, range(ROUNDS - 1, ROUNDS))[-1]
    demand(
        np.array_equal(first, later),
        f"made anew before round {ROUNDS - 1}, as after a resume, it gives other probabilities: let them follow from "
        "the view alone",
    )
    return f"round {ROUNDS - 1} is the same without the rounds before"


# --- data samplers ---


def _client(index: int, round: int, wanted: int | None = None) -> RowClient:
    """Return a synthetic client with classes of unequal frequency."""
    size = int(SIZES[index])
    labels = (np.arange(size) ** 2 // 3 + index) % 4
    labels.flags.writeable = False
    share = float(size) if wanted is None else min(float(size), wanted * size / SIZES.sum())
    return RowClient(index, round, labels, STREAMS.generator(Purpose.ROWS, round, index), share)


def _pool(subject: Subject, round: int, sizes: Ints, start: int = 0, stop: int | None = None) -> Pool:
    """Return all clients on one axis, from `start` up to `stop`."""
    wanted, total = subject.settings.get("samples.budget"), int(sizes.sum())
    probability = 1.0 if wanted is None else min(1.0, wanted / total)
    return Pool(round, sizes, start, total if stop is None else stop, probability, wanted, STREAMS)


def _rows_of_all(subject: Subject, round: int, elsewhere: bool = False) -> list[Ints]:
    """Return every client's samples, or the positions of the pool; clients in another order if `elsewhere`."""
    made, wanted = subject.made(), subject.settings.get("samples.budget")
    if subject.mark("pooled", False):
        return [np.asarray(made(_pool(subject, round, SIZES)))]
    order = [*range(1, len(SIZES)), 0] if elsewhere else range(len(SIZES))
    found = {k: np.asarray(made(_client(k, round, wanted))) for k in order}
    return [found[k] for k in range(len(SIZES))]


def _rows(subject: Subject) -> list[AnyArray]:
    return [rows for round in (0, 5) for rows in _rows_of_all(subject, round)]


def _sorted_in_range(subject: Subject) -> str:
    """Require whole numbers from 0 below the number of samples, each once, in rising order."""
    used, pooled = 0, subject.mark("pooled", False)
    for round in range(20):
        for k, rows in enumerate(_rows_of_all(subject, round)):
            whose, size = ("the pool's", int(SIZES.sum())) if pooled else (f"client {k}'s", int(SIZES[k]))
            demand(rows.ndim == 1, f"{whose} rows have the shape {rows.shape}: return (r,)")
            demand(not rows.size or np.issubdtype(rows.dtype, np.integer), f"{whose} rows are {rows.dtype}, not whole")
            wrong = rows[(rows < 0) | (rows >= size)]
            demand(not wrong.size, f"{whose} row {wrong[:1]} lies outside 0 … {size - 1}")
            demand(bool((np.diff(rows) > 0).all()), f"{whose} rows are not sorted, or one is there twice: {rows[:12]}")
            used += len(rows)
    return f"{used / 20:.1f} of {int(SIZES.sum())} rows a round, over 20 rounds"


def _rows_independent(subject: Subject) -> str:
    """Require samples of a client that do not depend on other clients, whose order differs on other ranks."""
    pooled = subject.mark("pooled", False)
    for round in (0, 5):
        whole = _rows_of_all(subject, round)
        if pooled:
            cuts = [0, 9, 60, 61, int(SIZES.sum())]
            parts = [subject.made()(_pool(subject, round, SIZES, *cut)) for cut in zip(cuts, cuts[1:], strict=False)]
            other = [np.concatenate(parts)]
        else:
            other = _rows_of_all(subject, round, elsewhere=True)
        demand(
            all(map(np.array_equal, whole, other)),
            "parts of the axis drawn alone differ from the same parts of the whole: ranks draw parts. Let every "
            "block of the axis have its own generator, pool.generator(block)"
            if pooled
            else "a client has other rows when the clients are asked in another order, as on another rank: keep "
            "nothing between calls, draw from client.generator alone",
        )
    return "in parts, the same" if pooled else "in another order, the same"


def _rows_of_round(subject: Subject, clients: Ints) -> None:
    """Run a round of all clients for a pooled rule, of every fiftieth for one called client by client."""
    made, wanted = subject.made(), subject.settings.get("samples.budget")
    if subject.mark("pooled", False):
        made(_pool(subject, 3, 1 + clients % 20))
        return
    for k in clients[::50].tolist():
        made(_client(k % len(SIZES), k, wanted))


# --- scheduling of mediators ---


def _grouped(subject: Subject) -> list[AnyArray]:
    """Return the mediators of rounds with 1, 7 and 9 selected clients; reject invalid ones."""
    made, found = subject.made(), []
    for t, participants in enumerate((1, 7, 9)):
        counts = (np.arange(participants)[:, None] * 3 + np.arange(5) * 2) % 7 + (np.arange(5) == 0)
        before, generator = counts.copy(), Streams(11).generator(Purpose.SCHEDULE, t)
        mediators = made(counts, 3, generator, target_distribution(5, None))
        demand(np.array_equal(counts, before), "it changes the class counts that it is given: copy them first")
        found.append(checked_mediators(subject.part, mediators, participants, 3, t))
    return found


def _groups(subject: Subject) -> str:
    return ", ".join(f"{len(m)} clients in {int(m.max()) + 1}" for m in _grouped(subject))


# --- aggregation weights ---


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


def _nine_of_thirty(first: int) -> tuple[Cohort, Ints]:
    """Return nine of thirty clients with their inclusion probabilities, and the sizes of all thirty."""
    sizes = 1 + (np.arange(30) * 17 % 23)
    return _cohort(np.arange(first, first + 3 * PARTICIPANTS, 3), 30), sizes.astype(np.int64)


def _weights_of(made: Any, cohort: Cohort, sizes: Ints) -> AnyArray:
    """Return the weights; if they use the sizes of all clients instead of the selected ones, explain the error."""
    try:
        return np.asarray(made(cohort, sizes))
    except ValueError as error:
        demand(f"({len(sizes)},)" not in str(error), f"{str(error).rstrip()}: {THEIR_SIZES}")
        raise


def _weigh(subject: Subject) -> list[AnyArray]:
    made = subject.made()
    return [_weights_of(made, *_nine_of_thirty(first)) for first in (0, 2)]


def _well_normalized(subject: Subject) -> str:
    """Require one finite number per selected client; if they are normalized, none below 0 and not all 0."""
    marks, totals = subject.part.marks, []
    for first in (0, 2):
        cohort, sizes = _nine_of_thirty(first)
        before = sizes.copy()
        found = np.asarray(_weights_of(subject.made(), cohort, sizes), np.float64)
        one_each = f"shape {found.shape} for {PARTICIPANTS} participants: one number each; {THEIR_SIZES}"
        demand(found.shape == (PARTICIPANTS,), one_each)
        demand(bool(np.isfinite(found).all()), f"not finite: {found}")
        demand(bool((sizes == before).all()), "it changes the sizes that it is given: copy them")
        normalized = marks.get("normalized", True)
        if normalized(cohort) if callable(normalized) else normalized:
            demand(bool((found >= 0).all()), f"normalized = True, but a coefficient is negative: {found.min():g}")
            demand(float(found.sum()) > 0, "normalized = True, but all coefficients are 0: their total divides the sum")
        counts = sizes[cohort.clients] ** int(marks.get("per_sample", 0))
        totals.append(float((found * counts).sum()))
    return f"total weights {totals[0]:.4g} and {totals[1]:.4g}"


# --- combiners ---


def _combine(subject: Subject, cuts: int = 1, participants: int = PARTICIPANTS) -> Tensor:
    """Return the combined update, with coordinates sliced as for ranks; one update is an outlier."""
    made = subject.made()
    generator = np.random.Generator(np.random.Philox(5))
    updates = torch.from_numpy(generator.standard_normal((participants, COORDINATES)).astype(np.float32))
    updates[-1] *= 50
    coefficients = torch.arange(1, participants + 1, dtype=torch.float32)
    coefficients = coefficients / coefficients.sum()
    parts = [part.clone() for part in updates.chunk(cuts, dim=1)]
    if not hasattr(made, "combine"):
        return torch.cat([made(part, coefficients.clone()) for part in parts])
    measured = sum(made.measure(part.clone()).double() for part in parts)
    return torch.cat([made.combine(part, coefficients.clone(), measured) for part in parts])


def _combinations(subject: Subject) -> list[AnyArray]:
    return [_combine(subject, participants=count).numpy() for count in (PARTICIPANTS, PARTICIPANTS - 1)]


def _shape_and_type(subject: Subject) -> str:
    """Require (m, s), (m,) -> (s,) of the updates' type, finite, also for slices of one coordinate."""
    for cuts in (1, 3, COORDINATES):
        found = _combine(subject, cuts)
        demand(isinstance(found, Tensor), f"it returns {type(found).__name__}: return a tensor (s,)")
        demand(found.shape == (COORDINATES,), f"{cuts} slices of {COORDINATES} coordinates gave {tuple(found.shape)}")
        demand(found.dtype == torch.float32, f"float32 updates became {found.dtype}: keep their type")
        demand(bool(found.isfinite().all()), "finite updates became values that are not")
    return f"({PARTICIPANTS}, s) became (s,) for s = {COORDINATES}, {-(-COORDINATES // 3)}, 1"


def _slices_agree(subject: Subject) -> str:
    """Require the same update for any slicing of the coordinates, since ranks see slices."""
    whole = _combine(subject)
    for cuts in (2, 7):
        apart = float((_combine(subject, cuts) - whole).abs().max())
        demand(
            apart <= 1e-5 * max(float(whole.abs().max()), 1e-30),
            f"cut into {cuts} slices the result differs by {apart:.2g}: a coordinate's result may not depend on the "
            "others of its slice. Give the combiner measure(updates), whose results are summed over all slices, and "
            "combine(updates, coefficients, measured)",
        )
    return "1, 2 and 7 slices, the same update"


MANY = f"cost with {CLIENTS:,} clients"
CONTRACTS = {
    "client sampler": Contract(
        _cohorts,
        "same draw from the same generator",
        (
            ("valid cohorts", _valid_cohorts),
            ("state survives a checkpoint", _sampler_survives),
            (f"inclusion probabilities over {DRAWS:,} draws", stated_inclusion),
            (MANY, lambda s: cost(world, lambda view: _checked(s, view))),
        ),
    ),
    "availability": Contract(
        _answers,
        "same probabilities in the same round",
        (
            ("a probability for each client", _probabilities),
            ("state survives a checkpoint", _rounds_alone),
            (MANY, lambda s: cost(world, lambda view: chances(s.part, s.made(), view))),
        ),
    ),
    "data sampler": Contract(
        _rows,
        "same rows from the same generator",
        (
            ("rows sorted and in range", _sorted_in_range),
            ("rows do not depend on who else is asked", _rows_independent),
            (MANY, lambda s: cost(np.arange, lambda clients: _rows_of_round(s, clients))),
        ),
    ),
    "scheduling": Contract(
        _grouped, "same groups from the same generator", (("a mediator for each client, none too large", _groups),)
    ),
    "weights": Contract(
        _weigh,
        "same weights of the same cohort",
        (
            ("finite weights of the stated normalization", _well_normalized),
            (
                MANY,
                lambda s: cost(
                    lambda n: (_cohort(np.arange(n), n), 1 + np.arange(n) % 50), lambda pair: s.made()(*pair)
                ),
            ),
        ),
    ),
    "aggregator": Contract(
        _combinations,
        "same result from the same updates",
        (
            ("shape and type of the result", _shape_and_type),
            ("slices of the coordinates agree with the whole", _slices_agree),
        ),
    ),
}
