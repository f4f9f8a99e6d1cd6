"""Feature vectors of clients from blocks of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from fedmpi.clients.features import compress, gradient_features, plan_features, restore
from fedmpi.clients.stratifier import Stratifier
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.mpi import Cluster

GRADIENTS = np.random.default_rng(0).normal(size=(30, 400)).astype(np.float32)
BLOCKS = [
    (np.arange(20, 30), torch.from_numpy(GRADIENTS[20:])),
    (np.arange(0, 7), GRADIENTS[:7]),
    (np.arange(7, 20), GRADIENTS[7:20]),
]


def test_compressed_gradients_are_restored_or_left_as_centres() -> None:
    squeezed = compress(GRADIENTS, 5)
    restored = gradient_features(plan_features("compressed-gradient", 30, 400, Streams(0), levels=5), BLOCKS)
    plan = plan_features("compressed-gradient", 30, 400, Streams(0), levels=5, restored=False)
    centres = gradient_features(plan, BLOCKS)
    assert np.array_equal(restored.matrix, restore(squeezed))
    assert np.array_equal(centres.matrix, squeezed.centres)
    assert centres.norms == pytest.approx(np.linalg.norm(restored.matrix, axis=1))


def test_a_run_compresses_to_the_levels_of_its_configuration() -> None:
    config = load_config(
        None, ["clients.sampler=importance", "clients.count=4", "clients.sampler.features.codebook_size=3"]
    )
    run = Stratifier(
        config, Cluster.connect(), (0, 30), 30, 400, lambda clients: clients,
        lambda t, model, clients: iter([(clients, torch.from_numpy(GRADIENTS[clients]))]), Streams(0),
    )  # fmt: skip
    run.observe(0, torch.zeros(400))
    assert run.strata is not None and run.strata.norms is not None
    assert run.strata.norms == pytest.approx(np.linalg.norm(restore(compress(GRADIENTS, 3)), axis=1))


def test_projected_features_keep_distances_and_the_norms_of_what_was_sent() -> None:
    """All 435 squared distances within 25 %, the distortion the length of the projection is chosen for."""
    long = np.random.default_rng(1).normal(size=(30, 5000)).astype(np.float32)
    plan = plan_features("full-gradient", 30, 5000, Streams(0), project_above=1000)
    features = gradient_features(plan, [(np.arange(30), long)])
    assert features.matrix.shape == (30, plan.width)
    assert plan.width < 5000
    assert "random projection" in plan.description
    ratio = (pdist(features.matrix) / pdist(long)) ** 2
    assert ratio.min() > 0.75
    assert ratio.max() < 1.25
    assert features.norms == pytest.approx(np.linalg.norm(long, axis=1), rel=1e-5)


def test_gradients_of_clients_not_selected_stay_as_they_were_measured() -> None:
    settings = ["clients.sampler.refresh_clients=selected", "clients.sampler.features=full-gradient"]
    config = load_config(None, ["clients.sampler=importance", "clients.count=4", *settings])
    run = Stratifier(
        config, Cluster.connect(), (0, 30), 30, 400, lambda clients: clients,
        lambda t, model, clients: iter([(clients, torch.from_numpy(GRADIENTS[clients] * (1 + t)))]), Streams(0),
    )  # fmt: skip
    factors = np.ones(30, np.float32)
    for t, latest in enumerate([[], [3, 7], []]):
        run.latest = np.array(latest, np.int64)
        run.observe(t, torch.zeros(400))
        factors[latest] = 1 + t
        expected = GRADIENTS * factors[:, None]
        assert run.strata is not None and run._kept is not None and run.measured == (len(latest) if t else 30)
        assert run.strata.norms == pytest.approx(np.linalg.norm(expected, axis=1))
        assert np.array_equal(run._kept.matrix, expected)
