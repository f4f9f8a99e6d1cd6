"""Measures of heterogeneity against hand-made cases, and the table and the figure of a data set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedmpi import UserError
from fedmpi.common.fairness import gini
from fedmpi.data.opening import open_store
from fedmpi.data.statistics import kl_divergence, label_distances
from fedmpi.describe.data import label_measures, plot_store, show_store
from tests.data.conftest import written


def test_gini_of_equal_sizes_is_zero_and_of_one_owner_nearly_one() -> None:
    assert gini(np.full(10, 7)) == pytest.approx(0.0)
    assert gini(np.zeros(4, np.int64)) == gini(np.zeros(0, np.int64)) == 0.0
    assert gini(np.array([0] * 99 + [5])) == pytest.approx(0.99)
    assert gini(np.array([1, 3])) == pytest.approx(0.25)  # mean absolute difference 1, mean 2: 1 / (2 * 2)


def test_divergences_match_their_definition() -> None:
    counts = np.array([[4, 0, 0], [1, 1, 2], [3, 3, 3]], np.uint8)
    reference = np.array([0.5, 0.3, 0.2])
    p = counts / counts.sum(axis=1, keepdims=True)
    expected = [sum(a * np.log(a / b) for a, b in zip(row, reference, strict=True) if a) for row in p]
    np.testing.assert_allclose(kl_divergence(counts, reference), expected)
    np.testing.assert_allclose(label_distances(counts, reference), np.abs(p - reference).sum(axis=1))


def test_one_class_a_client_is_log_classes_from_uniform() -> None:
    counts = np.eye(4, dtype=np.int64) * 5
    found = label_measures(lambda: [counts[:1], counts[1:]])
    assert found["kl_to_uniform"] == pytest.approx(np.log(4)) == found["kl_to_pooled"]
    assert found["distance"] == pytest.approx(1.5) and found["classes"].tolist() == [1] * 4
    assert found["totals"].tolist() == [5] * 4


def test_an_inspection_reports_sizes_and_draws_a_figure(tmp_path: Path) -> None:
    store = open_store(written([3, 1, 7, 4, 5], tmp_path / "shards"), verify=True)
    console = Console(record=True, width=200, file=(tmp_path / "out").open("w"))
    show_store(store, console, verified=True)
    text = console.export_text()
    assert "5 in 2 shards" in text and "max 7" in text and "checksums agree" in text
    plot_store(store, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"\.png"):
        plot_store(store, tmp_path / "picture.nonsense")


def test_clients_without_samples_count_in_no_mean() -> None:
    counts = np.array([[5, 0], [0, 0], [1, 1]])
    found = label_measures(lambda: [counts])
    assert found["classes"].tolist() == [1, 2] and found["kl_to_uniform"] == pytest.approx([np.log(2), 0])
