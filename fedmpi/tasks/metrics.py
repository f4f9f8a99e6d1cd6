"""How right a model's outputs are, batch by batch: built-in metrics, and those that a run evaluates with.

A metric is a function (outputs, targets) -> dict of sums over the samples given, which add up over batches. Recorded
are the sums divided by the number of samples; a class says otherwise in its method `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.common.calling import calling, is_complex, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.later import Later
from fedmpi.common.registry import Part, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Sums = dict[str, Tensor]
else:
    torch = Later("torch")

ALWAYS = ("accuracy", "macro-f1")
"""What a classification is evaluated by whatever else is chosen."""


@register("metric", "accuracy")
def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    """Share of samples whose largest output is that of their class.

    Parameters
    ----------
    outputs : Tensor (b, C)
    targets : int64 Tensor (b,)
    """
    return {"accuracy": (outputs.argmax(1) == targets).sum()}


@register("metric", "macro-f1")
class MacroF1:
    """Unweighted mean over the classes of F1 = 2 TP / (2 TP + FP + FN)."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """The confusion matrix (C, C): rows are true classes, columns predicted ones."""
        classes = outputs.shape[1]
        pairs = targets * classes + outputs.argmax(1)
        return {"confusion": torch.bincount(pairs, minlength=classes**2).view(classes, classes)}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """The mean of the classes' F1."""
        return {"macro_f1": macro_f1(sums["confusion"])}


@register("metric", "top-k")
def top_k(outputs: Tensor, targets: Tensor, *, k: int = 5) -> dict[str, Any]:
    """Share of samples whose class is among those of the k largest outputs.

    Parameters
    ----------
    outputs : Tensor (b, C)
    targets : int64 Tensor (b,)
    k : int
        1 is accuracy.
    """
    if k < 1:
        raise UserError(f"task.k = {k}: at least the one largest output is looked at")
    largest = outputs.topk(min(k, outputs.shape[1]), dim=1).indices
    return {f"top_{k}_accuracy": (largest == targets[:, None]).any(1).sum()}


@register("metric", "calibration-error")
class CalibrationError:
    """How far the largest probability is from the share of right answers (ECE, Guo et al. 2017, Eq 3).

    Parameters
    ----------
    bins : int
        Equal parts of [0, 1] in which the two are compared.
    """

    def __init__(self, *, bins: int = 15):
        if bins < 1:
            raise UserError(f"task.bins = {bins}: the probabilities fall into at least one bin")
        self.bins = bins

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Per bin (bins,): the sum of probabilities, and the number of right answers."""
        probability, guess = outputs.double().softmax(1).max(1)
        place = (probability * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        empty = torch.zeros(self.bins, dtype=torch.float64, device=outputs.device)
        right = (guess == targets).double()
        return {"probability": empty.index_add(0, place, probability), "right": empty.index_add(0, place, right)}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """Σ over the bins of |right − probability| / n."""
        return {"calibration_error": float(np.abs(sums["right"] - sums["probability"]).sum() / samples)}


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


class Metric:
    """A metric of a run: its sums over batches, and the numbers that are recorded of them.

    Parameters
    ----------
    part : Part
        A metric of `fedmpi.common.registry`.
    options : mapping, optional
        Its options.

    Raises
    ------
    UserError
        As `Part.checked`.
    PartFailure
        It cannot be made.
    """

    def __init__(self, part: Part, options: Mapping[str, Any] | None = None):
        self.part = part
        with calling(part):
            self._metric: Callable[[Tensor, Tensor], Mapping[str, Any]] = part.make(options or {})

    def sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        """The sums over a batch by name: integers as int64, other numbers as float64, on the processor.

        Parameters
        ----------
        outputs, targets : Tensor (b, …)

        Raises
        ------
        PartFailure
            It raised an exception, or returned anything but a dictionary of numbers and arrays.
        """
        if self.part.foreign:  # which may change what it is given
            outputs, targets = outputs.clone(), targets.clone()
        with calling(self.part):
            found = self._metric(outputs, targets)
        if not isinstance(found, Mapping) or not found:
            wanted = 'return a dictionary of sums over the samples, {"name": sum}'
            raise refuse_result(self.part, f"returned a {type(found).__name__}: {wanted}")
        return {str(name): self._added_up(str(name), value) for name, value in found.items()}

    def numbers(self, sums: Sums, samples: int) -> dict[str, float]:
        """What is recorded of the sums over all samples.

        Raises
        ------
        PartFailure
            The metric's own `result` failed; or without one there is a sum that is no single number.
        """
        own = getattr(self._metric, "result", None)
        if own is None:
            for name, value in sums.items():
                if value.dim():
                    raise refuse_result(
                        self.part,
                        f"returned {name!r} of shape {tuple(value.shape)}: return single numbers, or write a class "
                        "with result(sums, samples), which makes numbers of arrays",
                    )
            return {name: float(value.item() / samples) for name, value in sums.items()}
        given = {name: value.numpy() if value.dim() else value.item() for name, value in sums.items()}
        with calling(self.part):
            found = own(given, samples)
        if not isinstance(found, Mapping) or not all(_is_number(value) for value in found.values()):
            wanted = 'return a dictionary of numbers, {"name": value}'
            raise refuse_result(self.part, f"its result is {found!r}: {wanted}")
        return {str(name): float(value) for name, value in found.items()}

    def _added_up(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, Number | np.ndarray | np.generic):
                raise refuse_result(self.part, f"returned a {type(value).__name__} for {name!r}: return sums, numbers")
            value = torch.as_tensor(value)
        if is_complex(value):
            raise refuse_result(self.part, f"returned complex numbers for {name!r}: return real ones")
        kept: Tensor = value.detach().to("cpu", torch.float64 if value.is_floating_point() else torch.int64)
        return kept


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.ndim == 0 and not is_complex(value)
    return isinstance(value, Number) and not isinstance(value, complex)


class MetricTally:
    """What some metrics come to over batches.

    Parameters
    ----------
    metrics : iterable of Metric
    """

    def __init__(self, metrics: Iterable[Metric]):
        self._sums: list[tuple[Metric, Sums]] = [(metric, {}) for metric in metrics]
        self.samples = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """One batch more.

        Raises
        ------
        PartFailure
            As `Metric.sums`; or the metric returned other sums than of the batch before.
        """
        for metric, sums in self._sums:
            found = metric.sums(outputs, targets)
            if sums and (sums.keys() != found.keys() or any(sums[n].shape != found[n].shape for n in sums)):
                raise refuse_result(
                    metric.part,
                    f"returned {_shapes(found)} after {_shapes(sums)}: return the same sums of every batch",
                )
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
        self.samples += len(targets)

    def numbers(self) -> dict[str, float]:
        """What is recorded, by name.

        Raises
        ------
        PartFailure
            As `Metric.numbers`; or two metrics give a number of one name.
        """
        found: dict[str, float] = {}
        for metric, sums in self._sums:
            own = metric.numbers(sums, self.samples)
            if twice := sorted((found.keys() | {"loss"}) & own.keys()):
                raise refuse_result(metric.part, f"gives {twice[0]!r}, which is measured already: name it otherwise")
            found |= own
        return found


def _shapes(sums: Sums) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in sums.items())
