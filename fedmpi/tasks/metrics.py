"""Evaluation of the global model on the test or the validation part: loss, accuracy, macro-F1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.tasks.losses import CROSS_ENTROPY, Loss


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, share of right answers and unweighted mean of the classes' F1 on some samples."""

    loss: float
    accuracy: float
    macro_f1: float

    def facts(self, part: str) -> dict[str, float]:
        """What a record says of them: "test_loss", "val_accuracy", ..."""
        return {f"{part}_{name}": value for name, value in vars(self).items()}


def evaluate(
    module: nn.Module, x: Tensor, y: Tensor, classes: int, batch_size: int, loss: Loss = CROSS_ENTROPY
) -> Evaluation:
    """Evaluate a module in evaluation mode.

    Parameters
    ----------
    module : nn.Module
        Returns logits (b, C).
    x, y : Tensor
        Features (n, …) and labels (n,), on the module's device.
    classes : int
        C.
    batch_size : int
        Samples evaluated at once.
    loss : Loss
        Cross-entropy by default.
    """
    was_training = module.training
    module.eval()
    total, confusion = 0.0, torch.zeros(classes * classes, dtype=torch.int64)
    with torch.inference_mode():
        for start in range(0, len(y), batch_size):
            labels = y[start : start + batch_size]
            logits = module(x[start : start + batch_size])
            total += loss.total(logits, labels)
            pairs = labels * classes + logits.argmax(1)
            confusion += torch.bincount(pairs, minlength=classes * classes).cpu()
    module.train(was_training)
    counts = confusion.view(classes, classes).numpy()
    return Evaluation(total / len(y), float(np.trace(counts) / len(y)), macro_f1(counts))


def macro_f1(confusion: np.ndarray) -> float:
    """Unweighted mean over the classes of F1 = 2 TP / (2 TP + FP + FN).

    Parameters
    ----------
    confusion : int (C, C)
        Rows are true classes, columns predicted ones. Classes that occur in neither are left out.
    """
    true_positive = np.diag(confusion).astype(np.float64)
    involved = confusion.sum(0) + confusion.sum(1)
    present = involved > 0
    return float(np.mean(2 * true_positive[present] / involved[present])) if present.any() else 0.0
