"""Models of texts: convolutions (Kim 2014, arXiv 1408.5882), self-attention, LSTMs, and a model of the next character.

Token 0 is the padding of a text. The models of Qi et al. (FedSampling) end in a head of attentive pooling and dense
layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.layers import Probability, WordConvolution

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
    description: DataDescription,
    model: str,
    encoder: Callable[[int], OrderedDict[str, nn.Module]],
    width: int,
    *,
    dimension: int,
    dropout: float,
    hidden: Sequence[int],
    vectors: str | None,
    frozen: bool,
) -> nn.Sequential:
    """Build FedSampling's text models: word vectors, an encoder of every word, attentive pooling, dense layers, logits.

    The encoder maps word vectors of its argument's size to `width` values.
    """
    _, vocabulary = text_shape(description, model)
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    layers: OrderedDict[str, nn.Module] = OrderedDict(words=words) | encoder(dimension)
    layers |= OrderedDict(dropout=nn.Dropout(dropout), pooling=AttentivePooling(width, dropout))
    for number, units in enumerate(hidden, 1):
        layers[f"dense{number}"] = nn.Linear(width, units)
        layers[f"relu{number}"] = nn.ReLU()
        width = units
    layers["output"] = nn.Linear(width, description.classes)
    return nn.Sequential(layers)


def text_shape(description: DataDescription, model: str) -> tuple[int, int]:
    """Return the length of a text and the vocabulary of the data."""
    if description.task != "text":
        raise UserError(
            f"model.name = {model!r} reads texts, but the data are of task {description.task!r}. Choose another model"
        )
    return int(description.feature_shape[0]), int(description.vocabulary)


@register("model", "text-cnn")
def text_cnn(
    description: DataDescription,
    *,
    dimension: int = 64,
    filters: int = 64,
    widths: Sequence[int] = (3, 4, 5),
    dropout: Probability = 0.0,
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """Kim's Text-CNN (arXiv 1408.5882): word vectors, filters of several widths, max over time, dropout, dense.

    Parameters
    ----------
    dimension : int
        E, size of a word vector.
    filters : int
        Filters of each width.
    widths : sequence of int
        Words under a filter; none may exceed L.
    dropout : float
        Probability of a zero before the dense layer; Kim uses 0.5.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant.
    """
    length, vocabulary = text_shape(description, "text-cnn")
    if not widths or max(widths) > length:
        raise UserError(
            f"model.widths = {list(widths)} is impossible. Give at least one width, none above the text length {length}"
        )
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
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
    dimension: int = 300,
    filters: int = 400,
    width: int = 3,
    dropout: Probability = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """FedSampling's text model (§4.1; authors' code): Conv1d without activation, attentive pooling, dense layers.

    Parameters
    ----------
    dimension : int
        Size of a word vector.
    filters : int
        Filters of the convolution.
    width : int
        Words that a filter covers.
    dropout : float
        Probability of a zero after the convolution and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant; the paper keeps those of GloVe.
    """
    return pooled_classifier(
        description,
        "fedsampling-text-cnn",
        lambda size: OrderedDict(convolution=SameConvolution(size, filters, width)),
        filters,
        dimension=dimension,
        dropout=dropout,
        hidden=hidden,
        vectors=vectors,
        frozen=frozen,
    )


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
    dimension: int = 300,
    heads: int = 20,
    head_size: int = 20,
    dropout: Probability = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """FedSampling's 'Transformer' (§4.1): self-attention, dropout, attentive pooling, dense layers.

    Parameters
    ----------
    dimension : int
        Size of a word vector.
    heads : int
        Heads of the attention.
    head_size : int
        Values of a head.
    dropout : float
        Probability of a zero after the attention and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant.
    """
    return pooled_classifier(
        description,
        "transformer",
        lambda size: OrderedDict(attention=SelfAttention(size, heads, head_size)),
        heads * head_size,
        dimension=dimension,
        dropout=dropout,
        hidden=hidden,
        vectors=vectors,
        frozen=frozen,
    )


class LSTMClassifier(nn.Module):
    """Word vectors, LSTM layers, the hidden state at the last non-padding word, dropout, the logits."""

    def __init__(self, words: nn.Module, dimension: int, units: int, layers: int, dropout: float, classes: int):
        super().__init__()
        self.words = words
        self.lstm = nn.LSTM(dimension, units, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(units, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, C) logits."""
        states, _ = self.lstm(self.words(tokens))
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        last = ((tokens != 0) * positions).amax(1).sub(1).clamp(min=0)
        final = states.gather(1, last.long()[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        logits: Tensor = self.output(self.dropout(final))
        return logits


@register("model", "lstm")
def lstm(
    description: DataDescription,
    *,
    dimension: int = 100,
    units: int = 128,
    layers: int = 1,
    dropout: Probability = 0.0,
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Module:
    """An LSTM classifier for tweets (FedSSO §4.1 names "an LSTM classifier" for Sentiment140 and no sizes).

    Parameters
    ----------
    dimension : int
        Size of a word vector; our choice, since the paper gives none.
    units : int
        Size of the state; our choice.
    layers : int
        Stacked layers; our choice.
    dropout : float
        Probability of a zero before the dense layer.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant.
    """
    _, vocabulary = text_shape(description, "lstm")
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    return LSTMClassifier(words, dimension, units, layers, dropout, description.classes)


class NextToken(nn.Module):
    """Vectors of tokens, LSTM layers, and the logits at every position or only at the last."""

    def __init__(self, words: nn.Module, dimension: int, units: int, layers: int, classes: int, everywhere: bool):
        super().__init__()
        self.words = words
        self.lstm = nn.LSTM(dimension, units, layers, batch_first=True)
        self.output = nn.Linear(units, classes)
        self.everywhere = everywhere

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, L, C) logits, or (n, C)."""
        states, _ = self.lstm(self.words(tokens))
        logits: Tensor = self.output(states if self.everywhere else states[:, -1])
        return logits


@register("model", "char-lstm")
def char_lstm(description: DataDescription, *, dimension: int = 8, units: int = 256, layers: int = 2) -> nn.Module:
    """The character model of McMahan et al. 2017 (§3): vectors of 8 values, two LSTM layers of 256 units.

    Its published form is that of Reddi et al. (2021; google-research/federated, utils/models/shakespeare_models.py).
    For a classification, such as LEAF's Shakespeare (the one character after eighty), the last position predicts the
    class.

    Parameters
    ----------
    dimension : int
        Size of a character's vector.
    units : int
        Size of the states.
    layers : int
        Stacked layers.
    """
    _, vocabulary = text_shape(description, "char-lstm")
    if not description.counted:
        raise UserError(
            'model.name = "char-lstm" predicts tokens or classes, but the targets of the data are '
            f"{description.targets}. Choose another model"
        )
    words, dimension = word_vectors(vocabulary, dimension, None, False)
    everywhere = description.targets == "tokens"
    return NextToken(words, dimension, units, layers, description.classes, everywhere)
