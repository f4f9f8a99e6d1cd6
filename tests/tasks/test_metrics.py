"""Evaluation agrees with scikit-learn's metrics, and takes custom metrics."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, recall_score, top_k_accuracy_score
from torch import nn

import fedmpi
from fedmpi import ComponentFailure
from fedmpi.common.registry import resolve
from fedmpi.tasks import metrics
from fedmpi.tasks.evaluation import BUILT_IN, evaluate, evaluation_passes
from fedmpi.tasks.metrics import Metric, MetricTally
from tests.tasks import own_metrics


@pytest.mark.parametrize(("most", "batch_size"), [(4096, 7), (4, 64), (4096, 1000)])
def test_evaluation_does_not_depend_on_the_batch_size(batch_size: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """With fewer classes than a confusion matrix may have, or more."""
    monkeypatch.setattr(metrics, "MOST_CONFUSED", most)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 6, generator=generator)
    y = torch.randint(0, 5, (300,), generator=generator)
    module = nn.Linear(6, 5)
    nn.init.normal_(module.weight, generator=generator)
    found = evaluate(module, x, y, batch_size)
    logits = module(x).detach()
    probabilities = torch.softmax(logits.double(), 1).numpy()
    assert found.loss == pytest.approx(log_loss(y.numpy(), probabilities, labels=range(5)), rel=1e-5)
    assert found.numbers["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert found.numbers["macro_f1"] == pytest.approx(f1_score(y.numpy(), logits.argmax(1).numpy(), average="macro"))


def of(name: str, **options: object) -> Metric:
    return Metric(resolve("metric", name if "-" in name else f"tests.tasks.own_metrics:{name}"), options)


def guesses() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(211, 7, generator=generator), torch.randint(0, 7, (211,), generator=generator)


def found(metric: Metric, *batches: int) -> dict[str, float]:
    """Return the value of a metric over batches of these sizes."""
    outputs, targets = guesses()
    tally = MetricTally([metric])
    for x, y in zip(outputs.split(batches or len(outputs)), targets.split(batches or len(outputs)), strict=True):
        tally.add(x, y)
    return tally.numbers()


@pytest.mark.parametrize("k", [1, 3, 20])
def test_top_k_is_scikit_learns(k: int):
    outputs, targets = guesses()
    expected = top_k_accuracy_score(targets, outputs.numpy(), k=k, labels=range(7)) if k < 7 else 1.0
    assert found(of("top-k", k=k), 100, 100, 11) == {f"top_{k}_accuracy": pytest.approx(expected)}


@pytest.mark.parametrize("bins", [1, 4])
def test_calibration_error_is_the_sum_over_bins_of_the_gap(bins: int):
    outputs, targets = guesses()
    p = torch.softmax(outputs.double(), 1)
    gaps = 0.0
    for b in range(bins):
        inside = [i for i in range(211) if b / bins < float(p[i].max()) <= (b + 1) / bins]
        gaps += abs(sum(float(p[i].max()) for i in inside) - sum(int(p[i].argmax() == targets[i]) for i in inside))
    assert found(of("calibration-error", bins=bins), 3, 200, 8) == {"calibration_error": pytest.approx(gaps / 211)}


def test_the_sums_of_a_custom_metric_become_means_and_a_class_makes_numbers_of_arrays():
    outputs, targets = guesses()
    p = outputs.double().softmax(1).numpy()
    mean = -(p * np.log(p)).sum() / np.log(3) / 211
    for batches in ((), (100, 111), (1, 10, 200)):
        assert found(of("entropy", base=3.0), *batches) == {"entropy": pytest.approx(mean), "one": 1.0}
    recalls = recall_score(targets, outputs.argmax(1), average=None)
    assert found(of("Recall", of=2), 50, 161) == {
        "least_recall": pytest.approx(recalls.min()),
        "recall_of_2": pytest.approx(recalls[2]),
    }


def test_a_custom_metric_sees_copies():
    module = nn.Linear(3, 2)
    x, y = torch.eye(4)[:, :3], torch.tensor([0, 1, 1, 0])
    plain = evaluate(module, x, y, 2)
    both = evaluate(module, x, y, 2, metrics=[of("wrecking"), *BUILT_IN])
    assert y.tolist() == [0, 1, 1, 0]
    assert {**plain.numbers, "noise": pytest.approx(2 / 4)} == both.numbers and plain.loss == both.loss


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("failing", r"own_metrics.py:\d+\) failed: ZeroDivisionError"),
        ("a_number", "returned a float: return a dictionary"),
        ("an_array", "returned 'x' as an array.*write a class"),
        ("Changing", r"returned \['x2'\] after \['x1'\]"),
        ("BadResult", "its result is .*'large'"),
    ],
)
def test_a_metric_that_goes_wrong_is_named(name: str, words: str):
    with pytest.raises(ComponentFailure, match=f"metric tests.tasks.own_metrics:{name} .*{words}"):
        found(of(name), 200, 11)


def test_what_a_run_records_by_every_metric():
    settings = {"rounds": 2, "model.hidden": [6], "evaluation.every": 1, "local.engine": "sequential"}
    settings |= {"task.loss": "focal", "task.loss.gamma": 1.0}
    plain = fedmpi.run("fedavg", settings, data="digits")
    chosen = [
        "tests.tasks.own_metrics:entropy",
        "accuracy",
        {"name": "top-k", "k": 2},
        {"name": own_metrics.Recall, "of": 4},
    ]
    more = fedmpi.run("fedavg", {**settings, "task.metrics": chosen}, data="digits")
    own = {f"test_{name}" for name in ("entropy", "one", "top_2_accuracy", "least_recall", "recall_of_4")}
    for one, other in zip(plain.records, more.records, strict=True):
        assert {key for key in other if key.startswith("test_")} - one.keys() == own
        assert other["test_accuracy"] == one["test_accuracy"] and other["train_loss"] == one["train_loss"]
        assert other["test_accuracy"] <= other["test_top_2_accuracy"] and other["test_one"] == 1


def test_a_single_last_sample_joins_the_pass_before():
    passes = {samples: [(p.start, p.stop) for p in evaluation_passes(samples, 10)] for samples in (20, 21, 1)}
    assert passes == {20: [(0, 10), (10, 20)], 21: [(0, 10), (10, 21)], 1: [(0, 1)]}
