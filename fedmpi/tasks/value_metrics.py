"""Metrics of labels, of which a sample may have several, and of numbers; as scikit-learn defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("metric", "mean-average-precision", tasks=("multilabel",))
class MeanAveragePrecision:
    """Unweighted mean over the labels of the area under precision and recall, Σ (R_i − R_{i−1}) P_i.

    It is no function of sums: the outputs of all samples are kept until the last, 16 C bytes a sample.
    """

    gathers = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """The outputs and whether the labels are there, (b, C), to be gathered."""
        return {"outputs": outputs, "there": targets > 0.5}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """The mean over the labels that some sample has; 0 where none has any."""
        outputs, there = np.asarray(sums["outputs"]), np.asarray(sums["there"], bool)
        held = np.flatnonzero(there.any(axis=0))
        each = [average_precision(outputs[:, label], there[:, label]) for label in held]
        return {"mean_average_precision": float(np.mean(each)) if each else 0.0}


@register("metric", "mae", tasks=("regression",))
class MeanAbsoluteError:
    """Mean of |y − ŷ|; of several numbers a sample, the mean over them."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Σ |y − ŷ| of each number, (D,)."""
        return {"errors": (outputs.double() - targets.double()).abs().sum(0)}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """The mean over samples and numbers."""
        return {"mae": float(np.mean(sums["errors"] / samples))}


@register("metric", "rmse", tasks=("regression",))
class RootMeanSquaredError:
    """Root of the mean of (y − ŷ)²; of several numbers a sample, the mean of their roots."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Σ (y − ŷ)² of each number, (D,)."""
        return {"squares": (outputs.double() - targets.double()).square().sum(0)}

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """The mean over the numbers."""
        return {"rmse": float(np.mean(np.sqrt(sums["squares"] / samples)))}


@register("metric", "r2", tasks=("regression",))
class Determination:
    """R² = 1 − Σ (y − ŷ)² / Σ (y − ȳ)²; of several numbers a sample, the mean over them.

    A number that is the same in all samples has R² = 1 where it is always met, else 0; NaN where an output is NaN.
    Σ y² − n ȳ² would lose the spread of numbers far from 0: every batch gives its own mean and spread, which are joined
    by Chan, Golub and LeVeque (1979), Eq 1.3. They are kept until the last, 24 D + 8 bytes a batch.
    """

    gathers = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """Of a batch of b: b (1,), and Σ (y − ŷ)², the mean m of y and Σ (y − m)² of each number, (1, D)."""
        y = targets.double()
        from_first = y - y[:1]  # exactly 0 of a number that does not change
        mean = from_first.mean(0, keepdim=True)
        return {
            "samples": y.new_tensor([len(y)]),
            "squares": (outputs.double() - y).square().sum(0, keepdim=True),
            "mean": y[:1] + mean,
            "spread": (from_first - mean).square().sum(0, keepdim=True),
        }

    def result(self, sums: Mapping[str, Any], samples: int) -> dict[str, float]:
        """The mean over the numbers."""
        left = np.asarray(sums["squares"]).sum(0)
        from_first = sums["mean"] - sums["mean"][:1]
        beside = np.average(from_first, axis=0, weights=sums["samples"])
        spread = np.asarray(sums["spread"].sum(0) + sums["samples"] @ (from_first - beside) ** 2)
        constant = np.where(np.isnan(left), np.nan, left == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return {"r2": float(np.mean(np.where(spread > 0, 1 - left / spread, constant)))}


def average_precision(scores: NDArray[np.floating], there: NDArray[np.bool_]) -> float:
    """Σ (R_i − R_{i−1}) P_i over the thresholds between different scores, from the highest on.

    Parameters
    ----------
    scores : (n,)
    there : bool (n,)
        At least one.
    """
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)  # equal scores are taken together
    found = np.cumsum(there[order])[ends].astype(np.float64)
    return float(np.sum(np.diff(found, prepend=0.0) / found[-1] * found / (ends + 1)))
