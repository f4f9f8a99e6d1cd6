"""Strata from feature vectors: k-means, OPTICS and its noise."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from fedmpi import UserError
from fedmpi.clients import stratifier
from fedmpi.clients.stratifier import kmeans, optics, strata_of_clusters
from fedmpi.common.streams import Purpose, Streams

GENERATOR = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(5), 8)
CLOUDS = (20 * GENERATOR.normal(size=(5, 30))[GROUPS] + GENERATOR.normal(size=(40, 30))).astype(np.float32)
LONERS = np.concatenate([CLOUDS, np.diag([500, 1500, 4500] + 27 * [0])[:3]]).astype(np.float32)


NEAREST = GROUPS[((LONERS[40:, None].astype(float) - CLOUDS) ** 2).sum(axis=2).argmin(axis=1)].tolist()


def stream(seed: int = 0) -> np.random.Generator:
    return Streams(seed).generator(Purpose.CLUSTERING)


def test_kmeans_starts_where_its_stream_says() -> None:
    shapeless = np.random.default_rng(3).random((200, 2)).astype(np.float32)
    found = [kmeans(shapeless, 8, stream(seed)) for seed in (1, 2)]
    assert adjusted_rand_score(*found) < 0.99


def test_kmeans_strata_have_no_gaps_even_with_fewer_distinct_vectors_than_strata() -> None:
    vectors = np.repeat(np.array([[0.0, 0.0], [1.0, 1.0]], np.float32), 6, axis=0)
    assert np.array_equal(kmeans(vectors, 5, stream()), np.repeat([0, 1], 6))
    assert sorted(kmeans(np.eye(3, dtype=np.float32), 10, stream())) == [0, 1, 2]


def test_strata_are_numbered_in_order_of_their_first_clients() -> None:
    for labels in (
        kmeans(CLOUDS[::-1], 5, stream()),
        strata_of_clusters(optics(CLOUDS[::-1]), CLOUDS[::-1], "nearest"),
    ):
        _, first = np.unique(labels, return_index=True)
        assert np.array_equal(first, np.sort(first))


@pytest.mark.parametrize("distances_up_to", [0, 100])
def test_optics_finds_groups_without_knowing_their_number(
    distances_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute all distances at once or, for many clients, as they are needed; both give the same clusters."""
    monkeypatch.setattr(stratifier, "DISTANCES_UP_TO", distances_up_to)
    assert adjusted_rand_score(GROUPS, optics(CLOUDS)) == 1.0
    assert optics(LONERS, min_samples=3)[40:].tolist() == [-1, -1, -1]
    apart = np.array([[0.0], [1.0], [10.0], [11.0]], np.float32)
    assert optics(apart, min_samples=2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("noise", "loners"),
    [("nearest", NEAREST), ("singletons", [5, 6, 7]), ("stratum", [5, 5, 5]), ("drop", [-1, -1, -1])],
)
def test_clients_alone_of_their_kind_follow_the_noise_rule(noise: str, loners: list[int]) -> None:
    labels = strata_of_clusters(optics(LONERS), LONERS, noise)  # type: ignore[arg-type]
    assert adjusted_rand_score(GROUPS, labels[:40]) == 1.0
    assert labels[40:].tolist() == loners


def test_dropping_all_clients_is_rejected() -> None:
    with pytest.raises(UserError, match="drop"):
        strata_of_clusters(optics(np.eye(1, dtype=np.float32)), np.eye(1, dtype=np.float32), "drop")
