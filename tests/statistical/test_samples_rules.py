"""The rules for rows: every sample has the same chance, and a part of the axis is drawn as in the whole.

Statistical tests use one fixed seed and fail by chance with probability at most 1e-6 each.
"""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from scipy import stats

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from fedmpi.samples import rules
from fedmpi.samples.rules import BERNOULLI_BLOCK, RATIO_BLOCK, RowRule, used_counts

FALSE_ALARM = 1e-6
UNEVEN = np.array([1, 3, 40, 2, 17, 1, 90, 46], np.int64)


def drawn(name: str, t: int, sizes: np.ndarray, value: float, *part: int) -> np.ndarray:
    """Positions drawn by the built-in sampler with this probability, ratio or sample budget."""
    options = {"ratio": value} if name == "ratio" else {}
    rule = RowRule(resolve("data sampler", name), options, Streams(5), int(value) if name == "exact" else None)
    return rule.positions(t, sizes, value if name == "bernoulli" else 1.0, *part)


RULES = {
    "bernoulli": lambda t, sizes, *part: drawn("bernoulli", t, sizes, 0.17, *part),
    "ratio": lambda t, sizes, *part: drawn("ratio", t, sizes, 0.17, *part),
    "ratio above a half": lambda t, sizes, *part: drawn("ratio", t, sizes, 0.83, *part),
    "exact": lambda t, sizes, *part: drawn("exact", t, sizes, int(0.17 * sizes.sum()), *part),
    "all": lambda t, sizes, *part: drawn("all", t, sizes, 1.0, *part),
}


@pytest.mark.parametrize("rule", list(RULES)[:-1])
def test_every_sample_is_used_equally_often(rule: str):
    """χ² over the samples, two-sided at 1e-6."""
    rounds, n = 800, int(UNEVEN.sum())
    counts = np.zeros(n)
    for t in range(rounds):
        counts[RULES[rule](t, UNEVEN)] += 1
    q = {"ratio above a half": 0.83, "exact": int(0.17 * n) / n}.get(rule, 0.17)
    pooled_mean = stats.norm.isf(FALSE_ALARM / 4) * np.sqrt(q * (1 - q) / (rounds * n))
    assert abs(counts.mean() / rounds - q) <= pooled_mean
    statistic = np.sum((counts - counts.mean()) ** 2) / (rounds * q * (1 - q))
    assert stats.chi2.sf(statistic, n - 1) > FALSE_ALARM / 2
    if rule in ("bernoulli", "exact"):  # the ratio rule makes rows of one client dependent, which narrows the spread
        assert stats.chi2.cdf(statistic, n - 1) > FALSE_ALARM / 2


def test_bernoulli_samples_are_independent():
    """The number of rows is binomial (χ² of its variance) and neighbors come together p² of the time; 1e-6 each."""
    rounds, n, p = 1000, int(UNEVEN.sum()), 0.3
    used = np.zeros((rounds, n), bool)
    for t in range(rounds):
        used[t, drawn("bernoulli", t, UNEVEN, p)] = True
    statistic = (rounds - 1) * used.sum(axis=1).var(ddof=1) / (n * p * (1 - p))
    assert FALSE_ALARM / 2 < stats.chi2.cdf(statistic, rounds - 1) < 1 - FALSE_ALARM / 2
    together = np.count_nonzero(used[:, 0::2] & used[:, 1::2])
    assert stats.binomtest(together, rounds * n // 2, p * p).pvalue > FALSE_ALARM


@pytest.mark.parametrize("rule", RULES)
def test_the_rows_of_a_part_of_many_blocks_are_those_of_the_whole(rule: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rules, "BERNOULLI_BLOCK", 7)
    monkeypatch.setattr(rules, "RATIO_BLOCK", 2)
    sizes = np.array([1, 3, 6, 2, 1, 1, 9, 4], np.int64)
    whole = RULES[rule](2, sizes)
    assert np.array_equal(whole, np.unique(whole)) and set(whole) <= set(range(27))
    for start, stop in combinations_with_replacement(range(28), 2):
        part = RULES[rule](2, sizes, start, stop)
        assert np.array_equal(part, whole[(whole >= start) & (whole < stop)]), (start, stop)


def test_a_fixed_ratio_takes_every_clients_share_rounded_down_or_up():
    counts = used_counts(drawn("ratio", 3, UNEVEN, 0.25), offsets_of(UNEVEN))
    assert np.all(counts >= np.floor(0.25 * UNEVEN))
    assert np.all(counts <= np.ceil(0.25 * UNEVEN))


@pytest.mark.parametrize(
    ("rule", "value", "count"),
    [("exact", 10_000, 200), ("exact", 0, 0), ("bernoulli", 1, 200), ("bernoulli", 0, 0), ("ratio", 1, 200)],
)
def test_extreme_values_use_nothing_or_everything(rule: str, value: float, count: int):
    assert drawn(rule, 0, UNEVEN, value).tolist() == list(range(count))


def test_the_pooled_batch_has_exactly_the_requested_size():
    assert drawn("exact", 0, UNEVEN, 77).size == 77


@pytest.mark.parametrize("rule", ["ratio", "bernoulli"])
def test_every_block_of_the_axis_has_a_separate_stream(rule: str):
    """Two blocks of participants, or of samples, do not use the same places."""
    clients, each = (2 * RATIO_BLOCK, 10) if rule == "ratio" else (BERNOULLI_BLOCK // 8, 16)
    sizes = np.full(clients, each, np.int64)
    rows = drawn(rule, 0, sizes, 0.5)
    half = int(sizes.sum()) // 2
    first, second = rows[rows < half], rows[rows >= half] - half
    assert len(first) > 1000 and len(second) > 1000
    assert not np.array_equal(first, second)
