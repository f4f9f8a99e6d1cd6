"""Models of the next token, with one prediction per position: LSTMs of characters and words, a causal transformer.

For a classification, such as LEAF's Shakespeare (the one character after eighty), the last position predicts the class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.text_layers import text_shape, word_vectors

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

SPREAD = 0.02
"""Standard deviation of initial token vectors."""


class NextToken(nn.Module):
    """Model of token vectors, a left-to-right encoder, a projection of its states, and the logits."""

    def __init__(
        self, words: nn.Module, dimension: int, units: int, layers: int, projection: int, classes: int, everywhere: bool
    ):
        super().__init__()
        self.words = words
        self.lstm = nn.LSTM(dimension, units, layers, batch_first=True)
        self.projection = nn.Linear(units, projection) if projection else nn.Identity()
        self.output = nn.Linear(projection or units, classes)
        self.everywhere = everywhere

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, L, C) logits, or (n, C)."""
        states, _ = self.lstm(self.words(tokens))
        logits: Tensor = self.output(self.projection(states if self.everywhere else states[:, -1]))
        return logits


def predicts_everywhere(description: DataDescription, model: str) -> bool:
    """Check whether a model of the next token predicts at every position instead of a class from the last one."""
    if not description.counted:
        raise UserError(
            f'model.name = "{model}" predicts tokens or classes, but the targets of the data are '
            f"{description.targets}: choose another model"
        )
    return description.targets == "tokens"


@register("model", "char-lstm")
def char_lstm(description: DataDescription, *, dimension: int = 8, units: int = 256, layers: int = 2) -> nn.Module:
    """The character model of McMahan et al. 2017 (§3): vectors of 8 values, two LSTM layers of 256 units.

    Its published form is that of Reddi et al. (2021; google-research/federated, utils/models/shakespeare_models.py).

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
    dimension : int
        Size of a character's vector.
    units : int
        Size of the states.
    layers : int
        Stacked layers.

    Raises
    ------
    UserError
        The data are no texts, or their targets neither tokens nor classes.
    """
    _, vocabulary = text_shape(description, "char-lstm")
    everywhere = predicts_everywhere(description, "char-lstm")
    words, dimension = word_vectors(vocabulary, dimension, None, False)
    return NextToken(words, dimension, units, layers, 0, description.classes, everywhere)


@register("model", "word-lstm")
def word_lstm(
    description: DataDescription,
    *,
    dimension: int = 96,
    units: int = 670,
    layers: int = 1,
    projection: int = 96,
    vectors: str | None = None,
    frozen: bool = False,
) -> nn.Module:
    """The word model of Reddi et al. 2021 for Stack Overflow: vectors of 96, an LSTM of 670, a layer of 96.

    The sizes are those of their code (google-research/federated, utils/models/stackoverflow_models.py). torch's LSTM
    has two biases and theirs has one: 4 x 670 values more than their 4,050,748 with 10,004 token ids.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
    dimension : int
        Size of a word vector.
    units : int
        Size of the states.
    layers : int
        Stacked layers.
    projection : int
        Units of the dense layer before the logits; 0 = none.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Keep the word vectors constant.

    Raises
    ------
    UserError
        The data are no texts, or their targets neither tokens nor classes.
    """
    _, vocabulary = text_shape(description, "word-lstm")
    everywhere = predicts_everywhere(description, "word-lstm")
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    return NextToken(words, dimension, units, layers, projection, description.classes, everywhere)


class CausalAttention(nn.Module):
    """Scaled dot-product attention of every position to itself and earlier positions, with several heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, L, width) to the same shape."""
        count, length, width = x.shape
        split = (count, length, self.heads, width // self.heads)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.output(attended.transpose(1, 2).reshape(count, length, width))
        return found


class CausalBlock(nn.Module):
    """Attention and two dense layers; each reads a norm of its input and is added to it."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), CausalAttention(width, heads)
        self.dense_norm, self.widen, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )
        self.dropout = nn.Dropout(dropout)
        self.dropout_of_dense = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, L, width) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout_of_dense(self.narrow(functional.gelu(self.widen(self.dense_norm(x)))))
        return x


class CausalTransformer(nn.Module):
    """Vectors of tokens and of positions, blocks, a norm, and the logits at every position or only at the last."""

    def __init__(
        self,
        length: int,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        hidden: int,
        dropout: float,
        classes: int,
        everywhere: bool,
    ):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(CausalBlock(width, heads, hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)
        self.everywhere = everywhere
        for values in (self.words.weight, self.positions):
            nn.init.normal_(values, std=SPREAD)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (n, L) token ids to (n, L, C) logits, or (n, C)."""
        states = self.norm(self.blocks(self.words(tokens) + self.positions))
        logits: Tensor = self.output(states if self.everywhere else states[:, -1])
        return logits


@register("model", "causal-transformer")
def causal_transformer(
    description: DataDescription,
    *,
    dimension: int = 128,
    heads: int = 4,
    layers: int = 2,
    widening: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """A small transformer that predicts the next token at every position from the earlier ones.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids; for a classification, the last position predicts the class.
    dimension : int
        Size of the vector of a token, a multiple of `heads`.
    heads : int
        Heads of the attention.
    layers : int
        Blocks.
    widening : int
        Units of the dense layer of a block, in multiples of `dimension`.
    dropout : float
        Probability of a zero after the attention and after the dense layers.

    Raises
    ------
    UserError
        The data are no texts, their targets neither tokens nor classes, `heads` does not divide `dimension`, or
        `layers` is negative.
    """
    length, vocabulary = text_shape(description, "causal-transformer")
    everywhere = predicts_everywhere(description, "causal-transformer")
    if heads < 1 or dimension % heads:
        raise UserError(f"model.heads = {heads} does not divide model.dimension = {dimension}: choose a divisor")
    if layers < 0:
        raise UserError(f"model.layers = {layers} is impossible: give the number of blocks")
    width, inner = dimension, widening * dimension
    return CausalTransformer(length, vocabulary, width, heads, layers, inner, dropout, description.classes, everywhere)
