"""Convolutional text classifiers: Kim's (2014) and FedSampling's (Qi et al., authors' model 'CNN')."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.text_layers import MaxOverTime, pooled_classifier, text_shape, word_vectors

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


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
        Before the dense layer; Kim uses 0.5.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Whether the word vectors stay as they are.

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
    """A convolution over the words that keeps their number; no activation follows (as in the authors' code)."""

    def __init__(self, dimension: int, filters: int, width: int):
        super().__init__()
        self.convolution = nn.Conv1d(dimension, filters, width, padding="same")

    def forward(self, words: Tensor) -> Tensor:
        """From (n, L, E) to (n, L, filters)."""
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
        After the convolution and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Whether the word vectors stay as they are; the paper keeps those of GloVe.

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
