"""Scores of many clients at once: the rows of several go through a model together and are summed client by client.

What a client's sums come to depends on the rows that go through the model beside its own only in the last bits: `cut`
makes parts that follow from the clients alone, so that whoever evaluates a part gets the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.registry import Part
from fedmpi.common.task_kinds import IGNORED, TaskKind
from fedmpi.common.types import Floats, Ints
from fedmpi.tasks.evaluation import evaluation_passes, outputs_of
from fedmpi.tasks.losses import Loss

LOSS, SAMPLES, RIGHT, JUDGED = range(4)
"""Columns of the sums."""


def sample_scores(outputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """What each sample adds to its client's sums."""
    losses = loss.per_sample(outputs, targets).double()
    samples = torch.ones_like(losses)
    if not has_accuracy(loss.kind):
        right = judged = torch.zeros_like(losses)
    elif loss.kind.name == "tokens":
        right = (outputs.argmax(-1) == targets).sum(1).double()
        judged = (targets != IGNORED).sum(1).double()
    elif loss.kind.name == "multilabel":
        right, judged = ((outputs > 0) == (targets > 0.5)).all(1).double(), samples
    else:
        right, judged = (outputs.argmax(1) == targets).double(), samples
    return torch.stack([losses, samples, right, judged], dim=1)


def has_accuracy(kind: TaskKind) -> bool:
    """Whether such a task has an accuracy."""
    return "accuracy" in kind.metrics


def client_sums(
    module: nn.Module, x: Tensor, y: Tensor, counts: Ints, loss: Loss, rows: int, part: Part | None = None
) -> Floats:
    """The sums of `sample_scores` over the samples of each client, float64 (k, 4); the module in evaluation mode."""
    was_training = module.training
    module.eval()
    with torch.no_grad():
        scores = [
            sample_scores(outputs_of(module, x[samples], part), y[samples], loss)
            for samples in evaluation_passes(len(y), rows)
        ]
    module.train(was_training)
    each = torch.cat(scores).cpu().numpy()
    sums: Floats = np.add.reduceat(each, np.cumsum(counts) - counts, axis=0)
    return sums


def cut(counts: Ints, most: int) -> Ints:
    """Borders of parts of neighbouring clients that have at most `most` samples together, or are a single client."""
    ends, borders = np.cumsum(counts), [0]
    while (first := borders[-1]) < len(counts):
        before = int(ends[first - 1]) if first else 0
        borders.append(max(first + 1, int(np.searchsorted(ends, before + most, side="right"))))
    return np.array(borders, np.int64)
