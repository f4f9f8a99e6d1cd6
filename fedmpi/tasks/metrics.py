"""Metrics of a model's outputs, batch by batch: built-in ones, and those that a run evaluates with.

A metric is a function (outputs, targets) -> dict of sums over the given samples, which add up over batches. The record
contains the sums divided by the number of samples, unless a class has a method `result`.

Metrics of labels and of numbers are defined as in scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import isclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.imports import Later
from fedmpi.common.registry import Component, register
from fedmpi.common.task_kinds import CLASSIFICATION, TaskKind

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional

    Sums = dict[str, Tensor]
else:
    torch, functional = Later("torch"), Later("torch.nn.functional")

MOST_CONFUSED = 4096
"""Largest number of classes for a confusion matrix."""


@register("metric", "accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Measure the share of samples (or token positions) with the correct class, or with all labels correct.

    A label is set if its output is above 0, or its target above 1/2.
    """
    if targets.dim() == 2:
        return {"accuracy": ((outputs > 0) == (targets > 0.5)).all(1).sum()}
    return {"accuracy": (outputs.argmax(1) == targets).sum()}


@register("metric", "macro-f1")
class MacroF1:
    """Unweighted mean over the classes, or labels, of F1 = 2 TP / (2 TP + FP + FN)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return three counts of each class or label, and the confusion matrix (C, C) of classes that are not too many:
        rows are true classes, columns predicted ones."""
        if targets.dim() == 2:
            guessed, there = outputs > 0, targets > 0.5
            return {"right": (guessed & there).sum(0), "guessed": guessed.sum(0), "there": there.sum(0)}
        classes, guess = outputs.shape[1], outputs.argmax(1)
        if classes <= MOST_CONFUSED:
            pairs = torch.bincount(targets * classes + guess, minlength=classes**2).view(classes, classes)
            return {"confusion": pairs, "right": pairs.diagonal(), "guessed": pairs.sum(0), "there": pairs.sum(1)}
        drawn = {"right": targets[guess == targets], "guessed": guess, "there": targets}
        return {name: torch.bincount(each, minlength=classes) for name, each in drawn.items()}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Return the mean of the classes' F1, of those that occur; NaN if none does."""
        right, involved = sums["right"].astype(np.float64), sums["guessed"] + sums["there"]
        present = involved > 0
        return {"macro_f1": float(np.mean(2 * right[present] / involved[present])) if present.any() else math.nan}


@register("metric", "top-k")
def top_k(outputs: Tensor, targets: Tensor, *, k: Annotated[int, Field(ge=1)] = 5) -> dict[str, Any]:
    """Measure the share of samples whose class is among the k largest outputs.

    Parameters
    ----------
    k : int
        Number of outputs; 1 is accuracy.
    """
    largest = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
    return {f"top_{k}_accuracy": (largest == targets[:, None]).any(1).sum()}


@register("metric", "perplexity")
class Perplexity:
    """exp of the mean over all samples (for tokens: all positions) of −log of the target's probability."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return Σ −log p of the targets."""
        return {"surprise": functional.cross_entropy(outputs, targets, reduction="none").double().sum()}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Return exp(Σ −log p / samples), infinite if it exceeds the range of floats, NaN if no position counts."""
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(sums["surprise"] / samples)) if samples else math.nan}


@register("metric", "mean-average-precision")
class MeanAveragePrecision:
    """Unweighted mean over the labels of the area under precision and recall, Σ (R_i − R_{i−1}) P_i.

    It is not a function of sums: the outputs of all samples are kept until the end, 16 C bytes per sample.
    """

    gathers = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the outputs and whether the labels are set, (b, C), to be gathered."""
        return {"outputs": outputs, "there": targets > 0.5}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Return the mean over the labels that some sample has; 0 if none has any."""
        from sklearn.metrics import average_precision_score  # slow to import

        outputs, there = np.asarray(sums["outputs"]), np.asarray(sums["there"], bool)
        held = np.flatnonzero(there.any(axis=0))
        if not len(held) or np.isnan(outputs).any():
            return {"mean_average_precision": math.nan if len(held) else 0.0}
        return {"mean_average_precision": float(average_precision_score(there[:, held], outputs[:, held]))}


@register("metric", "mae")
def mean_absolute_error(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Measure the mean of |y − ŷ|; with several numbers per sample, the mean over them."""
    return {"mae": (outputs.double() - targets.double()).abs().mean(1).sum()}


@register("metric", "rmse")
class RootMeanSquaredError:
    """Root of the mean of (y − ŷ)²; with several numbers per sample, the mean of their roots."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return Σ (y − ŷ)² of each number, (D,)."""
        return {"squares": (outputs.double() - targets.double()).square().sum(0)}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Return the mean over the numbers."""
        return {"rmse": float(np.mean(np.sqrt(sums["squares"] / samples)))}


@register("metric", "r2")
class Determination:
    """R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)²; with several numbers per sample, the mean over them.

    A number that is equal in all samples has R² = 1 if it is always predicted exactly, else 0; NaN if an output is NaN.
    Σ y² − n ȳ² would lose the variance of numbers far from 0, so all numbers are kept until the end, 16 D bytes per
    sample.
    """

    gathers = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the outputs and the targets, (b, D), to be gathered."""
        return {"outputs": outputs.double(), "targets": targets.double()}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Return the mean over the numbers."""
        from sklearn.metrics import r2_score  # slow to import

        if not np.isfinite(sums["outputs"]).all():
            return {"r2": math.nan}
        return {"r2": float(r2_score(sums["targets"], sums["outputs"]))}


class Metric:
    """Metric of a run: its sums over batches, and the recorded numbers."""

    def __init__(self, part: Component, options: Mapping[str, Any] | None = None):
        self.part = part
        with calling(part):
            made = part.make(options or {})
            bound = isinstance(part.object, partial) and isclass(part.object.func)  # a class with its options
            self._metric: Callable[[Tensor, Tensor], Mapping[str, Any]] = made() if bound else made
        self.gathers: bool = not part.foreign and getattr(self._metric, "gathers", False)

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        """Return the sums over a batch by name, on the CPU: integers as int64, other numbers as float64."""
        if self.part.foreign:  # a custom metric may change its arguments
            outputs, targets = outputs.clone(), targets.clone()
        with calling(self.part):  # also of values that are no numbers
            found = self._metric(outputs, targets)
            if not isinstance(found, Mapping) or not found:
                problem = (
                    f'returned a {type(found).__name__}: return a dictionary of sums over samples, {{"name": sum}}'
                )
                raise refuse_result(self.part, problem)
            sums = {str(name): torch.as_tensor(value).detach() for name, value in found.items()}
        types = {True: torch.float64, False: torch.int64}
        return {name: value.to("cpu", types[value.is_floating_point()]) for name, value in sums.items()}

    def numbers(self, sums: Sums, samples: int) -> dict[str, float]:
        """Return the recorded numbers from the sums over all samples; NaN without samples."""
        own = getattr(getattr(self._metric, "func", self._metric), "result", None)
        if own is None:
            if arrays := [name for name, value in sums.items() if value.dim()]:
                problem = f"returned {arrays[0]!r} as an array: return single numbers, or write a class with "
                raise refuse_result(self.part, problem + "result(sums, samples), which makes numbers of arrays")
            return {name: float(value.item() / samples) if samples else math.nan for name, value in sums.items()}
        given = {name: value.numpy() if value.dim() else value.item() for name, value in sums.items()}
        with calling(self.part):  # also of a result that is no dictionary of numbers
            return {str(name): float(value) for name, value in own(given, samples).items()}


class MetricTally:
    """Sums of some metrics over batches; the values of each batch for metrics that gather them."""

    def __init__(self, metrics: Iterable[Metric], kind: TaskKind = CLASSIFICATION):
        self._parts: list[tuple[Metric, list[Sums]]] = [(metric, []) for metric in metrics]
        self.kind = kind
        self.samples = self.judged = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch."""
        judged = self.kind.judged(outputs, targets)
        for metric, parts in self._parts:
            found = metric.sums(*((outputs, targets) if metric.part.foreign else judged))
            if metric.gathers or not parts:
                parts.append(found)
                continue
            with calling(metric.part):  # sums of other names or shapes
                parts[0] = {name: value + found[name] for name, value in parts[0].items()}
        self.samples += len(targets)
        self.judged += len(judged[1])

    def sums(self, metric: str) -> Sums:
        """Return the sums of a built-in metric so far; {} if it is not among the metrics."""
        return next((_joined(parts) for one, parts in self._parts if one.part.name == metric), {})

    def numbers(self) -> dict[str, float]:
        """Return the recorded numbers, by name."""
        found: dict[str, float] = {}
        for metric, parts in self._parts:
            own = metric.numbers(_joined(parts), self.samples if metric.part.foreign else self.judged)
            if twice := sorted((found.keys() | {"loss"}) & own.keys()):
                raise refuse_result(metric.part, f"gives {twice[0]!r}, which is measured already. Give it another name")
            found |= own
        return found


def _joined(parts: list[Sums]) -> Sums:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
