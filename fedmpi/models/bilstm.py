"""Recurrent text classifiers: an LSTM as FedSSO uses for Sentiment140, a bidirectional one with FedSampling's head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmpi.common.registry import register
from fedmpi.models.text_layers import pooled_classifier, text_shape, word_vectors

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


class LSTMClassifier(nn.Module):
    """Word vectors, LSTM layers, the hidden state at the last word that is no padding, dropout, the logits."""

    def __init__(self, words: nn.Module, dimension: int, units: int, layers: int, dropout: float, classes: int):
        super().__init__()
        self.words = words
        self.lstm = nn.LSTM(dimension, units, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(units, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """From (n, L) token ids to (n, C) logits."""
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
        Before the dense layer.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Whether the word vectors stay as they are.

    Raises
    ------
    UserError
        The data are no texts.
    """
    _, vocabulary = text_shape(description, "lstm")
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    return LSTMClassifier(words, dimension, units, layers, dropout, description.classes)


class BidirectionalLSTM(nn.Module):
    """The states of an LSTM in both directions, side by side at every word."""

    def __init__(self, dimension: int, units: int):
        super().__init__()
        self.lstm = nn.LSTM(dimension, units, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor) -> Tensor:
        """From (n, L, E) to (n, L, 2 · units)."""
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

    Theirs passes one vector where the pooling expects one a word and cannot run; here every word's states are pooled.

    Parameters
    ----------
    description : DataDescription
        Texts of L token ids.
    dimension : int
        Size of a word vector.
    units : int
        Size of the state in each direction.
    dropout : float
        After the LSTM and again inside the pooling.
    hidden : sequence of int
        Units of the dense ReLU layers.
    vectors : str
        Word vectors to start from (.npy, vocabulary × E).
    frozen : bool
        Whether the word vectors stay as they are.

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
