"""Devices with impossible rates; rounds without changes."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.devices import Devices, draw_devices
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.local.observer import client_drift, gradient_diversity, local_gain, update_moments

STREAMS = Streams(1)


def devices(clients: int, **settings: object) -> Devices:
    """The devices of this many clients, with "__" in keys for each point."""
    keys = [f"devices.{name.replace('__', '.')}={value}" for name, value in settings.items()]
    table = load_config(None, ["clients.sampler=all", "devices=true", *keys]).devices
    assert table is not None
    return draw_devices(STREAMS, np.ones(clients, np.int64), table)


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


def test_a_round_without_changes_has_neither_diversity_nor_drift_nor_gain() -> None:
    nobody = update_moments(np.empty(0), np.empty(0), np.empty(0))
    assert gradient_diversity(nobody, 0.0) == client_drift(nobody, 0.0) == local_gain(nobody) == 0.0
    still = update_moments(np.zeros(2), np.ones(2), np.array([1.0, 3.0]))
    assert gradient_diversity(still, 0.0) == client_drift(still, 0.0) == 0.0 and local_gain(still) == 2.0
