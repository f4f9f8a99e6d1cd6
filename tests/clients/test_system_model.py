"""Devices, the virtual clock, over-selection and drop-outs."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import Cohort, UserError
from fedmpi.clients.cohort import StrataSummary, uniform
from fedmpi.clients.devices import (
    Devices,
    RateLaw,
    draw_devices,
    first_to_arrive,
    participant_seconds,
    survivors,
)
from fedmpi.common.streams import Purpose, Streams

STREAMS = Streams(1)


def stream() -> np.random.Generator:
    return STREAMS.generator(Purpose.COHORT)


def test_a_client_has_its_rates_independently_of_each_other() -> None:
    """Correlations of 5,000 clients within six standard errors: false alarm 6e-9 in all."""
    law = RateLaw("lognormal", 100.0, 1.0)
    devices = draw_devices(STREAMS, 5000, law, law, law)
    correlations = np.corrcoef(np.log([devices.speed, devices.upload, devices.download]))
    assert (np.abs(correlations[np.triu_indices(3, 1)]) < 6 / 5000**0.5).all()


def test_rates_follow_their_laws() -> None:
    """Medians and shares of 20,000 clients within six standard errors: false alarm 4e-9 in all."""
    clients = 20_000
    speed = RateLaw("lognormal", 100.0, 0.5).draw(clients, STREAMS.generator(Purpose.DEVICE))
    assert np.log(speed / 100).mean() == pytest.approx(0, abs=6 * 0.5 / clients**0.5)
    of_kinds = RateLaw("classes", rates=(1.0, 4.0, 9.0), shares=(0.3, 0.5, 0.2))
    kinds = of_kinds.draw(clients, STREAMS.generator(Purpose.DEVICE))
    for rate, share in zip(of_kinds.rates, of_kinds.shares, strict=True):
        assert (kinds == rate).mean() == pytest.approx(share, abs=6 * (share * (1 - share) / clients) ** 0.5)
    assert (RateLaw(median=3.0).draw(4, stream()) == 3.0).all()


def test_over_selection_takes_the_first_to_arrive_and_ends_the_round_with_the_last_of_them() -> None:
    cohort = uniform(stream(), 20, 6)
    seconds = np.array([5.0, 1.0, np.inf, 2.0, 4.0, 3.0])
    taken, length = first_to_arrive(STREAMS, 0, cohort, seconds, 4)
    assert np.array_equal(taken.clients, cohort.clients[[1, 3, 4, 5]])
    assert length == 4.0
    assert taken.inclusion == pytest.approx(np.full(4, 4 / 20))


@pytest.mark.parametrize("before", [None, [0.5, 0.25, 0.8]])
def test_a_stratum_is_represented_unless_all_who_were_asked_drop_out(before: list[float] | None) -> None:
    """Three clients of the first stratum were invited, one of the second, none of the third."""
    known = None if before is None else np.array(before)
    strata = StrataSummary(np.array([6, 9, 5]), np.array([3, 1, 1]), np.zeros(3), known)
    cohort = Cohort(np.array([1, 4, 7, 12]), np.full(4, 0.5), stratum=np.array([0, 1, 0, 0]), strata=strata)
    left = survivors(STREAMS, 0, cohort, 20, 0.4)
    expected = np.array(before or [1.0, 1.0, 1.0]) * [1 - 0.4**3, 0.6, 1.0]
    assert left.strata is not None and left.strata.represented == pytest.approx(expected)
    assert left.inclusion == pytest.approx(np.full(len(left.clients), 0.5 * 0.6))


@pytest.mark.parametrize(
    "options",
    [
        {"median": 0.0},
        {"law": "lognormal", "median": 1.0, "sigma": -1.0},
        {"law": "classes"},
        {"law": "classes", "rates": (1.0, 2.0), "shares": (1.0,)},
        {"law": "classes", "rates": (1.0, 2.0), "shares": (0.4, 0.4)},
        {"law": "classes", "rates": (1.0, -2.0), "shares": (0.5, 0.5)},
    ],
)
def test_impossible_laws_are_rejected(options: dict) -> None:
    with pytest.raises(UserError, match="devices"):
        RateLaw(**options)


def test_seconds_are_compute_plus_both_transfers() -> None:
    devices = Devices(np.array([10.0, 100.0]), np.array([50.0, 25.0]), np.array([200.0, 400.0]))
    seconds = participant_seconds(devices, np.array([1, 0]), np.array([300, 20]), 400, 100)
    assert seconds == pytest.approx([300 / 100 + 400 / 400 + 100 / 25, 20 / 10 + 400 / 200 + 100 / 50])
