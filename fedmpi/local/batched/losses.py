"""Batched losses on the outputs (k, b, …) of the last layer, flattened per row: hand-written cross-entropy, any other
through autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.base import Place
from fedmpi.tasks.losses import CrossEntropyLoss, Loss


def stacked_loss(
    loss: Loss, place: Place, outputs: Tensor, description: DataDescription
) -> CrossEntropy | PerSampleLoss:
    """Return the batched form of a loss on the outputs (k, b, C) of such samples."""
    if isinstance(loss, CrossEntropyLoss):
        return CrossEntropy(place, outputs)
    return PerSampleLoss(place, outputs, loss, description)


class CrossEntropy:
    """Softmax cross-entropy of the logits (k, b, C), and its gradient."""

    def __init__(self, place: Place, logits: Tensor):
        clients, rows = place.clients, place.rows
        self.logits = logits
        self.labels = place.take("labels", clients, rows, dtype=torch.int64)
        self._labels = self.labels.unsqueeze(2)
        self._log = place.take("log", *logits.shape)
        self._picked = place.take("picked", clients, rows, 1)
        self._minus_one = torch.full((1, 1, 1), -1.0, dtype=logits.dtype, device=logits.device)
        self._minus_one = self._minus_one.expand(clients, rows, 1)

    def gradient(self, weights: Tensor | float, counted: Tensor | None, sums: Tensor) -> Tensor:
        """Return ∂/∂logits of Σ weights · loss; add the samples' losses to `sums` (k, b, 1).

        `weights` (k, b, 1) are 1 / samples of the client's batch and 0 for padding, `counted` (k, b, 1) is 1 for a
        sample and 0 for padding; None = all are samples.
        """
        torch.log_softmax(self.logits, 2, out=self._log)
        torch.gather(self._log, 2, self._labels, out=self._picked)
        if counted is None:
            sums.sub_(self._picked)
        else:
            sums.addcmul_(self._picked, counted, value=-1)
        gradient = torch.exp(self._log, out=self._log).scatter_add_(2, self._labels, self._minus_one)
        return gradient.mul_(weights)


class PerSampleLoss:
    """Any loss per sample, computed on the clients' flattened samples without the padding."""

    def __init__(self, place: Place, outputs: Tensor, loss: Loss, description: DataDescription):
        self.loss, self.outputs = loss, outputs
        self._shape = description.output_shape
        numbers = torch.int64 if description.counted else torch.float32
        self.labels = place.take("labels", place.clients, place.rows, *description.target_shape, dtype=numbers)

    def gradient(self, weights: Tensor | float, counted: Tensor | None, sums: Tensor) -> Tensor:
        """Return the gradient; see `CrossEntropy.gradient`."""
        outputs, labels = self.outputs.view(-1, *self._shape), self.labels.flatten(0, 1)
        if counted is None:
            losses, gradient = self._of(
                outputs, labels, torch.full(labels.shape[:1], float(weights), dtype=outputs.dtype)
            )
            sums.view(-1).add_(losses)
            return gradient.view(self.outputs.shape)
        rows = counted.reshape(-1).nonzero().squeeze(1)
        assert isinstance(weights, Tensor)
        losses, gradient = self._of(outputs[rows], labels[rows], weights.reshape(-1)[rows])
        sums.view(-1).index_add_(0, rows, losses)
        return torch.zeros_like(outputs).index_copy_(0, rows, gradient).view(self.outputs.shape)

    def _of(self, outputs: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses (r,) and the gradient (r, C) of Σ weights · loss, in its own memory."""
        with torch.enable_grad():
            tried = outputs.detach().requires_grad_()
            losses = self.loss.per_sample(tried, labels)
            (gradient,) = torch.autograd.grad(losses, tried, weights.to(losses.device))
        return losses.detach(), gradient.contiguous()
