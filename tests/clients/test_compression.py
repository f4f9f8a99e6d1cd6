"""IS(): one-dimensional k-means of gradients, against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans

from fedmpi.clients.features import compress, restore

LAWS = ["normal", "heavy-tailed", "mostly zero", "far from zero", "two scales"]


def gradients(law: str, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = {
        "normal": lambda: rng.normal(size=size),
        "heavy-tailed": lambda: rng.standard_t(2, size=size),
        "mostly zero": lambda: rng.normal(size=size) * (rng.random(size) < 0.3),
        "far from zero": lambda: 1000 + rng.random(size),
        "two scales": lambda: rng.normal(size=size) * np.where(rng.random(size) < 0.5, 1e-4, 1.0),
    }[law]()
    return values.astype(np.float32)


def squared_error(values: np.ndarray, restored: np.ndarray) -> float:
    return float(((values.astype(np.float64) - restored) ** 2).sum())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("levels", [3, 9])
def test_large_gradients_are_compressed_as_well_as_by_scikit_learn(law: str, levels: int) -> None:
    """The result is within 1 % of the better of ten k-means++ starts."""
    values = gradients(law, 5000)
    shift = np.float64(values.mean())
    centred = values.astype(np.float64) - shift
    reference = KMeans(levels, n_init=10, random_state=0).fit(centred[:, None]).inertia_
    assert squared_error(values, restore(compress(values[None], levels))[0]) <= 1.01 * reference


def test_clients_compressed_together_or_alone_give_bit_identical_values() -> None:
    block = np.stack([gradients(law, 700, seed) for seed, law in enumerate(LAWS)])
    together = compress(block, 9)
    for row, (centres, indices) in enumerate(zip(*together, strict=True)):
        alone = compress(block[row], 9)
        assert np.array_equal(alone.centres[0], centres)
        assert np.array_equal(alone.indices[0], indices)


def test_fewer_distinct_values_than_levels_are_kept_as_they_are() -> None:
    values = np.tile(np.array([0.0, -1.5, 0.0, 2.0], np.float32), 100)
    compressed = compress(values[None], 9)
    assert np.array_equal(restore(compressed)[0], values)
    for size in (50, 500):  # such gradients have clients without samples
        assert not restore(compress(np.zeros((1, size), np.float32), 9)).any()
