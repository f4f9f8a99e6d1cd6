"""Word vectors and convolutions with max over time of many clients side by side, on (k, b, length, dimension).

A client's copy of the word vectors holds only the words that occur in its texts: every other row stays as the server
sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmpi.models.stacked.base import Op, Place, Slot
from fedmpi.models.stacked.dense import cut_negative
from fedmpi.models.stacked.peaks import Peaks

BLOCK = 256
"""Words whose changes are summed at a time."""


class Tables:
    """The word vectors of the clients of one chunk, one client's words after another's."""

    def __init__(self, texts: Sequence[Tensor], table: Tensor):
        words, self.ids, self.bounds = [], [], [0]
        for text in texts:
            present, local = torch.unique(text, return_inverse=True)
            words.append(present)
            self.ids.append(local + self.bounds[-1])
            self.bounds.append(self.bounds[-1] + len(present))
        self.rows = torch.cat(words).long()
        self.start = table.index_select(0, self.rows)
        self.values = self.start.clone()
        self._gradient: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        """Zeros when it is first asked for: plain SGD never asks."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.start)
        return self._gradient

    def add_changes(self, coefficients: Tensor, total: Tensor) -> Tensor:
        """total += Σ coefficient · (value − start), some words after others so that their changes stay in the cache.

        Parameters
        ----------
        coefficients : Tensor (K,)
        total : Tensor (V, E)

        Returns
        -------
        Tensor ()
            The squared length of what was added.
        """
        length = total.new_zeros(())
        block = BLOCK if total.device.type == "cpu" else len(self.rows)
        scratch = total.new_empty(min(block, len(self.rows)), total.shape[1])
        for client, coefficient in enumerate(coefficients):
            own = slice(self.bounds[client], self.bounds[client + 1])
            parts = (torch.split(whole[own], block) for whole in (self.rows, self.values, self.start))
            for rows, values, start in zip(*parts, strict=True):
                change = torch.sub(values, start, out=scratch[: len(rows)]).mul_(coefficient)
                total.index_add_(0, rows, change)
                length += change.flatten().dot(change.flatten())
        return length


@dataclass(frozen=True)
class Embedding:
    """Looks up the words of a text: nn.Embedding (with a slot) or constant vectors."""

    length: int  # L and E
    dimension: int
    weight: Slot | None  # Of the table in the flat vector; None = the vectors never change
    vectors: Tensor | None = None  # (V, E): The constant vectors
    padding: int | None = None  # The word whose vector is never trained (padding_idx of nn.Embedding)

    @property
    def trained(self) -> bool:
        return self.weight is not None

    @property
    def values(self) -> int:
        return 2 * self.length * self.dimension

    def bind(self, place: Place, x: Tensor) -> EmbeddingOp:
        return EmbeddingOp(self, place, x)


class EmbeddingOp:
    """The look-up bound to k clients; `table` is set when a chunk begins, its gradient goes to `target`; `words` are
    the words of its rows."""

    def __init__(self, layer: Embedding, place: Place, x: Tensor):
        self.ids = x.view(-1)
        self.step = place.parameters.step
        self.trained, self.padding = layer.trained, layer.padding
        self.words: Tensor | None = None
        self.output = place.take("output", place.clients, place.rows, layer.length, layer.dimension)
        self._rows = self.output.view(-1, layer.dimension)
        self.table = self.target = layer.vectors if layer.vectors is not None else self._rows

    def forward(self) -> None:
        torch.index_select(self.table, 0, self.ids, out=self._rows)

    def backward(self, gradient: Tensor) -> Tensor:
        if self.trained:
            if self.step.keep != 1:
                self.target.mul_(self.step.keep)
            if self.padding is not None and self.words is not None:
                gradient.view(self._rows.shape)[self.words[self.ids] == self.padding] = 0
            self.target.index_add_(0, self.ids, gradient.view(self._rows.shape), alpha=self.step.rate)
        return gradient


@dataclass(frozen=True)
class StackedMaxOverTime:
    """Filters of several widths over the words, the maximum over the positions, ReLU; the result lies as rows."""

    trained: ClassVar[bool] = True

    length: int  # L, E, F
    dimension: int
    filters: int
    widths: tuple[int, ...]
    weights: tuple[Slot, ...]  # One a width; the weights' axes are (filter, word, dimension)
    biases: tuple[Slot, ...]

    @property
    def values(self) -> int:
        windows = sum((self.length - width + 1) * (width * self.dimension + self.filters) for width in self.widths)
        windows += self.length * (self.dimension + self.filters * sum(self.widths))
        return windows + 4 * self.filters * len(self.widths)

    def bind(self, place: Place, x: Tensor) -> Op:
        return _MaxOverTimeOp(self, place, x)


class _MaxOverTimeOp:
    def __init__(self, layer: StackedMaxOverTime, place: Place, x: Tensor):
        self.output = place.take("output", place.clients, place.rows, layer.filters * len(layer.widths))
        self.word_gradient = place.take("gradient", *x.shape)
        self.banks = [_Bank(layer, number, place, x, self) for number in range(len(layer.widths))]

    def forward(self) -> None:
        for bank in self.banks:
            bank.forward()
        self.output.relu_()

    def backward(self, gradient: Tensor) -> Tensor:
        cut_negative(gradient, self.output)
        for number, bank in enumerate(self.banks):
            bank.backward(gradient, add=number > 0)
        return self.word_gradient


class _Bank:
    """The filters of one width."""

    def __init__(self, layer: StackedMaxOverTime, number: int, place: Place, x: Tensor, parent: _MaxOverTimeOp):
        width, filters, dimension = layer.widths[number], layer.filters, layer.dimension
        clients, rows, positions = place.clients, place.rows, layer.length - width + 1
        parameters, shape = place.parameters, (filters, width * dimension)
        self.step, self.first = parameters.step, place.first
        self.part = slice(number * filters, (number + 1) * filters)
        self.weight = parameters.value(layer.weights[number], *shape)
        self.target = parameters.target(layer.weights[number], *shape)
        self.transposed = self.weight.transpose(1, 2)
        self.bias = parameters.value(layer.biases[number], 1, filters)
        self.bias_target = parameters.target(layer.biases[number], 1, filters)
        text = layer.length * dimension
        self.windows = x.as_strided(
            (clients, rows, positions, width * dimension), (rows * text, text, dimension, 1), x.storage_offset()
        )
        self.patches = place.take(f"patches{number}", clients, rows, positions, width * dimension)
        self.patch_matrix = self.patches.view(clients, rows * positions, width * dimension)
        self.patch_rows = self.patches.view(-1, width * dimension)
        self.scores = place.take(f"scores{number}", clients, rows, positions, filters)
        self.score_matrix = self.scores.view(clients, rows * positions, filters)
        self.maxima = place.take(f"maxima{number}", clients, rows, filters)
        self.where = place.take(f"where{number}", clients, rows, filters, dtype=torch.int64)
        self.output = parent.output[..., self.part]
        self.peaks = Peaks(clients, rows, layer.length, width, filters, place.workspace.device)
        self.scratch, self.word_gradient = place.scratch, parent.word_gradient

    def forward(self) -> None:
        self.patches.copy_(self.windows)
        torch.bmm(self.patch_matrix, self.transposed, out=self.score_matrix)
        torch.max(self.scores, 2, out=(self.maxima, self.where))
        torch.add(self.maxima, self.bias, out=self.output)

    def backward(self, gradient: Tensor, add: bool) -> None:
        """The gradient of the words is added to what is there, or replaces it."""
        gradient = gradient[..., self.part]
        if not self.first:
            self.peaks.of_words(self.where, gradient, self.weight, self.word_gradient, self.scratch, add)
        self.step.plain(self.target, self.peaks.of_filters(self.patch_rows, self.where, gradient))
        self.step.plain(self.bias_target, gradient.sum(1, keepdim=True))
