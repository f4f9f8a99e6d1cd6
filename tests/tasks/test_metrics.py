"""Evaluation agrees with scikit-learn's metrics."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss
from torch import nn

from fedmpi.tasks.metrics import evaluate, macro_f1


def some_predictions(classes: int, samples: int = 500) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    truth = generator.integers(0, classes, samples)
    guess = np.where(generator.random(samples) < 0.6, truth, generator.integers(0, classes, samples))
    return truth, guess


@pytest.mark.parametrize("classes", [2, 5, 47])
def test_macro_f1_is_the_mean_of_the_classes_f1(classes: int):
    truth, guess = some_predictions(classes)
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (truth, guess), 1)
    assert macro_f1(confusion) == pytest.approx(f1_score(truth, guess, average="macro"))


def test_classes_that_never_occur_do_not_count():
    truth, guess = some_predictions(4)
    confusion = np.zeros((10, 10), np.int64)
    np.add.at(confusion, (truth, guess), 1)
    assert macro_f1(confusion) == pytest.approx(f1_score(truth, guess, average="macro"))


@pytest.mark.parametrize("batch_size", [7, 64, 1000])
def test_evaluation_does_not_depend_on_the_batch_size(batch_size: int):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 6, generator=generator)
    y = torch.randint(0, 5, (300,), generator=generator)
    module = nn.Linear(6, 5)
    nn.init.normal_(module.weight, generator=generator)
    found = evaluate(module, x, y, 5, batch_size)
    logits = module(x).detach()
    probabilities = torch.softmax(logits.double(), 1).numpy()
    assert found.loss == pytest.approx(log_loss(y.numpy(), probabilities, labels=range(5)), rel=1e-5)
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert found.macro_f1 == pytest.approx(f1_score(y.numpy(), logits.argmax(1).numpy(), average="macro"))


def test_evaluation_leaves_the_mode_of_the_module_alone():
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    evaluate(module, torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), 2, 4)
    assert module.training


def test_a_class_that_is_predicted_but_never_true_counts_as_zero():
    confusion = np.array([[3, 0, 1], [0, 4, 0], [0, 0, 0]])
    expected = f1_score([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 2, 1, 1, 1, 1], average="macro")
    assert macro_f1(confusion) == pytest.approx(expected) == pytest.approx((6 / 7 + 1 + 0) / 3)


def test_a_class_that_is_never_right_counts_as_zero():
    confusion = np.array([[3, 1, 0], [2, 0, 0], [0, 0, 4]])
    assert macro_f1(confusion) == pytest.approx((6 / 9 + 0 + 1) / 3)
