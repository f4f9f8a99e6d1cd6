"""A linear model of which words a text has and how often, as Reddi et al. 2021 predict the tags of Stack Overflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedmpi.common.registry import register
from fedmpi.models.text_layers import text_shape

if TYPE_CHECKING:
    from fedmpi.data.schema import DataDescription

FIRST_WORD = 2
"""Ids below are padding, 0, and any unknown word, 1."""


class BagOfWords(nn.Module):
    """W f + b of the frequencies f (V,) of the known words among all words of a text."""

    def __init__(self, words: int, classes: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, classes))
        self.bias = nn.Parameter(torch.zeros(classes))
        nn.init.xavier_normal_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """From (n, L) token ids to (n, C) logits; a text without words has the logits b."""
        words, known = (tokens > 0).sum(1, keepdim=True).clamp(min=1), tokens >= FIRST_WORD
        share = known.to(self.weight.dtype) / words
        rows = nn.functional.embedding((tokens - FIRST_WORD).clamp(min=0), self.weight)
        logits: Tensor = (share[:, None] @ rows)[:, 0] + self.bias
        return logits


@register("model", "bag-of-words")
def bag_of_words(description: DataDescription) -> nn.Module:
    """The logistic regression of Reddi et al. 2021 (google-research/federated, stackoverflow_lr_models.py).

    Their inputs are the words' shares of a text, which here are counted from its token ids; W starts from Glorot's
    normal law, b from 0. With `task.kind = "multilabel"` each of the C labels is a regression of its own.

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
