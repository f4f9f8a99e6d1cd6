"""Intervals of differences over few seeds, alone and in a table."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedmpi.results.comparison import corrected, paired


def test_a_paired_interval_is_students_of_the_differences_per_seed() -> None:
    found = paired([5.0, 1.0, 9.0], [4.0, -1.0, 6.0])  # differences 1, 2, 3: s = 1, t(2; 0.975) = 4.3027
    assert found.n == 3 and found.mean == pytest.approx(2)
    assert found.high - found.mean == pytest.approx(found.mean - found.low) == pytest.approx(4.3026527 / 3**0.5)
    assert not found.significant and paired([5.0, 6.0, 7.1], [1.0, 2.0, 3.0]).significant
    assert paired([1.0, 2.0, 3.0], [5.0, 6.0, 7.1]).significant
    assert paired([1, 2, 3], [0, 0, 0], level=0.5).high == pytest.approx(2 + 0.8164966 / 3**0.5)


def test_corrected_intervals_exclude_zero_where_benjamini_and_hochberg_reject() -> None:
    """500 tables of 1 to 20 differences, half of them real, against SciPy and a plain recomputation of the level."""
    generator = np.random.default_rng(1)
    counts = set()
    for m in generator.integers(1, 21, 500):
        shifts, n = generator.choice([0.0, 3.0], m), int(generator.integers(3, 8))
        tables = generator.normal(shifts[:, None], 1, (m, n))
        ours = corrected([paired(row, np.zeros(n)) for row in tables])
        rejected = stats.false_discovery_control(stats.ttest_1samp(tables, 0, axis=1).pvalue) <= 0.05
        assert [one.significant for one in ours] == rejected.tolist()
        level = 1 - max(int(rejected.sum()), 1) * 0.05 / m
        expected = stats.ttest_1samp(tables, 0, axis=1).confidence_interval(level)
        assert [one.low for one in ours] == pytest.approx(expected.low.tolist())
        assert [one.high for one in ours] == pytest.approx(expected.high.tolist())
        counts.add((m > 1, bool(rejected.any()), bool(rejected.all())))
    assert len(counts) == 5, "no, some and all rejected of several; none and all of one"


def test_what_a_single_seed_cannot_say_is_rejected() -> None:
    with pytest.raises(ValueError, match="1 and 1 seeds"):
        paired([1.0], [1.0])
    with pytest.raises(ValueError, match="3 and 2 seeds"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])
