"""Per-sample losses of a model's outputs: built-in losses, and the loss that a run trains and evaluates with.

A loss is a function (outputs, targets) -> (b,): one value per sample, from that sample's outputs and target alone. If a
sample has many targets, its loss is the mean over those that count. Outputs and targets are (b, C) and int64 (b,) of a
classification, (b, L, C) and int64 (b, L) of tokens, (b, C) logits and floats 0 to 1 of labels, (b, …) of numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, kept_generators, refuse_result, result_tensor, takes
from fedmpi.common.errors import UserError
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component, register, resolve
from fedmpi.common.task_kinds import CLASSIFICATION, IGNORED, KINDS, TaskKind
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional

    PerSample = Callable[[Tensor, Tensor], Tensor]
else:
    torch, functional = Later("torch"), Later("torch.nn.functional")


BALANCED = "balanced"
Share = Annotated[float, Field(ge=0, le=1)]
ClassWeights = Literal["balanced"] | tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...]


@register("loss", "cross-entropy")
def cross_entropy(outputs: Tensor, targets: Tensor, *, class_weights: ClassWeights = ()) -> Tensor:
    """Return −log of the target's probability under the softmax of the outputs.

    For tokens it is the mean over the positions that count, 0 if none does.

    Parameters
    ----------
    class_weights : list of float or "balanced"
        A positive weight w_y for each class. All means are then Σ w_y ℓ / Σ w_y, in batches and in evaluations, as in
        torch. "balanced": n / (C n_y) for n_y of n training samples. Empty = equal weights.
    """
    return label_smoothing(outputs, targets, smoothing=0.0)


@register("loss", "label-smoothing")
def label_smoothing(outputs: Tensor, targets: Tensor, *, smoothing: Share = 0.1) -> Tensor:
    """Return the cross-entropy with part of the target's weight spread over all classes (Szegedy et al. 2016, §7).

    Parameters
    ----------
    smoothing : float
        Share of the weight, in [0, 1], that is spread evenly over the C classes.
    """
    each = partial(functional.cross_entropy, reduction="none", label_smoothing=smoothing)
    if targets.dim() == 1:
        return each(outputs, targets)
    flat = each(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return flat.view(targets.shape).sum(1) / (targets != IGNORED).sum(1).clamp_min(1)


@register("loss", "bce")
def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each label under the logistic function of its output, averaged over the labels."""
    wanted = targets.to(outputs.dtype)
    return functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none").mean(1)


@register("loss", "mse")
def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return (y − ŷ)², averaged over the numbers of a sample."""
    return functional.mse_loss(outputs, targets, reduction="none").reshape(len(targets), -1).mean(1)


class Loss:
    """Loss of a run: a function per sample, and its means and sums for training and evaluation."""

    def __init__(self, part: Component, options: Mapping[str, Any] | None = None, kind: TaskKind = CLASSIFICATION):
        self.part, self.kind = part, kind
        with calling(part):
            self._function: PerSample = part.make(options or {})
        self._first = copy.deepcopy(self._function) if part.foreign else self._function
        takes(part, self._function, "outputs", "targets")
        if part.foreign and isinstance(self._function, torch.nn.Module):
            trained = [name for name, one in self._function.named_parameters() if one.requires_grad]
            if trained:
                raise UserError(
                    f"task.loss = {part.name} has parameters of its own ({', '.join(trained)}), which nothing trains. "
                    "Move them into the model, or freeze them with requires_grad_(False)"
                )

    def begin(self) -> None:
        """Reset a custom loss, without the attributes left by earlier calls."""
        if self.part.foreign:
            self._function = copy.deepcopy(self._first)

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each sample's loss, (b,), in the outputs' type; outputs of a regression get the targets' shape."""
        outputs = self.kind.aligned(outputs, targets)
        if self.part.foreign:  # a custom loss may change its arguments, and the labels belong to the data
            outputs = outputs if outputs.requires_grad else outputs.clone()
            targets = targets.clone()
        with calling(self.part):
            losses = self._function(outputs, targets)
        if isinstance(losses, torch.Tensor) and not losses.dim():
            problem = 'returned a single number: return one loss for each sample, without the mean (reduction="none")'
            raise refuse_result(self.part, problem)
        losses = result_tensor(self.part, losses, outputs.shape[:1])
        return losses if losses.dtype == outputs.dtype else losses.to(outputs.dtype)

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the samples, ()."""
        return self.per_sample(outputs, targets).mean()

    def weights(self, targets: Tensor) -> Tensor:
        """Return each sample's part (b,) of the divisor of a mean, float64; its loss contains this factor."""
        return torch.ones(len(targets), dtype=torch.float64, device=targets.device)

    def total(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the sum over the samples."""
        return float(self.per_sample(outputs, targets).sum())

    def kept_generators(self) -> AbstractContextManager[None]:
        """Restore the global generators after work that calls a custom loss many times."""
        return kept_generators() if self.part.foreign else nullcontext()


class CrossEntropyLoss(Loss):
    """Cross-entropy with torch's own kernels for its mean and its sum."""

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets)

    def total(self, outputs: Tensor, targets: Tensor) -> float:
        return float(functional.cross_entropy(outputs, targets, reduction="sum"))


class WeightedCrossEntropy(CrossEntropyLoss):
    """Cross-entropy with a weight per class and torch's weighted mean, Σ w_y ℓ / Σ w_y."""

    def __init__(self, part: Component, options: Mapping[str, Any], counts: Ints):
        super().__init__(part, options)
        given, (classes, samples) = options["class_weights"], (len(counts), counts.sum())
        if given == BALANCED:
            given = np.where(counts, samples / (classes * np.maximum(counts, 1)), 1.0)
        if len(given) != classes:
            raise UserError(
                f"task.loss.class_weights has {len(given)} weights for {classes} classes. Give one per class"
            )
        self.of_classes = torch.tensor(given, dtype=torch.float64)
        self._copies: dict[Any, Tensor] = {}

    def at(self, place: Tensor) -> Tensor:
        """Return the weights (C,) in the type of a tensor and on its device."""
        key = place.dtype, place.device
        if key not in self._copies:
            self._copies[key] = self.of_classes.to(place)
        return self._copies[key]

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, self.at(outputs), reduction="none")

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, self.at(outputs))

    def total(self, outputs: Tensor, targets: Tensor) -> float:
        return float(functional.cross_entropy(outputs, targets, self.at(outputs), reduction="sum"))

    def weights(self, targets: Tensor) -> Tensor:
        return self.of_classes.to(targets.device)[targets]


CROSS_ENTROPY = CrossEntropyLoss(resolve("loss", cross_entropy))


def task_loss(
    choice: Any = "cross-entropy",
    options: Mapping[str, Any] | None = None,
    kind: str = "classification",
    class_counts: Callable[[], Ints] | None = None,
) -> Loss:
    """Return the loss of a run; `class_counts` returns the clients' training samples of each class (N, C)."""
    part = resolve("loss", choice)
    if options and class_counts is not None and options.get("class_weights"):
        return WeightedCrossEntropy(part, options, class_counts().sum(0))
    if kind == CLASSIFICATION.name and part.object is cross_entropy:
        return CrossEntropyLoss(part, options)
    return Loss(part, options, KINDS[kind])


def made_up_targets(description: DataDescription, samples: int) -> Tensor:
    """Return trial targets (samples, …) for a trial: classes 0, 1, …, C − 1, 0, …; alternating 0 and 1; numbers."""
    count = samples * math.prod(description.target_shape)
    if description.counted:
        return (torch.arange(count) % description.classes).view(samples, *description.target_shape)
    values = torch.arange(count) % 2 if description.targets == "multilabel" else torch.arange(count) % 7 - 3
    return values.float().view(samples, *description.target_shape)


LOSS_ALONE = "task.loss of a sample depends on the other samples of its batch, or is drawn"
"""Reason to train clients with such a loss sequentially."""


def couples_samples(loss: Loss, outputs: Tensor, description: DataDescription) -> bool:
    """Try a loss on some outputs: True if the loss of a sample depends on the other samples of the call, or is drawn.

    Call it in a context that restores the global generators.
    """
    if isinstance(loss, CrossEntropyLoss):
        return False
    targets = made_up_targets(description, len(outputs)).to(outputs.device)
    tried = outputs.detach().clone().requires_grad_()
    whole = loss.per_sample(tried, targets)
    depends = whole.requires_grad and torch.autograd.grad(whole.sum(), tried, allow_unused=True)[0] is not None
    if not depends:
        problem = "its values have no gradient with respect to the outputs: use torch functions, without argmax, "
        raise refuse_result(loss.part, f"{problem}.detach() or NumPy")
    with torch.no_grad():
        halves = zip(tried.chunk(2), targets.chunk(2), strict=True)
        parts = torch.cat([loss.per_sample(some, own) for some, own in halves])
    # an untrained model's outputs may be nearly equal: only rounding is tolerated
    return not torch.allclose(whole, parts, rtol=1e-5, atol=1e-6)
