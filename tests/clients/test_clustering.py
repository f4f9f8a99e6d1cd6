"""Strata from feature vectors: k-means, OPTICS and its noise."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import fedmpi
from fedmpi import UserError, features
from fedmpi.clients import stratifier
from fedmpi.clients.features import compressed_gradient, label_histogram, one_step_change
from fedmpi.clients.stratifier import kmeans, optics, strata_of_clusters
from fedmpi.common.streams import Purpose, Streams

GENERATOR = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(5), 8)
CLOUDS = (20 * GENERATOR.normal(size=(5, 30))[GROUPS] + GENERATOR.normal(size=(40, 30))).astype(np.float32)
LONERS = np.concatenate([CLOUDS, np.diag([500, 1500, 4500] + 27 * [0])[:3]]).astype(np.float32)


HISTOGRAM = "label-histogram"
STRATIFIED = {"rounds": 1, "clients.sampler": "stratified", "clients.count": 4}
STRATIFIED |= {"clients.sampler.strata": 12, "clients.sampler.within_stratum": "uniform"}


def stream(seed: int = 0) -> np.random.Generator:
    return Streams(seed).generator(Purpose.CLUSTERING)


def test_kmeans_strata_have_no_gaps_even_with_fewer_distinct_vectors_than_strata() -> None:
    vectors = np.repeat(np.array([[0.0, 0.0], [1.0, 1.0]], np.float32), 6, axis=0)
    assert np.array_equal(kmeans(vectors, 5, stream()), np.repeat([0, 1], 6))
    assert sorted(kmeans(np.eye(3, dtype=np.float32), 10, stream())) == [0, 1, 2]


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


def test_dropping_all_clients_is_rejected() -> None:
    with pytest.raises(UserError, match="drop"):
        strata_of_clusters(optics(np.eye(1, dtype=np.float32)), np.eye(1, dtype=np.float32), "drop")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda block: block[0], r"returned features of shape \(10,\)\. Return finite numbers, shape \(1, f\)"),
        (lambda block: np.ones((len(block) + 1, 2)), r"returned features of shape \(2, 2\)"),
        (lambda block: np.full((len(block), 2), np.nan), "returned features of shape .* Return finite numbers"),
        (lambda block: (block, [1, 2]), r"returned norms of type int64, shape \(2,\)"),
        (lambda block: "words", "ValueError"),
    ],
)
def test_what_are_no_features_is_rejected_with_the_component_named(made: Any, words: str) -> None:
    with pytest.raises(fedmpi.ComponentFailure, match=f"the feature .*test_clustering.*{words}"):
        fedmpi.run("fedavg", STRATIFIED | {"clients.sampler.features": features(needs="labels")(made)})


def test_built_in_features_are_those_of_plain_formulas() -> None:
    gradients = np.array([[3.0, -4.0, 3.0]], np.float32)
    assert label_histogram(np.array([[0, 0], [1, 3]])).tolist() == [[0, 0], [0.25, 0.75]]
    assert one_step_change(gradients, lr=0.5).tolist() == [[-1.5, 2.0, -1.5]]
    for decompress, expected in ((True, gradients), (False, np.array([[-4.0, 3.0]]))):
        vectors, norms = compressed_gradient(gradients, codebook_size=2, decompress=decompress)
        np.testing.assert_allclose(vectors, expected)
        np.testing.assert_allclose(norms, 34**0.5)


def test_own_features_of_labels_make_the_strata() -> None:
    @features(needs="labels")
    def largest(class_counts: np.ndarray) -> np.ndarray:
        return np.eye(class_counts.shape[1])[class_counts.argmax(axis=1)]

    runs = [fedmpi.run("fedavg", STRATIFIED | {"clients.sampler.features": chosen}) for chosen in (largest, HISTOGRAM)]
    [[own], [built_in]] = [run.records for run in runs]
    assert len(own["stratum_sizes"]) < len(built_in["stratum_sizes"]) == 12
    assert own["bytes_client_up"] == built_in["bytes_client_up"]


@pytest.mark.parametrize(("loners", "warned"), [(5, 1), (4, 0)])
def test_more_than_a_quarter_of_the_clients_alone_of_their_kind_are_warned_of_once(
    loners: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve clients of three kinds, and some with three samples of a kind and seven of a further class each."""
    held = [[kind] * 10 for kind in range(3) for _ in range(4)] + [[k % 3] * 3 + [3 + k] * 7 for k in range(loners)]
    y, owner = np.concatenate(held), np.repeat(np.arange(len(held)), 10)
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    settings = {"clients.sampler.features": "label-histogram", "clients.sampler.refresh": 1, "clients.count": 3}
    with caplog.at_level(logging.WARNING, "fedmpi"):
        data = fedmpi.ClientArrays(x, y, owner, test=(x, y), classes=12)
        done = fedmpi.run("fedsso", settings | {"rounds": 2, "model.hidden": [3]}, data=data)
    assert [record["noise_clients"] for record in done.records] == [loners] * 2
    assert sum(f"{loners} of {12 + loners} clients" in text for text in caplog.messages) == warned
