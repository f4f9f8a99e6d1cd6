"""Rebalancing by augmentation: how many warped copies every sample of a scarce class gets.

Duan et al. 2019 (Astraea), Algorithm 2. Pure functions: class counts in, copies out. The copies themselves are made by
`fedmpi.data.copies.warps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints

ORIGINAL_COUNTS = "original_class_counts"
"""Array beside augmented shards: int (N, C), the clients' class counts without the copies."""

MOST_ALPHA = 2.0
"""The largest α that the paper tries (section IV-B). C_y (C̄/C_y)² <= C̄², so n samples get at most n²/C copies, which
counts of 64 bits hold for any n below 4 · 10⁹; at α = 12 a class 100 times scarcer than the mean would overflow."""
MOST_COPIES = 1 << 32
"""Largest number of copies: the list of the rows that they are made of would take 32 GiB."""

_CLIENTS_AT_ONCE = 1 << 14  # bounds the memory of the random numbers of a large population


def copies_per_sample(totals: Ints, alpha: float, reading: str = "ratio") -> Floats:
    """Expected number of augmented copies of one sample of every class (Algorithm 2, lines 2-5 and 11).

    The paper's text hands `Augment` the number (C̄/C_y)^α and adds what it generates to the original data: reading
    "ratio", under which even α = 0 doubles the scarce classes and α = 1 takes class y from C_y to C_y + C̄, beyond the
    mean. Under "ratio-minus-one" the original is one of the (C̄/C_y)^α images: α = 0 adds nothing and α = 1 takes the
    class to C̄ exactly, which fits the paper's advice to choose α in [0, 1] so that the imbalance is mitigated.

    Parameters
    ----------
    totals : int64 (C,)
        C_y, the samples of every class held by all clients together.
    alpha : float
        α in [0, 2].
    reading : {"ratio", "ratio-minus-one"}
        Number of copies: the ratio, or the ratio minus one.

    Returns
    -------
    float64 (C,)
        0 for classes with C_y >= C̄, and for missing classes (C_y = 0), of which there is no sample to copy. C̄ is the
        mean over all C classes of the label space, the missing ones too, as line 2 has it.

    Raises
    ------
    ValueError
        If α is outside [0, 2], or the reading is unknown.
    """
    if not 0 <= alpha <= MOST_ALPHA:
        raise ValueError(f"alpha must be a number from 0 to {MOST_ALPHA:g}, not {alpha}")
    if reading not in ("ratio", "ratio-minus-one"):
        raise ValueError(f"copies must be ratio or ratio-minus-one, not {reading}")
    totals = np.asarray(totals, np.float64)
    scarce = (totals > 0) & (totals < totals.mean())
    ratio = np.where(scarce, totals.mean() / np.where(scarce, totals, 1.0), 1.0) ** alpha
    return np.where(scarce, ratio - (reading == "ratio-minus-one"), 0.0)


@dataclass(frozen=True)
class Rebalancing:
    """The augmentation of a whole population."""

    copies: Floats  # (C,): Expected copies of one sample of every class
    class_counts: Ints  # (N, C): Samples of every client and class, copies included
    original_counts: Ints  # (N, C): The same without the copies

    @cached_property
    def sizes(self) -> Ints:
        """n_k with the copies, int64 (N,)."""
        sizes: Ints = self.class_counts.sum(axis=1)
        return sizes

    @cached_property
    def original_sizes(self) -> Ints:
        """n_k without the copies, int64 (N,): rows n_k and above of a client are copies."""
        sizes: Ints = self.original_counts.sum(axis=1)
        return sizes

    @property
    def added(self) -> Ints:
        """Copies of every client, int64 (N,)."""
        return self.sizes - self.original_sizes

    @property
    def overhead(self) -> float:
        """Copies as a share of the original samples: the storage overhead of the paper's Fig 9 when they are stored."""
        return float(self.added.sum() / self.original_sizes.sum())


def rebalance(class_counts: Ints, alpha: float, reading: str, streams: Streams) -> Rebalancing:
    """Augment every client's classes that are scarce in the whole population (Algorithm 2).

    `class_counts` (N, C) is what every client sends to the server at the start (step 1 of the paper's workflow). The
    copies of each sample are the whole part of `copies_per_sample`, plus one with the probability of its fractional
    part, drawn sample by sample from the stream (AUGMENT_COPIES, 0, client), as in `copies_of`. More than `MOST_COPIES`
    are rejected.
    """
    totals = class_counts.sum(axis=0)
    copies = copies_per_sample(totals, alpha, reading)
    expected = float(totals @ copies)
    if expected > MOST_COPIES:
        rarest = int(copies.argmax())
        raise UserError(
            f"rebalance.alpha = {alpha:g} asks for {expected:.3g} copies ({copies[rarest]:.3g} of each sample of class "
            f"{rarest}), more than the {MOST_COPIES:,} that can be handled: choose a smaller one, 0 to 1 by the paper"
        )
    augmented = class_counts + class_counts * np.floor(copies).astype(np.int64)
    drawn = np.flatnonzero(copies % 1)
    for start in range(0, len(class_counts) if len(drawn) else 0, _CLIENTS_AT_ONCE):
        block = class_counts[start : start + _CLIENTS_AT_ONCE, drawn]
        draws = [_uniforms(streams, start + client, int(count)) for client, count in enumerate(block.sum(axis=1))]
        extra = np.concatenate(draws) < np.repeat(np.tile(copies[drawn] % 1, len(block)), block.ravel())
        ends = np.cumsum(np.concatenate(([0], extra)))[np.concatenate(([0], np.cumsum(block.ravel())))]
        augmented[start : start + _CLIENTS_AT_ONCE, drawn] += np.diff(ends).reshape(block.shape)
    return Rebalancing(copies, augmented, class_counts)


def copies_of(labels: NDArray[np.integer], copies: Floats, streams: Streams, client: int) -> Ints:
    """Numbers of copies of each sample of one client."""
    numbers: Ints = np.floor(copies).astype(np.int64)[labels]
    by_class = np.argsort(labels, kind="stable")
    drawn = by_class[(copies % 1 > 0)[labels[by_class]]]
    numbers[drawn] += _uniforms(streams, client, len(drawn)) < copies[labels[drawn]] % 1
    return numbers


def source_rows(labels: NDArray[np.integer], copies: Floats, streams: Streams, client: int) -> Ints:
    """The stored row that each augmented row of one client is a copy of."""
    return np.repeat(np.arange(len(labels)), copies_of(labels, copies, streams, client))


def _uniforms(streams: Streams, client: int, count: int) -> Floats:
    if count == 0:
        return np.empty(0)
    return streams.generator(Purpose.AUGMENT_COPIES, 0, client).random(count)
