"""The clients' models in the plane: probed and clustered as the run did it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedmpi
from benchmarks.studies.fedsso_strata import draw, look, plane
from tests.data_prep.command import main


def test_a_runs_clusters_are_found_again_and_drawn(tmp_path: Path) -> None:
    words = "digits --partition shards --classes-per-client 1 --clients 20 --out"
    assert main([*words.split(), str(tmp_path / "shards")]) == 0
    settings = {
        "rounds": 1,
        "clients.sampler.clustering.outliers": "drop",
        "model.hidden": [16],
        "logging.tensorboard": False,
    }
    fedmpi.run("fedsso", settings, data=str(tmp_path / "shards"), out=tmp_path / "run")
    found = look(tmp_path / "run")
    assert (found.name, found.recorded, found.clusters, found.alone, found.shared_sets) == ("run", 10, 10, 0, 10)
    draw([found], tmp_path / "plane.png")
    assert (tmp_path / "plane.png").stat().st_size > 1000


def test_the_plane_is_that_of_the_two_largest_principal_components() -> None:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(30, 50)) * np.array([9.0, 4.0] + [0.1] * 48) + 5
    centred = rows - rows.mean(axis=0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    expected = centred @ axes[:2].T
    found = plane(rows.astype(np.float32))
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-4)
