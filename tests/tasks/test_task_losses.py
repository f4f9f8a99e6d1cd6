"""The losses of each kind of task are those of their formulas in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax

from fedmpi.tasks.losses import task_loss

SAMPLES, LENGTH, CLASSES = 6, 5, 4


def drawn(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * 2)


def token_targets() -> torch.Tensor:
    targets = torch.from_numpy(np.random.default_rng(3).integers(-1, CLASSES, (SAMPLES, LENGTH)))
    targets[0], targets[1] = -1, 2
    return targets


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.2, 1.0])
def test_of_classes_and_of_tokens_the_mean_over_the_positions_that_count(smoothing: float | None):
    name, options = ("cross-entropy", {}) if smoothing is None else ("label-smoothing", {"smoothing": smoothing})
    outputs, targets, share = drawn(SAMPLES, LENGTH, CLASSES), token_targets(), smoothing or 0.0
    logs, counts = log_softmax(outputs.numpy(), 2), targets.numpy() >= 0
    own = np.take_along_axis(logs, np.maximum(targets.numpy(), 0)[:, :, None], 2)[:, :, 0]
    each = -(1 - share) * own - share * logs.mean(2)
    expected = (each * counts).sum(1) / np.maximum(counts.sum(1), 1)
    found = task_loss(name, options, "tokens").per_sample(outputs, targets)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    found = task_loss(name, options).per_sample(outputs[1], targets[1])
    np.testing.assert_allclose(found, each[1], atol=1e-12)


def test_positions_that_do_not_count_have_no_gradient():
    outputs, targets = drawn(SAMPLES, LENGTH, CLASSES).requires_grad_(), token_targets()
    (gradient,) = torch.autograd.grad(task_loss("cross-entropy", kind="tokens").mean(outputs, targets), outputs)
    assert torch.equal(gradient.abs().sum(2) > 0, targets != -1)


def test_of_labels_the_mean_of_the_binary_cross_entropies():
    outputs, targets = drawn(SAMPLES, CLASSES), (drawn(SAMPLES, CLASSES, seed=5) > 0).float()
    p = torch.sigmoid(outputs)
    expected = -torch.where(targets == 1, p, 1 - p).log().mean(1)
    torch.testing.assert_close(task_loss("bce", kind="multilabel").per_sample(outputs, targets), expected)


@pytest.mark.parametrize("shape", [(SAMPLES,), (SAMPLES, 3), (SAMPLES, 2, 3)])
def test_the_squared_error_is_averaged_over_the_numbers_of_a_sample(shape: tuple[int, ...]):
    targets = drawn(*shape, seed=4)
    outputs = drawn(SAMPLES, targets[0].numel())
    expected = ((outputs - targets.reshape(SAMPLES, -1)) ** 2).mean(1)
    torch.testing.assert_close(task_loss("mse", {}, "regression").per_sample(outputs, targets), expected)
