"""Stratified cohorts: their clients, unavailable clients, and too large requests."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi.clients.devices import first_to_arrive
from fedmpi.clients.strata import Strata, make_strata, stratified
from fedmpi.common.streams import Streams

LABELS = np.array([0] * 20 + [1] * 12 + [2] * 6 + [-1] * 2 + [3] * 2)
NORMS = np.random.default_rng(0).lognormal(size=len(LABELS))


def four_strata(norms: np.ndarray | None = NORMS) -> Strata:
    return make_strata(LABELS, np.array([1.0, 2.0, 0.5, 0.0]), norms)


@pytest.mark.parametrize("allocation", ["proportional", "neyman", "equal"])
@pytest.mark.parametrize("draw", ["uniform", "importance"])
@pytest.mark.parametrize("count", [1, 8, 40, 100])
def test_a_cohort_is_sorted_of_the_requested_size_and_keeps_to_its_allocation(
    allocation: str, draw: str, count: int
) -> None:
    cohort = stratified(four_strata(), 42, count, Streams(0), 3, allocation=allocation, draw=draw)  # type: ignore[arg-type]
    assert len(cohort.clients) == min(count, 40)
    assert (np.diff(cohort.clients) > 0).all()
    assert cohort.stratum is not None and cohort.strata is not None
    assert np.array_equal(cohort.stratum, LABELS[cohort.clients])
    assert np.array_equal(np.bincount(cohort.stratum, minlength=4), cohort.strata.draws)
    assert ((cohort.inclusion > 0) & (cohort.inclusion <= 1 + 1e-12)).all()


def test_the_rest_of_a_cluster_represents_unavailable_clients() -> None:
    available = np.setdiff1d(np.arange(42), np.arange(12))
    cohort = stratified(four_strata(), available, 20, Streams(0), 0)
    assert cohort.strata is not None
    assert cohort.strata.draws[0] == 8  # its share is 10: what it cannot supply goes to other strata
    assert cohort.strata.draws.sum() == 20
    assert not np.isin(cohort.clients, np.arange(12)).any()
    some = stratified(four_strata(), available, 10, Streams(0), 0)
    assert some.strata is not None
    assert some.strata.draws.tolist() in ([5, 3, 2, 0], [5, 3, 1, 1], [5, 3, 2, 1])
    assert some.inclusion[some.stratum == 0] == pytest.approx(np.full(5, 5 / 8))


@pytest.mark.parametrize("draw", ["uniform", "importance"])
def test_over_selection_asks_more_and_takes_the_first_of_each_stratum(draw: str) -> None:
    asked = stratified(four_strata(), 42, 8, Streams(0), 0, draw=draw, over_selection=1.5)  # type: ignore[arg-type]
    assert asked.strata is not None and asked.stratum is not None
    quotas = asked.strata.draws
    assert np.array_equal(
        np.bincount(asked.stratum, minlength=4), np.minimum(np.ceil(1.5 * quotas), asked.strata.sizes)
    )
    seconds = np.random.default_rng(1).random(len(asked.clients))
    taken = first_to_arrive(Streams(0), 0, asked, seconds, 8)
    assert taken.stratum is not None
    assert np.array_equal(np.bincount(taken.stratum, minlength=4), quotas)
    for stratum in range(4):
        times = np.sort(seconds[asked.stratum == stratum])
        kept = np.isin(asked.clients, taken.clients) & (asked.stratum == stratum)
        assert np.sort(seconds[kept]) == pytest.approx(times[: quotas[stratum]])


@pytest.mark.parametrize("draw", ["uniform", "importance"])
@pytest.mark.parametrize("every", [None, True, False])
def test_unless_set_otherwise_neyman_draws_from_every_stratum(draw: str, every: bool | None) -> None:
    """One stratum has next to all the spread; another one has no client left."""
    strata = make_strata(LABELS, np.array([1e3, 1e-3, 1e-3, 1e-3]), NORMS)
    own = {} if every is None else {"every_stratum": every}
    available = np.flatnonzero(LABELS != 2)
    drawn = []
    for t in range(20):
        cohort = stratified(
            strata, available, 5, Streams(0), t, allocation="neyman", draw=draw, over_selection=1.5, **own
        )  # type: ignore[arg-type]
        drawn.append(cohort.strata.draws.tolist())  # type: ignore[union-attr]
        assert ((cohort.inclusion > 0) & (cohort.inclusion <= 1 + 1e-12)).all()
    assert drawn == [[3, 1, 0, 1] if every is not False else [5, 0, 0, 0]] * 20
