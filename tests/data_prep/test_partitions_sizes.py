"""Size laws, Astraea's sets, and the whole-number arithmetic under the partitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.partitions.sizes import in_proportion, lognormal_sizes, relative_sizes, whole_sizes
from fedmpi import UserError
from fedmpi.data.assignment import fill_by_mix, level_down
from tests.data_prep.partition_draws import counts_of, draw


def test_lognormal_sizes_follow_the_paper_and_the_published_code() -> None:
    """Means of 200,000 draws at sigma = 1 have a standard error of 0.3 %; tolerances are above five of them."""
    paper = lognormal_sizes(200_000, 50.0, 1.0, "paper", np.random.default_rng(1))
    code = lognormal_sizes(200_000, 2.0, 1.0, "code", np.random.default_rng(1))
    assert paper.min() >= 1 and paper.mean() == pytest.approx(50, rel=0.02)
    assert np.log(paper).std() == pytest.approx(1, rel=0.02)
    draws = np.random.default_rng(1).lognormal(0, 1, 200_000)
    np.testing.assert_array_equal(code, np.ceil(2 * draws / np.ceil(draws).mean()))


def test_pareto_sizes_have_minimum_one_and_their_tail_index() -> None:
    """P(L > l) = l**-1.5 for 100,000 draws, five standard errors at each of three sizes."""
    sizes = relative_sizes("pareto", 100_000, 1.5, np.random.default_rng(1))
    assert sizes.min() >= 1
    for size in (1.5, 3.0, 10.0):
        tail = size**-1.5
        assert (sizes > size).mean() == pytest.approx(tail, abs=5 * np.sqrt(tail * (1 - tail) / 100_000))


@pytest.mark.parametrize(("sigma", "mean"), [(0.5, 2.006), (1.0, 2.1746), (2.0, 2.559)])
def test_the_mean_of_the_lognormal_law_is_before_rounding_and_the_realised_one_is_reported(sigma, mean) -> None:
    """E[max(1, round(2 L / E[L]))] = 1 + sum_j P(2 L / E[L] > j + 1/2); 100,000 clients, five standard errors."""
    made = draw("lognormal", np.zeros(400_000, np.int64), 1, 100_000, mean=2.0, sigma=sigma)
    error = made.sizes.std() / np.sqrt(100_000)
    assert abs(made.sizes.mean() - mean) < 5 * error
    assert made.options["realised_mean"] == pytest.approx(made.sizes.mean(), abs=1e-4)
    assert f"{made.options['realised_mean']:g} samples on average" in made.notes[0]


def test_the_realised_mean_is_that_of_the_sizes_after_scaling() -> None:
    made = draw("lognormal", np.zeros(500, np.int64), 1, 400, mean=10.0)
    assert made.options["realised_mean"] == 1.25 and made.options["mean"] == 10.0


def test_lognormal_sizes_are_scaled_to_the_samples_there_are() -> None:
    made = draw("lognormal", np.zeros(500, np.int64), 1, 400, mean=10.0)
    assert made.sizes.sum() == 500 and made.sizes.min() == 1 and "scaled" in made.notes[1]


@pytest.mark.parametrize("variant", ["BAL1", "BAL2", "INS", "LTRF1", "LTRF2", "NORMAL"])
@pytest.mark.parametrize("classes", [10, 47])
def test_astraea_sets_have_their_sizes_and_class_totals(variant: str, classes: int) -> None:
    labels = np.repeat(np.arange(classes), 400)
    made = draw("astraea", labels, classes, 50, variant=variant)
    counts = counts_of(made, labels, classes)
    totals, sizes = counts.sum(axis=0), made.sizes
    assert made.balanced_test
    if variant.startswith("BAL"):
        assert np.ptp(sizes) <= 1
    else:
        assert sizes.max() > 3 * np.median(sizes)
    if variant in ("BAL1", "BAL2", "INS"):
        assert set(totals) == {400}
    elif variant == "NORMAL":
        assert np.abs(totals - totals[::-1]).max() <= 1  # rounding
        assert totals.argmax() in (classes // 2 - 1, classes // 2)
    else:
        assert (np.diff(totals) <= 0).all() and totals[0] > 2 * totals[-1]
    share = np.abs(counts / sizes[:, None] - totals / totals.sum()).sum(axis=1).mean()
    assert share < 0.25 if variant == "BAL1" else share > 0.25


def test_sizes_beyond_all_numbers_are_refused() -> None:
    for law, shape in (("pareto", 1e-3), ("lognormal", 800.0)):
        with pytest.raises(UserError, match="choose a milder one"), np.errstate(over="ignore"):
            draw("sizes", np.zeros(600, np.int64), 1, 300, law=law, shape=shape)


@pytest.mark.parametrize("law", ["paper", "code"])
@pytest.mark.parametrize("options", [{"sigma": 1000.0}, {"sigma": 1.0, "mean": 1e300}, {"sigma": 1.0, "mean": 1e16}])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_lognormal_sizes_beyond_all_numbers_are_refused(law: str, options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"--mean .* and --sigma .* beyond all numbers"):
        draw("lognormal", np.arange(300) % 3, 3, 20, law=law, **options)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_very_uneven_lognormal_sizes_are_all_drawn() -> None:
    assert draw("lognormal", np.arange(300) % 3, 3, 20, sigma=40.0, mean=3.0).sizes.tolist() == [1] * 20


def test_a_concentration_beyond_all_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="alpha = 1e\\+308 is beyond all numbers with 4 clients"):
        draw("dirichlet", np.arange(300) % 3, 3, 4, alpha=1e308)
    assert np.ptp(draw("dirichlet", np.arange(300) % 3, 3, 4, alpha=1e200).sizes) <= 3


def test_ltrf1_has_table_ones_share_of_ltrf2_or_the_total_asked_for() -> None:
    labels = np.repeat(np.arange(10), 2000)
    small, large = (len(draw("astraea", labels, 10, 50, variant=name).rows) for name in ("LTRF1", "LTRF2"))
    assert small == round(large * 117_500 / 230_752)
    assert len(draw("astraea", labels, 10, 50, variant="LTRF1", total=1000).rows) == 1000
    with pytest.raises(UserError, match="--total"):
        draw("astraea", labels, 10, 50, variant="LTRF1", total=19_999)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(0, 300), st.integers(0, 3))
def test_levelling_takes_from_the_largest_only(values, removed, floor) -> None:
    values = np.array(values)
    removed = min(removed, int(np.maximum(values - floor, 0).sum()))
    taken = level_down(values, removed, floor)
    left = values - taken
    assert taken.sum() == removed and (taken >= 0).all() and (left[taken > 0] >= floor).all()
    if removed:
        assert left[taken > 0].max() <= left[taken > 0].min() + 1 and left.max() <= left[taken > 0].max() + 1


def test_the_sample_that_everyone_gets_is_part_of_a_clients_share() -> None:
    assert whole_sizes(np.array([1.0, 9.0]), 10).tolist() == [1, 9]
    assert whole_sizes(np.array([2.0, 3.0, 15.0]), 20).tolist() == [2, 3, 15]


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50), st.integers(0, 500))
def test_whole_sizes_keep_the_total_and_give_everyone_one(relative, extra) -> None:
    sizes = whole_sizes(np.array(relative), len(relative) + extra)
    assert sizes.sum() == len(relative) + extra and sizes.min() >= 1
    shares = in_proportion(np.array(relative), extra)
    exact = np.array(relative) / sum(relative) * extra
    assert shares.sum() == extra and (np.abs(shares - exact) <= 1 + 1e-9).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32))
def test_filling_by_mix_ends_with_every_request_met_from_stock(clients, classes, seed) -> None:
    generator = np.random.default_rng(seed)
    stock = generator.integers(0, 20, classes)
    sizes = generator.multinomial(int(stock.sum()), np.full(clients, 1 / clients))
    mixes = generator.dirichlet(np.full(classes, 0.01), clients)
    counts = fill_by_mix(sizes, stock, mixes, generator)
    np.testing.assert_array_equal(counts.sum(axis=1), sizes)
    np.testing.assert_array_equal(counts.sum(axis=0), stock)


def test_who_finds_none_of_its_classes_left_takes_from_the_mix_of_the_stock() -> None:
    """1,000 of 9,000 and 1,000 samples: 900 of the first are expected, with a standard deviation of 9.5."""
    stock, mixes = np.array([0, 9000, 1000]), np.array([[1.0, 0.0, 0.0]])
    counts = fill_by_mix(np.array([1000]), stock, mixes, np.random.default_rng(0))
    assert counts.sum() == 1000 and abs(counts[0, 1] - 900) < 60
