"""Building blocks of text models: word vectors, convolutions with max over time, attentive pooling, the dense head.

Token 0 is the padding of a text. Sources: Kim 2014 (arXiv 1408.5882) for max over time; Qi et al., FedSampling, for
attentive pooling and the head of two dense layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

INITIAL_SPREAD = 0.1
"""Standard deviation of initial word vectors: with 1, plain SGD at the learning rates of the papers oscillates."""


class FrozenEmbedding(nn.Module):
    """Word vectors that are never trained or communicated: a constant of the model and no part of its weights."""

    vectors: Tensor  # (V, E)

    def __init__(self, vectors: Tensor):
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.vectors)


def word_vectors(vocabulary: int, dimension: int, vectors: str | None, frozen: bool) -> tuple[nn.Module, int]:
    """Return the word vectors of a model and their dimension E."""
    if vectors is None:
        if frozen:
            raise UserError("model.frozen = true needs model.vectors: the .npy file of the word vectors to keep")
        table = nn.Embedding(vocabulary, dimension)
        nn.init.normal_(table.weight, std=INITIAL_SPREAD)
        return table, dimension
    values = _read_vectors(Path(vectors), vocabulary)
    if frozen:
        return FrozenEmbedding(values), values.shape[1]
    table = nn.Embedding(values.shape[0], values.shape[1], _weight=values)
    return table, values.shape[1]


def _read_vectors(path: Path, vocabulary: int) -> Tensor:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model.vectors: {path} cannot be read as a .npy array of word vectors ({error})") from error
    if values.ndim != 2 or values.shape[0] != vocabulary:
        raise UserError(
            f"model.vectors: {path} has shape {values.shape}, but the vocabulary of the data needs "
            f"({vocabulary}, dimension)"
        )
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


class MaxOverTime(nn.Module):
    """Convolutions of several widths over the words, ReLU, then the maximum over all positions (Kim 2014, Eq 2–3)."""

    def __init__(self, dimension: int, filters: int, widths: Sequence[int]):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(dimension, filters, width) for width in widths)

    def forward(self, words: Tensor) -> Tensor:
        """Map (n, L, E) to (n, len(widths) · F)."""
        channels_first = words.transpose(1, 2)
        return torch.cat([_largest(convolution(channels_first)) for convolution in self.convolutions], 1).relu()


def _largest(features: Tensor) -> Tensor:
    """Return the maximum over the positions, (n, F, L) to (n, F); its gradient goes to the first position that has it.

    Pooling finds it in one pass through the features, whatever their memory order.
    """
    image = features.detach().unsqueeze(2)
    places = nn.functional.max_pool2d(image, (1, features.shape[2]), return_indices=True)[1].flatten(1)
    return features.transpose(1, 2).gather(1, places.unsqueeze(1)).squeeze(1)


class AttentivePooling(nn.Module):
    """Softmax-weighted mean of the vectors at all positions (FedSampling's text models), after dropout."""

    def __init__(self, dimension: int, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Linear(dimension, 1, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Map (n, L, E) to (n, E)."""
        words = self.dropout(words)
        attention = self.score(words).softmax(1)
        pooled: Tensor = (attention * words).sum(1)
        return pooled


def pooled_classifier(
    description: DataDescription,
    model: str,
    encoder: Callable[[int], tuple[str, nn.Module, int]],
    *,
    dimension: int,
    dropout: float,
    hidden: Sequence[int],
    vectors: str | None,
    frozen: bool,
) -> nn.Sequential:
    """Build word vectors, an encoder of every word, and the head of FedSampling's models."""
    _, vocabulary = text_shape(description, model)
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    name, encoding, width = encoder(dimension)
    layers: OrderedDict[str, nn.Module] = OrderedDict(words=words)
    layers[name] = encoding
    return nn.Sequential(layers | pooled_head(width, hidden, description.classes, dropout))


def pooled_head(dimension: int, hidden: Sequence[int], classes: int, dropout: float) -> OrderedDict[str, nn.Module]:
    """Build dropout, attentive pooling, dense layers with ReLU, and the logits, as in FedSampling's models."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        dropout=nn.Dropout(dropout), pooling=AttentivePooling(dimension, dropout)
    )
    width = dimension
    for number, units in enumerate(hidden, 1):
        layers[f"dense{number}"] = nn.Linear(width, units)
        layers[f"relu{number}"] = nn.ReLU()
        width = units
    layers["output"] = nn.Linear(width, classes)
    return layers


def text_shape(description: DataDescription, model: str) -> tuple[int, int]:
    """Return the length of a text and the vocabulary of the data."""
    if description.task != "text":
        raise UserError(
            f"model.name = {model!r} reads texts, but the data are of task {description.task!r}: choose another model"
        )
    return int(description.feature_shape[0]), int(description.vocabulary)
