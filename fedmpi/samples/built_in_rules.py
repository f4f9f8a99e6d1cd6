"""Built-in data samplers: Bernoulli(p) per sample, a fixed ratio, or exactly K of all samples of a round.

The samples of a cohort form one axis, client after client in index order; rules return sorted positions on it. Streams
belong to fixed blocks of that axis, so that drawing a part gives the same samples as drawing the whole.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedmpi.common.apportionment import offsets_of, united
from fedmpi.common.decorators import data_sampler
from fedmpi.common.types import Ints
from fedmpi.samples.row_rule import Pool

BERNOULLI_BLOCK = 2**16
RATIO_BLOCK = 2**10


@data_sampler(name="all", pooled=True, probability="all")
def all_rows(pool: Pool) -> Ints:
    """Use all samples of every selected client."""
    return np.arange(pool.start, pool.stop)


@data_sampler(name="bernoulli", pooled=True, probability="estimate")
def bernoulli(pool: Pool) -> Ints:
    """Draw each sample with the same probability K/Ñ (FedSampling, Algorithm 1, z_i ~ Bernoulli(K/Ñ)).

    The gaps between drawn positions are geometric, drawn block by block from the stream (SAMPLES, round, block):
    samples that are not drawn cost nothing.
    """
    if pool.start == pool.stop or pool.probability == 0:
        return np.zeros(0, np.int64)
    if pool.probability == 1:
        return np.arange(pool.start, pool.stop)
    total, drawn = int(pool.sizes.sum()), []
    for block in range(pool.start // BERNOULLI_BLOCK, (pool.stop - 1) // BERNOULLI_BLOCK + 1):
        begin = block * BERNOULLI_BLOCK
        length = min(BERNOULLI_BLOCK, total - begin)
        drawn.append(begin + _kept(pool.generator(block), pool.probability, length))
    return pool.restrict(np.concatenate(drawn))


@data_sampler(name="ratio", pooled=True, probability="ratio")
def ratio(pool: Pool, *, ratio: Annotated[float, Field(gt=0, le=1)]) -> Ints:
    """Draw a fixed share of every selected client's samples (FedSampling §3.3, the naive method).

    A client of n samples uses r·n distinct ones, chosen uniformly; r·n is rounded down or up at random so that its mean
    is exact. Hence every sample is used with probability exactly r, and a client with r·n < 1 sometimes uses none.
    Streams are (SAMPLES, round, b) for the b-th 1024 selected clients.

    Parameters
    ----------
    ratio : float
        r, the share.
    """
    if pool.start == pool.stop:
        return np.zeros(0, np.int64)
    offsets, drawn = offsets_of(pool.sizes), []
    first, last = np.searchsorted(offsets, [pool.start, pool.stop - 1], side="right") - 1
    for block in range(first // RATIO_BLOCK, last // RATIO_BLOCK + 1):
        members = slice(block * RATIO_BLOCK, (block + 1) * RATIO_BLOCK)
        generator = pool.generator(block)
        counts = _round_at_random(generator, pool.sizes[members], ratio)
        drawn.append(offsets[members.start] + _distinct(generator, pool.sizes[members], counts))
    return pool.restrict(np.concatenate(drawn))


@data_sampler(name="exact", pooled=True, probability="cohort")
def exact(pool: Pool) -> Ints:
    """Draw exactly K distinct samples, uniformly from the pool: the batch of centralized training."""
    assert pool.wanted is not None
    total = int(pool.sizes.sum())
    return pool.restrict(_distinct(pool.generator(0), np.array([total]), np.array([min(pool.wanted, total)])))


def used_counts(positions: Ints, offsets: Ints) -> Ints:
    """Count the used samples of each client, int64 (m,): sorted `positions` between successive `offsets`."""
    counts: Ints = np.diff(np.searchsorted(positions, offsets))
    return counts


def holders(positions: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Return the clients with any of the sorted `positions`, at the cost of the positions, not of the clients."""
    places = np.searchsorted(offsets, positions, side="right") - 1
    starts = np.flatnonzero(np.diff(places, prepend=-1))
    return places[starts], np.diff(starts, append=len(places))


def _kept(generator: np.random.Generator, probability: float, length: int) -> Ints:
    """Draw sorted positions of 0 … length − 1, each independently."""
    expected = probability * length
    draws = int(expected + 4 * np.sqrt(expected)) + 8
    parts, last = [], -1
    while last < length:
        gaps = np.minimum(generator.geometric(probability, draws), length + 1)
        parts.append(last + np.cumsum(gaps))
        last = int(parts[-1][-1])
    kept = np.concatenate(parts)
    return kept[: np.searchsorted(kept, length)]


def _distinct(generator: np.random.Generator, sizes: Ints, counts: Ints) -> Ints:
    """Draw simple random samples without replacement for many clients, as sorted positions on their common axis.

    Draws with replacement, drops repeats and tops up: by symmetry every set of the right size is equally likely. If
    more than half is requested, the complement is drawn instead, so the cost stays proportional to the result.
    """
    offsets = offsets_of(sizes)
    inverted = 2 * counts > sizes
    targets = np.where(inverted, sizes - counts, counts)
    drawn = np.zeros(0, np.int64)
    missing = targets
    while missing.any():
        local = generator.integers(0, np.repeat(sizes, missing))
        drawn = united(drawn, np.repeat(offsets[:-1], missing) + local)
        missing = targets - used_counts(drawn, offsets)
    if not inverted.any():
        return drawn
    candidates = _ranges(offsets[:-1][inverted], sizes[inverted])
    from_inverted = inverted[np.searchsorted(offsets, drawn, side="right") - 1]
    kept = np.setdiff1d(candidates, drawn[from_inverted], assume_unique=True)
    return np.sort(np.concatenate([drawn[~from_inverted], kept]))


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenate start, start + 1, …, start + length − 1 of every pair."""
    return np.arange(lengths.sum()) + np.repeat(starts - offsets_of(lengths)[:-1], lengths)


def _round_at_random(generator: np.random.Generator, sizes: Ints, ratio: float) -> Ints:
    """Round ratio · sizes down or up, each with the probability that keeps its mean."""
    wanted = ratio * sizes
    counts: Ints = np.floor(wanted).astype(np.int64)
    counts += generator.random(sizes.size) < wanted - counts
    return counts
