"""Metrics of tokens, labels and numbers are scikit-learn's of the same predictions, however the samples are cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
    top_k_accuracy_score,
)

from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import KINDS
from fedmpi.tasks.metrics import Metric, MetricTally

TIGHT = 1e-9
SAMPLES = 203


def tallied(kind: str, names: tuple[str, ...], outputs: np.ndarray, targets: np.ndarray, rows: int = 17):
    tally = MetricTally([Metric(resolve("metric", name)) for name in names], KINDS[kind])
    for some, own in zip(torch.from_numpy(outputs).split(rows), torch.from_numpy(targets).split(rows), strict=True):
        tally.add(some, own)
    return tally.numbers()


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, 4)])
def test_of_numbers(shape: tuple[int, ...], rows: int):
    generator = np.random.default_rng(1)
    targets = generator.standard_normal(shape) * [1, 5, 0.1, 20][: math.prod(shape[1:])] + 1e5
    outputs = targets + generator.standard_normal(shape)
    found = tallied("regression", KINDS["regression"].metrics, outputs.reshape(SAMPLES, -1), targets, rows)
    assert found == pytest.approx(
        {
            "mae": mean_absolute_error(targets, outputs),
            "rmse": root_mean_squared_error(targets, outputs),
            "r2": r2_score(targets, outputs),
        },
        rel=TIGHT,
    )


@pytest.mark.parametrize("rows", [1, 17])
def test_of_labels(rows: int):
    generator = np.random.default_rng(2)
    targets = (generator.random((SAMPLES, 6)) < [0.5, 0.1, 0.02, 0.9, 0.0, 0.3]).astype(np.float32)
    outputs = np.round(targets + generator.standard_normal(targets.shape), 1) - 0.5  # with many equal scores
    outputs[:, 4] = -1.0  # never there and never said
    guessed, held = outputs > 0, targets[:, [0, 1, 2, 3, 5]]
    found = tallied("multilabel", KINDS["multilabel"].metrics, outputs, targets, rows)
    expected = {
        "accuracy": accuracy_score(targets, guessed),
        "macro_f1": f1_score(targets, guessed, average="macro", zero_division=np.nan),
        "mean_average_precision": average_precision_score(held, outputs[:, [0, 1, 2, 3, 5]], average="macro"),
    }
    assert found == pytest.approx(expected, rel=TIGHT)


def ragged(classes: int = 7) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    targets = generator.integers(-1, classes, (SAMPLES, 9))
    targets[:20] = -1
    outputs = generator.standard_normal((SAMPLES, 9, classes)) + 2 * np.eye(classes)[np.maximum(targets, 0)]
    return outputs, targets


@pytest.mark.parametrize("rows", [5, SAMPLES])
def test_of_tokens_each_position_that_counts_counts_once(rows: int):
    outputs, targets = ragged()
    names = ("accuracy", "perplexity", "macro-f1", "top-5")
    found = tallied("tokens", names, outputs, targets, rows)
    flat, wanted = outputs[targets >= 0], targets[targets >= 0]
    surprises = [
        math.log(sum(map(math.exp, row))) - row[t] for row, t in zip(flat.tolist(), wanted.tolist(), strict=True)
    ]
    expected = {
        "accuracy": accuracy_score(wanted, flat.argmax(1)),
        "perplexity": math.exp(math.fsum(surprises) / len(surprises)),
        "macro_f1": f1_score(wanted, flat.argmax(1), average="macro"),
        "top_5_accuracy": top_k_accuracy_score(wanted, flat, k=5),
    }
    assert found == pytest.approx(expected, rel=TIGHT)


def test_where_no_position_counts_nothing_is_reported():
    outputs, targets = ragged()
    names = ("accuracy", "perplexity", "macro-f1", "top-5", "calibration-error")
    found = tallied("tokens", names, outputs[:20], targets[:20])
    assert all(math.isnan(value) for value in found.values()) and len(found) == len(names)
