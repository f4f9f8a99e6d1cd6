"""The mediators of a round: drawn in every round, or once for all rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import ComponentFailure
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.config.loading import given_config
from fedmpi.mediators.groups import MediatorGroups

CLIENTS = 40


def groups(reschedule: str, scheduling: str = "random") -> MediatorGroups:
    settings = ["preset=astraea", f"topology.scheduling={scheduling}", f"topology.regroup={reschedule}"]
    everybody = ["clients.sampler=all"] if reschedule == "once" else []
    counts = np.random.default_rng(0).integers(0, 9, (CLIENTS, 5))
    config = load_config(None, [*settings, *everybody, "topology.clients_per_mediator=4"])
    return MediatorGroups(config, counts, None, np.ones(5, np.int64), Streams(3))


@pytest.mark.parametrize("scheduling", ["greedy", "random"])
def test_static_groups_depend_on_the_clients_ids_alone(scheduling: str):
    made, everybody = groups("once", scheduling), np.arange(CLIENTS)
    of_all, facts = made.group(0, everybody)
    assert facts["mediators"] == CLIENTS // 4
    generator = np.random.default_rng(1)
    for t in range(1, 9):
        present = np.sort(generator.choice(CLIENTS, 5 + t, replace=False))
        together, facts = made.group(t, present)
        alike = of_all[present]
        assert np.array_equal(together[:, None] == together, alike[:, None] == alike)
        assert facts["mediators"] == len(facts["kl_mediators"]) == len(np.unique(alike)) == together.max() + 1
        resumed, _ = groups("once", scheduling).group(t, present)
        assert np.array_equal(resumed, together)


def by_size(counts: np.ndarray, most: int, generator: np.random.Generator, target: np.ndarray, *, first: int = 7):
    """Neighbors in size share a mediator."""
    mediators = np.empty(len(counts), np.int64)
    mediators[np.argsort(counts.sum(axis=1), kind="stable")] = first + np.arange(len(counts)) // most
    return mediators


def test_a_custom_scheduling_groups_the_participants() -> None:
    config = given_config("astraea", {"topology.scheduling": by_size, "topology.clients_per_mediator": 2})
    counts = np.array([[9, 0], [1, 0], [0, 5], [2, 0], [0, 7]])
    mediators, facts = MediatorGroups(config, counts, None, np.ones(2, np.int64), Streams(3)).group(0, np.arange(5))
    assert mediators.tolist() == [2, 0, 1, 0, 1] and facts["mediators"] == 3


@pytest.mark.parametrize(
    ("found", "message"), [([0, 0, 0], "2 at most"), ([0, 1], "shape"), ([0.0, 1, 2], "whole"), ([0, -1, 2], "-1")]
)
def test_unusable_groups_are_rejected(found: list, message: str) -> None:
    config = given_config(
        "astraea", {"topology.scheduling": lambda *given: np.array(found), "topology.clients_per_mediator": 2}
    )
    with pytest.raises(ComponentFailure, match=message):
        MediatorGroups(config, np.ones((3, 2), np.int64), None, np.ones(2, np.int64), Streams(3)).group(1, np.arange(3))
