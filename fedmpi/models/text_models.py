"""Classifiers of texts: convolutions (Kim 2014), self-attention, LSTMs, and a linear model of the words.

The models of Qi et al. (FedSampling) end in a common head of attentive pooling and dense layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.text_layers import MaxOverTime, pooled_classifier, text_shape, word_vectors

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

FIRST_WORD = 2
"""Smallest id of a known word: 0 is padding, 1 any unknown word."""


@register("model", "text-cnn")
def text_cnn(
    description: DataDescription,
    *,
    dimension: int = 64,
    filters: int = 64,
    widths: Sequence[int] = (3, 4, 5),
    dropout: float = 0.0,
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """Kim's Text-CNN (arXiv 1408.5882): word vectors, filters of several widths, max over time, dropout, dense.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
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

    Raises
    ------
    UserError
        The data are no texts, or shorter than a filter.
    """
    length, vocabulary = text_shape(description, "text-cnn")
    if not widths or max(widths) > length:
        raise UserError(f"model.widths = {list(widths)}: give at least one width, none above the text length {length}")
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
        self.convolution = nn.Conv1d(dimension, filters, width, padding="same")

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
    dropout: float = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """FedSampling's text model (§4.1; authors' code): Conv1d without activation, attentive pooling, dense layers.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids; the paper cuts titles to L = 30.
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

    Raises
    ------
    UserError
        The data are no texts.
    """

    def convolution(size: int) -> tuple[str, nn.Module, int]:
        return "convolution", SameConvolution(size, filters, width), filters

    return pooled_classifier(
        description,
        "fedsampling-text-cnn",
        convolution,
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
    dropout: float = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """FedSampling's 'Transformer' (§4.1): self-attention, dropout, attentive pooling, dense layers.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
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

    Raises
    ------
    UserError
        The data are no texts.
    """

    def attention(size: int) -> tuple[str, nn.Module, int]:
        return "attention", SelfAttention(size, heads, head_size), heads * head_size

    return pooled_classifier(
        description,
        "transformer",
        attention,
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
    dropout: float = 0.0,
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Module:
    """An LSTM classifier for tweets (FedSSO §4.1 names "an LSTM classifier" for Sentiment140 and no sizes).

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids, 0 = padding.
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

    Raises
    ------
    UserError
        The data are no texts.
    """
    _, vocabulary = text_shape(description, "lstm")
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    return LSTMClassifier(words, dimension, units, layers, dropout, description.classes)


class BidirectionalLSTM(nn.Module):
    """Concatenated states of an LSTM in both directions at every word."""

    def __init__(self, dimension: int, units: int):
        super().__init__()
        self.lstm = nn.LSTM(dimension, units, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        """Map (n, L, E) to (n, L, 2 · units)."""
        states: Tensor = self.lstm(words)[0]
        return states


@register("model", "bilstm")
def bilstm(
    description: DataDescription,
    *,
    dimension: int = 300,
    units: int = 200,
    dropout: float = 0.2,
    hidden: Sequence[int] = (256, 256),
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Sequential:
    """Bidirectional LSTM with FedSampling's head (the option 'BiLSTM' of the authors' code).

    The authors' version passes one vector although the pooling expects one per word, and cannot run. This version pools
    the states of every word.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
    dimension : int
        Size of a word vector.
    units : int
        Size of the state in each direction.
    dropout : float
        Probability of a zero after the LSTM and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant.

    Raises
    ------
    UserError
        The data are no texts.
    """

    def states(size: int) -> tuple[str, nn.Module, int]:
        return "states", BidirectionalLSTM(size, units), 2 * units

    return pooled_classifier(
        description,
        "bilstm",
        states,
        dimension=dimension,
        dropout=dropout,
        hidden=hidden,
        vectors=vectors,
        frozen=frozen,
    )


class BagOfWords(nn.Module):
    """Model W f + b of the frequencies f (V,) of the known words among all words of a text."""

    def __init__(self, words: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, classes))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.xavier_normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, C) logits; a text without words has the logits b."""
        words, known = (tokens > 0).sum(1, keepdim=True).clamp(min=1), tokens >= FIRST_WORD
        share = known.to(self.weight.dtype) / words
        rows = nn.functional.embedding((tokens - FIRST_WORD).clamp(min=0), self.weight)
        logits: Tensor = (share[:, None] @ rows)[:, 0] + self.bias
        return logits


@register("model", "bag-of-words")
def bag_of_words(description: DataDescription) -> nn.Module:
    """The logistic regression of Reddi et al. 2021 (google-research/federated, stackoverflow_lr_models.py).

    The authors' inputs are the words' shares of a text; this version counts them from its token ids. W starts from
    Glorot's normal distribution, b from 0. With `task.kind = "multilabel"` each of the C labels is a separate
    regression.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.

    Raises
    ------
    UserError
        The data are no texts.
    """
    _, vocabulary = text_shape(description, "bag-of-words")
    return BagOfWords(max(vocabulary - FIRST_WORD, 1), description.classes)
