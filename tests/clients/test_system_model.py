"""Devices, the virtual clock, over-selection and drop-outs."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.designs import uniform
from fedmpi.clients.devices import Devices, draw_devices, first_to_arrive
from fedmpi.common.fairness import evenness
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.local.pipeline import client_drift, gradient_diversity, local_gain, update_moments

STREAMS = Streams(1)


def devices(clients: int, **settings: object) -> Devices:
    """The devices of this many clients, with "__" in keys for each point."""
    keys = [f"devices.{name.replace('__', '.')}={value}" for name, value in settings.items()]
    table = load_config(None, ["clients.sampler=all", "devices=true", *keys]).devices
    assert table is not None
    return draw_devices(STREAMS, clients, table)


def test_a_client_has_its_rates_independently_of_each_other() -> None:
    """Correlations of 5,000 clients within six standard errors: false alarm 6e-9 in all."""
    drawn = devices(5000, speed="lognormal", upload="lognormal", download="lognormal")
    correlations = np.corrcoef(np.log([drawn.speed, drawn.upload, drawn.download]))
    assert (np.abs(correlations[np.triu_indices(3, 1)]) < 6 / 5000**0.5).all()


def test_rates_follow_their_laws() -> None:
    """Medians and shares of 20,000 clients within six standard errors: false alarm 4e-9 in all."""
    clients, shares = 20_000, {1.0: 0.3, 4.0: 0.5, 9.0: 0.2}
    of_kinds = {"upload": "classes", "upload__rates": list(shares), "upload__shares": list(shares.values())}
    drawn = devices(clients, speed="lognormal", speed__median=100, speed__sigma=0.5, **of_kinds)
    assert np.log(drawn.speed / 100).mean() == pytest.approx(0, abs=6 * 0.5 / clients**0.5)
    for rate, share in shares.items():
        assert (drawn.upload == rate).mean() == pytest.approx(share, abs=6 * (share * (1 - share) / clients) ** 0.5)
    assert (drawn.download == 4e6).all() and (devices(4, speed__median=3).speed == 3).all()


def test_over_selection_takes_the_first_to_arrive() -> None:
    cohort = uniform(np.random.default_rng(0), 20, 6)
    seconds = np.array([5.0, 1.0, np.inf, 2.0, 4.0, 3.0])
    taken = first_to_arrive(STREAMS, 0, cohort, seconds, 4)
    assert np.array_equal(taken.clients, cohort.clients[[1, 3, 4, 5]])
    assert taken.inclusion == pytest.approx(np.full(4, 4 / 20))


@pytest.mark.parametrize(
    "options",
    [
        {"speed__median": 0},
        {"speed": "lognormal", "speed__sigma": -1},
        {"speed": "classes"},
        {"speed": "classes", "speed__rates": [], "speed__shares": []},
        {"speed": "classes", "speed__rates": [1, 2], "speed__shares": [1]},
        {"speed": "classes", "speed__rates": [1, 2], "speed__shares": [0.4, 0.4]},
        {"speed": "classes", "speed__rates": [1, -2], "speed__shares": [0.5, 0.5]},
    ],
    ids=str,
)
def test_impossible_rates_are_rejected(options: dict) -> None:
    with pytest.raises(UserError, match=r"devices\.speed"):
        devices(3, **options)


# Evenness of use, drift and diversity


def test_gini_is_half_the_relative_mean_difference_and_groups_of_units_count_as_their_units() -> None:
    usage, sizes = np.array([1, 4, 0, 2, 9]), np.array([3, 4, 1, 1, 2])
    pairs = np.abs(usage[:, None] - usage).mean() / (2 * usage.mean())
    assert evenness(usage).gini == pytest.approx(pairs)
    grouped, single = evenness(usage, sizes), evenness(np.repeat(usage, sizes))
    assert (grouped.used, grouped.effective, grouped.gini) == pytest.approx(
        (single.used, single.effective, single.gini)
    )


def test_a_round_without_changes_has_neither_diversity_nor_drift_nor_gain() -> None:
    nobody = update_moments(np.empty(0), np.empty(0), np.empty(0))
    assert gradient_diversity(nobody, 0.0) == client_drift(nobody, 0.0) == local_gain(nobody) == 0.0
    still = update_moments(np.zeros(2), np.ones(2), np.array([1.0, 3.0]))
    assert gradient_diversity(still, 0.0) == client_drift(still, 0.0) == 0.0 and local_gain(still) == 2.0
