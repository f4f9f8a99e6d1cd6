"""The mediators of a round: drawn anew, or once for all rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi.config import load_config
from fedmpi.grouping import MediatorGroups
from fedmpi.streams import Streams

CLIENTS = 40


def groups(reschedule: str) -> MediatorGroups:
    settings = ["preset=astraea", "topology.scheduling=random", f"topology.reschedule={reschedule}"]
    everybody = ["participation.clients=all"] if reschedule == "static" else []
    counts = np.random.default_rng(0).integers(0, 9, (CLIENTS, 5))
    config = load_config(None, [*settings, *everybody, "topology.clients_per_mediator=4"])
    return MediatorGroups(config, counts, None, np.ones(5, np.int64), Streams(3))


@pytest.mark.parametrize(("reschedule", "alike"), [("static", True), ("every-round", False)])
def test_only_static_groups_are_those_of_a_run_that_was_resumed_later(reschedule: str, alike: bool):
    clients = np.arange(CLIENTS)
    first, _ = groups(reschedule).group(0, clients)
    running = groups(reschedule)
    running.group(0, clients)
    later, resumed = running.group(6, clients)[0], groups(reschedule).group(6, clients)[0]
    assert np.array_equal(later, resumed)
    assert np.array_equal(first, later) == alike
