"""The kinds of tasks: which losses and metrics each has, and what metrics are taken of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedmpi.common.registry import Part

if TYPE_CHECKING:
    from torch import Tensor


IGNORED = -1
"""The target of a position that counts nowhere."""


@dataclass(frozen=True)
class TaskKind:
    """What `task.kind` chooses."""

    name: str  # As the configuration names it; also what the data say of their targets
    loss: str  # The one it has unless another is chosen
    metrics: tuple[str, ...]  # What is measured whatever else is chosen
    score: str = "accuracy"  # The number of a record that tells which of two models is better
    higher: bool = True  # Whether the higher one is

    def judged(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What the built-in metrics see of a batch, a row for everything that counts once."""
        if self.name == "tokens":
            counts = targets != IGNORED
            return outputs[counts], targets[counts]
        if self.name == "regression":
            return outputs.reshape(len(targets), -1), targets.reshape(len(targets), -1)
        return outputs, targets

    def aligned(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The outputs as a loss sees them beside the targets: of a regression in their shape."""
        return outputs.reshape(targets.shape) if self.name == "regression" else outputs

    def refusal(self, part: Part) -> str | None:
        """Why a loss or a metric is none of this kind's, in words, or None."""
        fits = part.marks.get("tasks")
        if part.foreign or fits is None or self.name in fits:
            return None
        kinds = " or ".join(f'"{name}"' for name in fits)
        return f'{part.key} = "{part.name}" is for task.kind = {kinds}, not "{self.name}"'


KINDS: Mapping[str, TaskKind] = {
    kind.name: kind
    for kind in (
        TaskKind("classification", "cross-entropy", ("accuracy", "macro-f1")),
        TaskKind("tokens", "cross-entropy", ("accuracy", "perplexity")),
        TaskKind("multilabel", "bce", ("accuracy", "macro-f1", "mean-average-precision")),
        TaskKind("regression", "mse", ("mae", "rmse", "r2"), score="loss", higher=False),
    )
}
CLASSIFICATION = KINDS["classification"]
TARGETS = tuple(KINDS)
"""What y holds: a class of each sample; a class of each of its positions, -1 where none counts; 0 or 1 for each label;
numbers."""
