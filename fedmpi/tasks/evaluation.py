"""Evaluation of a model on some samples: the mean loss, and what the run's metrics come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.calling import naming
from fedmpi.common.registry import Part, resolve
from fedmpi.common.task_kinds import CLASSIFICATION
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss
from fedmpi.tasks.metrics import Metric, MetricTally

BUILT_IN = tuple(Metric(resolve("metric", name)) for name in CLASSIFICATION.metrics)
"""Accuracy and macro-F1."""
OUTPUT_BYTES = 1 << 26
"""Of the outputs at all positions that are formed at once: of a large vocabulary, a few hundred samples take gigabytes.
"""


@dataclass(frozen=True)
class Evaluation:
    """What some samples gave."""

    loss: float  # Mean over the samples
    numbers: dict[str, float]  # What the metrics came to, by name
    # (C, C): Samples of each true class (rows) by the class predicted, where macro-F1 is among the metrics of a
    # classification
    confusion: Ints | None = None

    def facts(self, part: str) -> dict[str, float]:
        """What a record says of them: "test_loss", "val_accuracy", ..."""
        return {f"{part}_{name}": value for name, value in {"loss": self.loss, **self.numbers}.items()}


def evaluate(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    loss: Loss = CROSS_ENTROPY,
    metrics: Sequence[Metric] = BUILT_IN,
    part: Part | None = None,
) -> Evaluation:
    """Evaluate a module in evaluation mode."""
    was_training = module.training
    module.eval()
    total, tally = 0.0, MetricTally(metrics, loss.kind)
    with torch.no_grad():
        for samples in evaluation_passes(len(y), batch_size):
            labels, logits = y[samples], outputs_of(module, x[samples], part)
            total += loss.total(logits, labels)
            tally.add(logits, labels)
    module.train(was_training)
    counted = tally.sums("macro-f1").get("confusion") if loss.kind is CLASSIFICATION else None
    confusion = None if counted is None else np.asarray(counted, np.int64)
    return Evaluation(total / len(y), tally.numbers(), confusion)


def evaluation_passes(samples: int, rows: int) -> list[slice]:
    """Return the samples of every pass, `rows` each; a single last one joins the pass before, since models with
    squeeze() or batch statistics need two."""
    starts = range(0, samples if rows == 1 else max(1, samples - 1), rows)
    return [slice(*borders) for borders in pairwise([*starts, samples])]


def outputs_of(module: nn.Module, x: Tensor, part: Part | None) -> Tensor:
    """What the module makes of samples; where it is of the user's own part, its failures are named.

    It may compute gradients within (`torch.enable_grad()`): the outputs have none.
    Memory that is short is nobody's failure: fewer samples may do.
    """
    with nullcontext() if part is None else naming(part):
        try:
            outputs: Tensor = module(x)
            return outputs.detach()
        except torch.OutOfMemoryError as error:
            short = error
    raise short


def rows_per_pass(description: DataDescription, most: int) -> int:
    """How many samples to pass through a model at once: `most`, and fewer where each has very many outputs."""
    if description.targets != "tokens":
        return most
    return max(1, min(most, OUTPUT_BYTES // (4 * math.prod(description.output_shape))))
