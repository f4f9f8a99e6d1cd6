"""A custom loss: task.loss = "loss:squared"."""

import torch
from torch.nn.functional import one_hot


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the Brier score of each sample."""
    right = one_hot(targets, outputs.shape[1])
    return (outputs.softmax(1) - right).square().sum(1)
