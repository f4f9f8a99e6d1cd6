"""The losses of tokens, labels and numbers, and their gradients, are those of plain loops in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedmpi.tasks.losses import task_loss

SAMPLES, LENGTH, CLASSES = 6, 5, 4


def drawn(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(2).standard_normal(shape) * 2)


def token_targets() -> torch.Tensor:
    targets = torch.from_numpy(np.random.default_rng(3).integers(-1, CLASSES, (SAMPLES, LENGTH)))
    targets[0], targets[1] = -1, 2
    return targets


def by_hand_of_tokens(
    outputs: torch.Tensor, targets: torch.Tensor, smoothing: float = 0, gamma: float = 0
) -> list[float]:
    found = []
    for logits, wanted in zip(outputs.tolist(), targets.tolist(), strict=True):
        at = []
        for row, target in zip(logits, wanted, strict=True):
            if target == -1:
                continue
            norm = math.log(sum(math.exp(value) for value in row))
            surprise = norm - row[target]
            p = math.exp(-surprise)
            even = sum(norm - value for value in row) / len(row)
            at.append((1 - p) ** gamma * ((1 - smoothing) * surprise + smoothing * even))
        found.append(sum(at) / len(at) if at else 0.0)
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross-entropy", {}),
        *(("label-smoothing", {"smoothing": share}) for share in (0.0, 0.2, 1.0)),
        *(("focal", {"gamma": gamma}) for gamma in (0.0, 0.5, 1.5)),
    ],
)
def test_of_classes_and_of_tokens_the_mean_over_the_positions_that_count(name: str, options: dict[str, float]):
    outputs, targets = drawn(SAMPLES, LENGTH, CLASSES), token_targets()
    found = task_loss(name, options, "tokens").per_sample(outputs, targets)
    assert found.tolist() == pytest.approx(by_hand_of_tokens(outputs, targets, **options), abs=1e-12)
    assert found[0] == 0, "a sample of which no position counts costs nothing"
    first, classes = outputs[1:2, 0], targets[1:2, 0]
    expected = by_hand_of_tokens(first[:, None], classes[:, None], **options)
    assert task_loss(name, options).per_sample(first, classes).tolist() == pytest.approx(expected, abs=1e-12)


def test_positions_that_do_not_count_have_no_gradient():
    outputs, targets = drawn(SAMPLES, LENGTH, CLASSES).requires_grad_(), token_targets()
    (gradient,) = torch.autograd.grad(task_loss("cross-entropy", kind="tokens").mean(outputs, targets), outputs)
    assert torch.equal(gradient.abs().sum(2) > 0, targets != -1)


def test_of_labels_the_mean_of_the_binary_cross_entropies():
    outputs, targets = drawn(SAMPLES, CLASSES), (drawn(SAMPLES, CLASSES) > 0).float()
    expected = [
        sum(-math.log(1 / (1 + math.exp(-z if t else z))) for z, t in zip(row, wanted, strict=True)) / CLASSES
        for row, wanted in zip(outputs.tolist(), targets.tolist(), strict=True)
    ]
    assert task_loss("bce", kind="multilabel").per_sample(outputs, targets).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, 3), (SAMPLES, 2, 3)])
@pytest.mark.parametrize(
    ("name", "options", "of_error"),
    [
        ("mse", {}, lambda e: e * e),
        ("l1", {}, abs),
        ("huber", {"delta": 0.7}, lambda e: e * e / 2 if abs(e) <= 0.7 else 0.7 * (abs(e) - 0.35)),
    ],
)
def test_regression_losses_average_over_the_numbers_of_a_sample(shape, name, options, of_error):
    targets = torch.from_numpy(np.random.default_rng(4).standard_normal(shape))
    values = math.prod(shape[1:])
    outputs = drawn(SAMPLES, values)
    errors = (outputs - targets.reshape(SAMPLES, -1)).tolist()
    expected = [sum(of_error(e) for e in row) / values for row in errors]
    assert task_loss(name, options, "regression").per_sample(outputs, targets).tolist() == pytest.approx(expected)
