"""Streams depend on seed, purpose, round and client, and on nothing else."""

import numpy as np
import pytest

from fedmpi.common.streams import Purpose, Streams


def test_the_same_key_gives_the_same_numbers():
    first = Streams(5).generator(Purpose.SAMPLES, 3, 8).random(100)
    assert np.array_equal(first, Streams(5).generator(Purpose.SAMPLES, 3, 8).random(100))


@pytest.mark.parametrize(
    "other",
    [(6, Purpose.SAMPLES, 3, 8), (5, Purpose.COHORT, 3, 8), (5, Purpose.SAMPLES, 4, 8), (5, Purpose.SAMPLES, 3, 9)],
)
def test_any_other_key_gives_other_numbers(other: tuple[int, Purpose, int, int]):
    seed, purpose, round, client = other
    first = Streams(5).generator(Purpose.SAMPLES, 3, 8).random(100)
    assert not np.intersect1d(first, Streams(seed).generator(purpose, round, client).random(100)).size


def test_drawing_from_one_stream_leaves_the_others_alone():
    streams = Streams(1)
    alone = streams.generator(Purpose.BATCH_ORDER, 0, 1).permutation(50)
    streams.generator(Purpose.BATCH_ORDER, 0, 0).random(10_000)
    assert np.array_equal(alone, streams.generator(Purpose.BATCH_ORDER, 0, 1).permutation(50))


def test_clients_of_one_round_are_uncorrelated():
    """Mean correlation of 400 pairs of streams of 1,000 uniforms: |z| < 4, false alarm 6e-5."""
    draws = np.stack([Streams(9).generator(Purpose.COHORT, 0, k).random(1000) for k in range(401)])
    z = (draws - 0.5) * np.sqrt(12)
    correlations = (z[:-1] * z[1:]).mean(1)
    assert abs(correlations.mean() * np.sqrt(400 * 1000)) < 4


def test_a_negative_seed_is_rejected():
    with pytest.raises(ValueError, match="seed"):
        Streams(-1)
