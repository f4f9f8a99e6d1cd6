"""Ownership: contiguous, complete, balanced ranges of clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.data.assignment import ownership

sizes_of = st.lists(st.integers(0, 50), min_size=1, max_size=60).map(lambda sizes: np.array(sizes, np.int64))


def borders(sizes: np.ndarray, shards: int) -> np.ndarray:
    return np.unique(np.linspace(0, len(sizes), min(shards, len(sizes)) + 1).astype(np.int64))


@settings(deadline=None)
@given(sizes_of, st.integers(1, 30), st.integers(1, 60))
def test_ranges_are_contiguous_whole_shards_if_possible_and_nearly_equal(sizes, shards, workers) -> None:
    starts = borders(sizes, shards)
    owned = ownership(sizes, starts, workers)
    assert owned.shape == (workers + 1,) and owned[0] == 0 and owned[-1] == len(sizes)
    units = starts if len(starts) > workers else np.arange(len(sizes) + 1)
    busy = min(workers, len(units) - 1)
    assert (np.diff(owned) >= 0).all() and np.isin(owned, units).all() and np.count_nonzero(np.diff(owned)) == busy
    before = np.concatenate(([0], np.cumsum(sizes)))
    assert np.diff(before[owned]).max() <= before[-1] / busy + np.diff(before[units]).max()
    before, place = before[units], np.searchsorted(units, owned[: busy + 1])
    for worker in range(1, busy):  # a border is the nearest to an equal division
        allowed = np.arange(place[worker - 1] + 1, len(units) - (busy - worker))
        distance = np.abs(before[allowed] - before[-1] * worker / busy)
        assert abs(before[place[worker]] - before[-1] * worker / busy) == pytest.approx(distance.min(), abs=1e-9)
