"""Metrics are scikit-learn's of the same predictions, however the samples are cut, and custom ones are taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import nn

import fedmpi
from fedmpi import ComponentFailure
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import KINDS
from fedmpi.tasks import metrics
from fedmpi.tasks.evaluation import BUILT_IN, evaluate, evaluation_passes
from fedmpi.tasks.metrics import Metric, MetricTally
from tests.tasks import own_metrics

SAMPLES, CLASSES = 203, 7
GENERATOR = np.random.default_rng(1)
OUTPUTS, TARGETS = GENERATOR.standard_normal((SAMPLES, CLASSES)), GENERATOR.integers(0, CLASSES, SAMPLES)
OWN = "tests.tasks.own_metrics:"


def tallied(metrics: list[Metric], kind: str, outputs: np.ndarray, targets: np.ndarray, rows: int) -> dict[str, float]:
    tally = MetricTally(metrics, KINDS[kind])
    for some, own in zip(torch.from_numpy(outputs).split(rows), torch.from_numpy(targets).split(rows), strict=True):
        tally.add(some, own)
    return tally.numbers()


def of_kind(kind: str, outputs: np.ndarray, targets: np.ndarray, rows: int) -> dict[str, float]:
    """Values of all metrics of a kind."""
    names = (*KINDS[kind].metrics, *KINDS[kind].further)
    return tallied([Metric(resolve("metric", name)) for name in names], kind, outputs, targets, rows)


def of_classes(outputs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    p, every = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True), range(CLASSES)
    return {
        "accuracy": reference.accuracy_score(targets, outputs.argmax(1)),
        "macro_f1": reference.f1_score(targets, outputs.argmax(1), average="macro"),
        "perplexity": math.exp(reference.log_loss(targets, p, labels=every)),
        "top_5_accuracy": reference.top_k_accuracy_score(targets, outputs, k=5, labels=every),
    }


@pytest.mark.parametrize("most", [4096, 4])
@pytest.mark.parametrize("rows", [1, 17, 1000])
def test_of_classes_and_of_the_tokens_that_count(rows: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """With fewer classes than a confusion matrix may have, or more."""
    monkeypatch.setattr(metrics, "MOST_CONFUSED", most)
    assert of_kind("classification", OUTPUTS, TARGETS, rows) == pytest.approx(of_classes(OUTPUTS, TARGETS), rel=1e-9)
    targets = GENERATOR.integers(-1, CLASSES, (SAMPLES, 9))
    targets[:20] = -1
    outputs = GENERATOR.standard_normal((SAMPLES, 9, CLASSES)) + 2 * np.eye(CLASSES)[np.maximum(targets, 0)]
    expected = of_classes(outputs[targets >= 0], targets[targets >= 0])
    assert of_kind("tokens", outputs, targets, rows) == pytest.approx(expected, rel=1e-9)
    nothing = of_kind("tokens", outputs[:20], targets[:20], rows)
    assert nothing.keys() == expected.keys() and all(map(math.isnan, nothing.values()))


@pytest.mark.parametrize("rows", [1, 17])
def test_of_labels(rows: int):
    generator = np.random.default_rng(2)
    targets = (generator.random((SAMPLES, 6)) < [0.5, 0.1, 0.02, 0.9, 0.0, 0.3]).astype(np.float32)
    outputs = np.round(targets + generator.standard_normal(targets.shape), 1) - 0.5  # with many equal scores
    outputs[:, 4] = -1.0  # never there and never said
    guessed, held = outputs > 0, [0, 1, 2, 3, 5]
    expected = {
        "accuracy": reference.accuracy_score(targets, guessed),
        "macro_f1": reference.f1_score(targets, guessed, average="macro", zero_division=np.nan),
        "mean_average_precision": reference.average_precision_score(targets[:, held], outputs[:, held]),
    }
    assert of_kind("multilabel", outputs, targets, rows) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, 4)])
def test_of_numbers(shape: tuple[int, ...], rows: int):
    generator = np.random.default_rng(1)
    targets = generator.standard_normal(shape) * [1, 5, 0.1, 20][: math.prod(shape[1:])] + 1e5
    outputs = targets + generator.standard_normal(shape)
    expected = {
        "mae": reference.mean_absolute_error(targets, outputs),
        "rmse": reference.root_mean_squared_error(targets, outputs),
        "r2": reference.r2_score(targets, outputs),
    }
    found = of_kind("regression", outputs.reshape(SAMPLES, -1), targets, rows)
    assert found == pytest.approx(expected, rel=1e-9)


def of(name: str, *batches: int, **options: object) -> dict[str, float]:
    """Return the values of a metric over batches of this many samples."""
    metric = Metric(resolve("metric", name if "-" in name else OWN + name), options)
    return tallied([metric], "classification", OUTPUTS, TARGETS, *(batches or (SAMPLES,)))


@pytest.mark.parametrize("k", [1, 3, 20])
def test_top_k_is_scikit_learns(k: int):
    score = reference.top_k_accuracy_score(TARGETS, OUTPUTS, k=k, labels=range(CLASSES)) if k < CLASSES else 1.0
    assert of("top-k", 100, k=k) == {f"top_{k}_accuracy": pytest.approx(score)}


def test_the_sums_of_a_custom_metric_become_means_and_a_class_makes_numbers_of_arrays():
    p = np.exp(OUTPUTS) / np.exp(OUTPUTS).sum(1, keepdims=True)
    mean = -(p * np.log(p)).sum() / np.log(3) / SAMPLES
    recalls = reference.recall_score(TARGETS, OUTPUTS.argmax(1), average=None)
    for rows in (SAMPLES, 100, 1):
        assert of("entropy", rows, base=3.0) == {"entropy": pytest.approx(mean), "one": 1.0}
        least, second = pytest.approx(recalls.min()), pytest.approx(recalls[2])
        assert of("Recall", rows, of=2) == {"least_recall": least, "recall_of_2": second}


def test_a_custom_metric_sees_copies():
    module = nn.Linear(3, 2)
    x, y = torch.eye(4)[:, :3], torch.tensor([0, 1, 1, 0])
    plain = evaluate(module, x, y, 2)
    both = evaluate(module, x, y, 2, metrics=[Metric(resolve("metric", own_metrics.wrecking)), *BUILT_IN])
    assert y.tolist() == [0, 1, 1, 0]
    assert {**plain.numbers, "noise": pytest.approx(2 / 4)} == both.numbers and plain.loss == both.loss


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("failing", r"own_metrics.py:\d+\) failed: ZeroDivisionError"),
        ("a_number", "returned a float"),
        ("an_array", "returned 'x' as an array"),
        ("Changing", "KeyError: 'x1'"),
        ("BadResult", "ValueError: .*'large'"),
    ],
)
def test_a_metric_that_goes_wrong_is_named(name: str, words: str):
    with pytest.raises(ComponentFailure, match=f"metric {OWN}{name} .*{words}"):
        of(name, 150)


def test_what_a_run_records_by_every_metric():
    settings = {"rounds": 2, "model.hidden": [6], "evaluation.every": 1, "local.engine": "sequential"}
    settings |= {"task.loss": "label-smoothing", "task.loss.smoothing": 0.2}
    plain = fedmpi.run("fedavg", settings, data="digits")
    chosen = [f"{OWN}entropy", "accuracy", {"name": "top-k", "k": 2}, {"name": own_metrics.Recall, "of": 4}]
    more = fedmpi.run("fedavg", {**settings, "task.metrics": chosen}, data="digits")
    own = {f"test_{name}" for name in ("entropy", "one", "top_2_accuracy", "least_recall", "recall_of_4")}
    for one, other in zip(plain.records, more.records, strict=True):
        assert {key for key in other if key.startswith("test_")} - one.keys() == own
        assert other["test_accuracy"] == one["test_accuracy"] and other["train_loss"] == one["train_loss"]
        assert other["test_accuracy"] <= other["test_top_2_accuracy"] and other["test_one"] == 1


def test_a_single_last_sample_joins_the_pass_before():
    passes = {samples: [(p.start, p.stop) for p in evaluation_passes(samples, 10)] for samples in (20, 21, 1)}
    assert passes == {20: [(0, 10), (10, 20)], 21: [(0, 10), (10, 21)], 1: [(0, 1)]}
