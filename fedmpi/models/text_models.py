"""Models of texts: convolutions (Kim 2014, arXiv 1408.5882), self-attention, LSTMs, and a model of the next character.

Token 0 is the padding of a text. The models of Qi et al. (FedSampling) end in a head of attentive pooling and dense
layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.image_models import dense_layers
from fedmpi.models.layers import Probability, WordConvolution

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

INITIAL_SPREAD = 0.1
"""Standard deviation of initial word vectors: with 1, plain SGD at the learning rates of the papers oscillates."""

Dimension = Annotated[int, Field(description="E, size of a word vector.")]
Hidden = Annotated[Sequence[int], Field(description="Units of the dense ReLU layers.")]
Vectors = Annotated[str | None, Field(description="Word vectors to start from (.npy, vocabulary × E).")]
Frozen = Annotated[bool, Field(description="Keep the word vectors constant.")]


class FrozenEmbedding(nn.Module):
    """Word vectors that are never trained or communicated: a constant of the model and no part of its weights."""

    vectors: Tensor  # (V, E)

    def __init__(self, vectors: Tensor):
        super().__init__()
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.vectors)


def word_vectors(
    description: DataDescription, dimension: int, vectors: str | None = None, frozen: bool = False
) -> tuple[nn.Module, int]:
    """Return the word vectors of a model and their dimension E."""
    if description.task != "text":
        raise UserError(
            f"the model reads texts, but the data are of task {description.task!r}. Choose another model.name"
        )
    if vectors is not None:
        values = _read_vectors(Path(vectors), description.vocabulary)
        rows, dimension = values.shape
        return FrozenEmbedding(values) if frozen else nn.Embedding(rows, dimension, _weight=values), dimension
    if frozen:
        raise UserError(
            "model.frozen = true keeps given word vectors, and there are none. Set model.vectors to their .npy file"
        )
    table = nn.Embedding(description.vocabulary, dimension)
    nn.init.normal_(table.weight, std=INITIAL_SPREAD)
    return table, dimension


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
        self.convolutions = nn.ModuleList(WordConvolution(dimension, filters, width) for width in widths)

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
    layers: OrderedDict[str, nn.Module], width: int, dropout: float, hidden: Sequence[int], classes: int
) -> nn.Sequential:
    """Build FedSampling's text models: layers that give `width` values for each word, attentive pooling, dense layers,
    logits."""
    pooling = OrderedDict(dropout=nn.Dropout(dropout), pooling=AttentivePooling(width, dropout))
    return nn.Sequential(layers | pooling | dense_layers(width, hidden, classes))


@register("model", "text-cnn")
def text_cnn(
    description: DataDescription,
    *,
    dimension: Dimension = 64,
    filters: int = 64,
    widths: Sequence[int] = (3, 4, 5),
    dropout: Probability = 0.0,
    vectors: Vectors = None,
    frozen: Frozen = False,
) -> nn.Sequential:
    """Kim's Text-CNN (arXiv 1408.5882): word vectors, filters of several widths, max over time, dropout, dense.

    Parameters
    ----------
    filters : int
        Filters of each width.
    widths : sequence of int
        Words under a filter; none may exceed L.
    dropout : float
        Probability of a zero before the dense layer; Kim uses 0.5.
    """
    words, dimension = word_vectors(description, dimension, vectors, frozen)
    length = description.feature_shape[0]
    if not widths or max(widths) > length:
        raise UserError(
            f"model.widths = {list(widths)} is impossible. Give at least one width, none above the text length {length}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(words=words, features=MaxOverTime(dimension, filters, widths))
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    layers["output"] = nn.Linear(filters * len(widths), description.classes)
    return nn.Sequential(layers)


class SameConvolution(nn.Module):
    """Convolution over the words that keeps their number, without activation (as in the authors' code)."""

    def __init__(self, dimension: int, filters: int, width: int):
        super().__init__()
        self.convolution = WordConvolution(dimension, filters, width, padding="same")

    def forward(self, words: Tensor) -> Tensor:
        """Map (n, L, E) to (n, L, filters)."""
        output: Tensor = self.convolution(words.transpose(1, 2))
        return output.transpose(1, 2)


@register("model", "fedsampling-text-cnn")
def fedsampling_text_cnn(
    description: DataDescription,
    *,
    dimension: Dimension = 300,
    filters: int = 400,
    width: int = 3,
    dropout: Probability = 0.2,
    hidden: Hidden = (256, 256),
    vectors: Vectors = None,
    frozen: Frozen = False,
) -> nn.Sequential:
    """FedSampling's text model (§4.1; authors' code): Conv1d without activation, attentive pooling, dense layers.

    The paper keeps the word vectors of GloVe constant.

    Parameters
    ----------
    filters : int
        Filters of the convolution.
    width : int
        Words that a filter covers.
    dropout : float
        Probability of a zero after the convolution and again inside the pooling.
    """
    words, dimension = word_vectors(description, dimension, vectors, frozen)
    layers = OrderedDict(words=words, convolution=SameConvolution(dimension, filters, width))
    return pooled_classifier(layers, filters, dropout, hidden, description.classes)


class SelfAttention(nn.Module):
    """Scaled dot-product attention of every word to every word, with several heads, as published by the authors.

    It has query, key and value projections without bias, but no output projection, residual, normalization, position or
    mask, so padding is attended too.
    """

    def __init__(self, dimension: int, heads: int, head_size: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dimension, heads * head_size, bias=False)
        self.key = nn.Linear(dimension, heads * head_size, bias=False)
        self.value = nn.Linear(dimension, heads * head_size, bias=False)
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(projection.weight)

    def _split(self, projected: Tensor) -> Tensor:
        count, length, width = projected.shape
        return projected.view(count, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Map (n, L, E) to (n, L, heads · head_size)."""
        query, key, value = (self._split(project(words)) for project in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).flatten(2)


@register("model", "transformer")
def transformer(
    description: DataDescription,
    *,
    dimension: Dimension = 300,
    heads: int = 20,
    head_size: int = 20,
    dropout: Probability = 0.2,
    hidden: Hidden = (256, 256),
    vectors: Vectors = None,
    frozen: Frozen = False,
) -> nn.Sequential:
    """FedSampling's 'Transformer' (§4.1): self-attention, dropout, attentive pooling, dense layers.

    Parameters
    ----------
    heads : int
        Heads of the attention.
    head_size : int
        Values of a head.
    dropout : float
        Probability of a zero after the attention and again inside the pooling.
    """
    words, dimension = word_vectors(description, dimension, vectors, frozen)
    layers = OrderedDict(words=words, attention=SelfAttention(dimension, heads, head_size))
    return pooled_classifier(layers, heads * head_size, dropout, hidden, description.classes)


class TextLSTM(nn.Module):
    """Word vectors, LSTM layers, dropout, and the logits of one state or of all.

    `reads` is the state: "last word", at the last token that is no padding, "last", or "all".
    """

    def __init__(
        self, words: nn.Module, dimension: int, units: int, layers: int, dropout: float, classes: int, reads: str
    ):
        super().__init__()
        self.words, self.reads = words, reads
        self.lstm = nn.LSTM(dimension, units, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(units, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, C) logits, or (n, L, C) of all states."""
        states, _ = self.lstm(self.words(tokens))
        if self.reads == "last word":
            positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            last = ((tokens != 0) * positions).amax(1).sub(1).clamp(min=0)
            states = states.gather(1, last.long()[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        elif self.reads == "last":
            states = states[:, -1]
        logits: Tensor = self.output(self.dropout(states))
        return logits


@register("model", "lstm")
def lstm(
    description: DataDescription,
    *,
    dimension: Dimension = 100,
    units: int = 128,
    layers: int = 1,
    dropout: Probability = 0.0,
    vectors: Vectors = None,
    frozen: Frozen = False,
) -> nn.Module:
    """An LSTM classifier for tweets (FedSSO §4.1 names one for Sentiment140 without its sizes, which are our choice).

    Parameters
    ----------
    units : int
        Size of the state.
    layers : int
        Stacked layers.
    dropout : float
        Probability of a zero before the dense layer.
    """
    words, dimension = word_vectors(description, dimension, vectors, frozen)
    return TextLSTM(words, dimension, units, layers, dropout, description.classes, "last word")


@register("model", "char-lstm")
def char_lstm(
    description: DataDescription, *, dimension: Dimension = 8, units: int = 256, layers: int = 2
) -> nn.Module:
    """The character model of McMahan et al. 2017 (§3): vectors of 8 values, two LSTM layers of 256 units.

    Its published form is that of Reddi et al. (2021; google-research/federated, utils/models/shakespeare_models.py).
    For a classification, such as LEAF's Shakespeare (the one character after eighty), the last position predicts the
    class.

    Parameters
    ----------
    units : int
        Size of the states.
    layers : int
        Stacked layers.
    """
    words, dimension = word_vectors(description, dimension)
    if not description.counted:
        raise UserError(
            'model.name = "char-lstm" predicts tokens or classes, but the targets of the data are '
            f"{description.targets}. Choose another model"
        )
    reads = "all" if description.targets == "tokens" else "last"
    return TextLSTM(words, dimension, units, layers, 0.0, description.classes, reads)
