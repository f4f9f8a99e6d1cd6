"""Recurrent models of the next token, one prediction at every position: characters and words.

Of a classification, such as LEAF's Shakespeare (the one character after eighty), the last position predicts the class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.models.text_layers import text_shape, word_vectors

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription


class NextToken(nn.Module):
    """Token vectors, what reads them from left to right, a projection of its states, the logits."""

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
        """From (n, L) token ids to (n, L, C) logits, or (n, C)."""
        states, _ = self.lstm(self.words(tokens))
        logits: Tensor = self.output(self.projection(states if self.everywhere else states[:, -1]))
        return logits


def predicts_everywhere(description: DataDescription, model: str) -> bool:
    """Whether a model of the next token predicts one at every position, or a class from the last."""
    if not description.counted:
        raise UserError(
            f'model.name = "{model}" predicts tokens or classes, but the targets of the data are '
            f"{description.targets}: choose another model"
        )
    return description.targets == "tokens"


@register("model", "char-lstm")
def char_lstm(description: DataDescription, *, dimension: int = 8, units: int = 256, layers: int = 2) -> nn.Module:
    """The character model of McMahan et al. 2017 (§3): vectors of 8 values, two LSTM layers of 256 units.

    As Reddi et al. (2021) publish it (google-research/federated, utils/models/shakespeare_models.py).

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

    The sizes of their code (google-research/federated, utils/models/stackoverflow_models.py). torch's LSTM has two
    biases where theirs has one: 4 x 670 values more than their 4,050,748 with 10,004 token ids.

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
        Whether the word vectors stay as they are.

    Raises
    ------
    UserError
        The data are no texts, or their targets neither tokens nor classes.
    """
    _, vocabulary = text_shape(description, "word-lstm")
    everywhere = predicts_everywhere(description, "word-lstm")
    words, dimension = word_vectors(vocabulary, dimension, vectors, frozen)
    return NextToken(words, dimension, units, layers, projection, description.classes, everywhere)
