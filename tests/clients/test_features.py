"""Feature vectors of clients from blocks of gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist

from fedmpi.clients.features import GradientTransform, compress, restore
from fedmpi.clients.stratifier import Stratifier
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.config.stratification import CompressedGradient, GradientFeatures, Norms
from fedmpi.mpi import Cluster

GRADIENTS = np.random.default_rng(0).normal(size=(30, 400)).astype(np.float32)
BLOCKS = [
    (np.arange(20, 30), torch.from_numpy(GRADIENTS[20:])),
    (np.arange(0, 7), GRADIENTS[:7]),
    (np.arange(7, 20), GRADIENTS[7:20]),
]


def test_compressed_gradients_are_restored_or_left_as_centres() -> None:
    squeezed = compress(GRADIENTS, 5)
    for decompress, expected in ((True, restore(squeezed)), (False, squeezed.centres)):
        table = Norms(features=CompressedGradient(codebook_size=5, decompress=decompress))
        found = GradientTransform(table, 30, 400, 0.1, Streams(0)).features(BLOCKS)
        assert np.array_equal(found.matrix, expected)
        assert found.norms == pytest.approx(np.linalg.norm(restore(squeezed), axis=1))


def test_projected_features_keep_distances_and_the_norms_of_what_was_sent() -> None:
    """All 435 squared distances within 25 %, the distortion the length of the projection is chosen for."""
    long = np.random.default_rng(1).normal(size=(30, 5000)).astype(np.float32)
    table = Norms(features=GradientFeatures(name="full-gradient"), projection_above=1000)
    transform = GradientTransform(table, 30, 5000, 0.1, Streams(0))
    features = transform.features([(np.arange(30), long)])
    assert features.matrix.shape == (30, transform.width) and transform.width < 5000
    assert "random projection" in transform.description
    ratio = (pdist(features.matrix) / pdist(long)) ** 2
    assert ratio.min() > 0.75 and ratio.max() < 1.25
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
