"""Kinds of tasks: the losses and metrics of each, and the inputs of metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedmpi.common.registry import Component

if TYPE_CHECKING:
    from torch import Tensor


IGNORED = -1
"""Target of a position that is ignored."""


@dataclass(frozen=True)
class TaskKind:
    """Kind of task, chosen by `task.kind`."""

    name: str  # name in the configuration and in the description of the data's targets
    losses: tuple[str, ...]  # built-in losses, the default first
    metrics: tuple[str, ...]  # metrics that are always computed
    further: tuple[str, ...] = ()  # metrics that can be chosen
    score: str = "accuracy"  # number of a record that ranks two models
    higher: bool = True  # True if higher scores are better

    @property
    def loss(self) -> str:
        """Default loss."""
        return self.losses[0]

    def judged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the built-in metrics for a batch, one row per item that counts once."""
        if self.name == "tokens":
            counts = targets != IGNORED
            return outputs[counts], targets[counts]
        if self.name == "regression":
            return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)
        return outputs, targets

    def aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the outputs in the form that a loss needs with the targets: for a regression, in their shape."""
        return outputs.reshape(targets.shape) if self.name == "regression" else outputs

    def fits(self, part: Component) -> bool:
        """Check whether a loss or a metric belongs to this kind."""
        kinds = kinds_of(part)
        return not kinds or self.name in kinds


OF_CLASSES = ("cross-entropy", "label-smoothing")
KINDS: Mapping[str, TaskKind] = {
    kind.name: kind
    for kind in (
        TaskKind("classification", OF_CLASSES, ("accuracy", "macro-f1"), ("perplexity", "top-k")),
        TaskKind("tokens", OF_CLASSES, ("accuracy", "perplexity"), ("macro-f1", "top-k")),
        TaskKind("multilabel", ("bce",), ("accuracy", "macro-f1", "mean-average-precision")),
        TaskKind("regression", ("mse",), ("mae", "rmse", "r2"), score="loss", higher=False),
    )
}
CLASSIFICATION = KINDS["classification"]
TARGETS = tuple(KINDS)
"""Contents of y: a class per sample; a class per position, -1 if it is ignored; 0 or 1 per label; numbers."""


def kinds_of(part: Component) -> tuple[str, ...]:
    """Return the kinds of tasks of a built-in loss or metric; () for a custom one, which fits any."""
    if part.foreign:
        return ()
    return tuple(kind.name for kind in KINDS.values() if part.name in (*kind.losses, *kind.metrics, *kind.further))
