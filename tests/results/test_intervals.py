"""What a difference and a ratio of spreads over few seeds rest on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedmpi.results.intervals import paired, spread_ratio, welch


def test_a_paired_interval_is_students_of_the_differences_per_seed() -> None:
    found = paired([5.0, 1.0, 9.0], [4.0, -1.0, 6.0])  # differences 1, 2, 3: s = 1, t(2; 0.975) = 4.3027
    assert found.n == 3 and found.mean == pytest.approx(2)
    assert found.high - found.mean == pytest.approx(found.mean - found.low) == pytest.approx(4.3026527 / 3**0.5)
    assert not found.supported and paired([5.0, 6.0, 7.1], [1.0, 2.0, 3.0]).supported
    assert paired([1.0, 2.0, 3.0], [5.0, 6.0, 7.1]).supported
    assert paired([1, 2, 3], [0, 0, 0], level=0.5).high == pytest.approx(2 + 0.8164966 / 3**0.5)


def test_a_paired_interval_covers_the_true_difference_in_19_of_20_cases() -> None:
    """1,000 sets of four seeds with a common part of the seed: the count is within four standard errors (0.69 %)."""
    generator = np.random.default_rng(0)
    common = generator.normal(0, 5, (1000, 4))
    ours, theirs = common + generator.normal(1.5, 1, common.shape), common + generator.normal(0, 2, common.shape)
    found = [paired(one, other) for one, other in zip(ours, theirs, strict=True)]
    covered = np.mean([one.low <= 1.5 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.0276)


def test_six_times_the_variance_over_five_seeds_is_no_difference_of_spreads() -> None:
    found = spread_ratio([0.0, 2.5, -2.5, 1.25, -1.25], [0.0, 1.0, -1.0, 0.5, -0.5])
    assert found.ratio == pytest.approx(6.25)
    assert found.p == pytest.approx(0.104, abs=0.001)
    swapped = spread_ratio([0.0, 1.0, -1.0, 0.5, -0.5], [0.0, 2.5, -2.5, 1.25, -1.25])
    assert swapped.ratio == pytest.approx(1 / 6.25) and swapped.p == pytest.approx(found.p)


def test_equal_spreads_are_called_unlike_in_one_case_of_20() -> None:
    """1,000 pairs of samples of 5 and of 3: within four standard errors (0.69 %)."""
    values = np.random.default_rng(0).normal(0, 3, (1000, 8))
    alarms = np.mean([spread_ratio(one[:5], one[5:]).p < 0.05 for one in values])
    assert alarms == pytest.approx(0.05, abs=0.0276)


def test_what_a_single_seed_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="1 and 1 seeds"):
        paired([1.0], [1.0])
    with pytest.raises(ValueError, match="3 and 2 seeds"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="two seeds"):
        spread_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no spread"):
        spread_ratio([1.0, 2.0], [2.0, 2.0])


def test_a_difference_known_by_its_spreads_has_welchs_interval() -> None:
    values, reference = [1.0, 2.0, 4.0], [0.0, 0.5, 0.2, 0.7]
    expected = stats.ttest_ind(values, reference, equal_var=False).confidence_interval(0.95)
    sides = [(float(np.mean(side)), float(np.std(side, ddof=1)), len(side)) for side in (values, reference)]
    found = welch(*sides)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high)) and found.n == 3
    with pytest.raises(ValueError, match="two seeds or more"):
        welch((1.0, 0.5, 1), (1.0, 0.5, 3))
