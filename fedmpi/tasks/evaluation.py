"""Evaluation of a model on some samples: the mean loss and the run's metrics, for a part or per client.

Samples of several clients go through a model together and are summed per client. A client's sums depend on the other
samples only in the last bits. `cut` makes parts that follow from the clients alone, so that any rank evaluates a part
with bit-identical results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.calling import calling
from fedmpi.common.registry import Component, resolve
from fedmpi.common.task_kinds import CLASSIFICATION, IGNORED, TaskKind
from fedmpi.common.types import Floats, Ints
from fedmpi.data.schema import DataDescription
from fedmpi.tasks.losses import CROSS_ENTROPY, Loss
from fedmpi.tasks.metrics import Metric, MetricTally

BUILT_IN = tuple(Metric(resolve("metric", name)) for name in CLASSIFICATION.metrics)
"""Accuracy and macro-F1."""
OUTPUT_BYTES = 1 << 26
"""Largest number of bytes of outputs computed at once: with a large vocabulary, a few hundred samples take gigabytes.
"""

LOSS, WEIGHT, RIGHT, JUDGED = range(4)
"""Columns of the sums per client."""


@dataclass(frozen=True)
class Evaluation:
    """Evaluation result of some samples."""

    loss: float  # Mean over the samples
    numbers: dict[str, float]  # Values of the metrics, by name
    # (C, C): Samples of each true class (rows) by the predicted class, if macro-F1 is among the metrics of a
    # classification
    confusion: Ints | None = None

    def facts(self, part: str) -> dict[str, float]:
        """Return the entries of a record: "test_loss", "val_accuracy", ..."""
        return {f"{part}_{name}": value for name, value in {"loss": self.loss, **self.numbers}.items()}


def evaluate(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    loss: Loss = CROSS_ENTROPY,
    metrics: Sequence[Metric] = BUILT_IN,
    part: Component | None = None,
) -> Evaluation:
    """Evaluate a module in evaluation mode."""
    was_training = module.training
    module.eval()
    total, weight, tally = 0.0, 0.0, MetricTally(metrics, loss.kind)
    with torch.no_grad():
        for samples in evaluation_passes(len(y), batch_size):
            labels, logits = y[samples], outputs_of(module, x[samples], part)
            total += loss.total(logits, labels)
            weight += float(loss.weights(labels).sum())
            tally.add(logits, labels)
    module.train(was_training)
    counted = tally.sums("macro-f1").get("confusion") if loss.kind is CLASSIFICATION else None
    confusion = None if counted is None else np.asarray(counted, np.int64)
    return Evaluation(total / weight, tally.numbers(), confusion)


def evaluation_passes(samples: int, rows: int) -> list[slice]:
    """Return the samples of every pass, `rows` each; a single last one joins the pass before, since models with
    squeeze() or batch statistics need two."""
    starts = range(0, samples if rows == 1 else max(1, samples - 1), rows)
    return [slice(*borders) for borders in pairwise([*starts, samples])]


def outputs_of(module: nn.Module, x: Tensor, part: Component | None) -> Tensor:
    """Return the module's outputs for samples; errors of a custom component name it.

    It may compute gradients within (`torch.enable_grad()`): the outputs have none.
    """
    with nullcontext() if part is None else calling(part):
        outputs: Tensor = module(x)
        return outputs.detach()


def rows_per_pass(description: DataDescription, most: int) -> int:
    """Return the number of samples per pass: `most`, and fewer if each has very many outputs."""
    if description.targets != "tokens":
        return most
    return max(1, min(most, OUTPUT_BYTES // (4 * math.prod(description.output_shape))))


def sample_scores(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Return each sample's contribution to its client's sums."""
    losses = loss.per_sample(outputs, targets).double()
    right = judged = torch.zeros_like(losses)
    if loss.kind.name == "multilabel":
        right, judged = ((outputs > 0) == (targets > 0.5)).all(1), torch.ones_like(losses)
    elif has_accuracy(loss.kind):
        right = (outputs.argmax(-1) == targets).reshape(len(targets), -1).sum(1)
        judged = (targets != IGNORED).reshape(len(targets), -1).sum(1)
    return torch.stack([losses, loss.weights(targets), right.double(), judged.double()], dim=1)


def has_accuracy(kind: TaskKind) -> bool:
    """Check whether such a task has an accuracy."""
    return "accuracy" in kind.metrics


def client_sums(
    module: nn.Module, x: Tensor, y: Tensor, counts: Ints, loss: Loss, rows: int, part: Component | None = None
) -> Floats:
    """Return the sums of `sample_scores` over each client's samples, float64 (k, 4); module in evaluation mode."""
    was_training = module.training
    module.eval()
    with torch.no_grad():
        scores = [
            sample_scores(outputs_of(module, x[samples], part), y[samples], loss)
            for samples in evaluation_passes(len(y), rows)
        ]
    module.train(was_training)
    each = torch.cat(scores).cpu().numpy()
    return np.add.reduceat(each, np.cumsum(counts) - counts, axis=0)


def cut(counts: Ints, most: int) -> Ints:
    """Return boundaries of parts of neighboring clients with at most `most` samples together, or a single client."""
    ends, borders = np.cumsum(counts), [0]
    while (first := borders[-1]) < len(counts):
        before = int(ends[first - 1]) if first else 0
        borders.append(max(first + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return np.array(borders, np.int64)
