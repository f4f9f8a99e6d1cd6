"""Every partition scheme: no row twice, totals kept, no client empty, its definition in numbers, and its rejections."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.partitions import Partition
from data_prep.partitions.sizes import in_proportion, lognormal_sizes, relative_sizes, whole_sizes
from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.data.assignment import fill_by_mix, fill_empty, level_down, systematic_counts
from tests.data_prep.command import drawn


def draw(name: str, labels: np.ndarray, classes: int, clients: int | None, seed: int = 0, **options: Any) -> Partition:
    """Draw a partition of rows of which every user holds three."""
    users = np.arange(len(labels)) * 7919 % max(1, len(labels) // 3)
    return drawn(name, labels, classes, clients, Streams(seed).generator(Purpose.PARTITION), users, **options)


def counts_of(made: Partition, labels: np.ndarray, classes: int) -> np.ndarray:
    owner = np.repeat(np.arange(made.clients), made.sizes)
    return np.bincount(owner * classes + labels[made.rows], minlength=made.clients * classes).reshape(-1, classes)


SCHEMES = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.05}),
    ("dirichlet", {"alpha": 0.001}),
    ("dirichlet", {"alpha": 10.0, "redraws": 0}),
    ("dirichlet", {"alpha": 0.05, "by": "client"}),
    *(("sizes", {"law": law}) for law in ("even", "linear", "square", "exponential")),
    ("sizes", {"law": "pareto", "shape": 0.5}),
    ("sizes", {"law": "zipf", "shape": 2.0}),
    ("sizes", {"law": "lognormal", "shape": 3.0}),
    ("shards", {"classes_per_client": 1}),
    ("shards", {"classes_per_client": 2, "surplus": "keep"}),
    ("pathological", {"classes_per_client": 2}),
    ("lognormal", {"mean": 1.5, "sigma": 2.0}),
    ("lognormal", {"mean": 30.0, "law": "code"}),
    ("label-sorted", {"size": 4}),
    ("user", {}),
    *(("astraea", {"variant": variant}) for variant in ("BAL1", "BAL2", "INS", "LTRF1", "LTRF2", "NORMAL")),
]
labeled = st.tuples(st.integers(1, 6), st.integers(1, 120), st.integers(0, 2**32)).map(
    lambda case: (case[0], np.random.default_rng(case[2]).integers(0, case[0], case[1]))
)


@pytest.mark.parametrize(("name", "options"), SCHEMES)
@settings(deadline=None, max_examples=20)
@given(labeled, st.integers(1, 140), st.integers(0, 2**63))
def test_no_row_is_in_two_clients_and_none_is_empty_or_the_reason_is_reported(
    name, options, case, clients, seed
) -> None:
    """Some schemes use every row; these reject a request only if there are more clients than rows."""
    uses_all = name in ("iid", "dirichlet", "sizes")
    classes, labels = case
    try:
        made = draw(name, labels, classes, clients, seed, **options)
    except UserError as error:
        assert "client" in str(error) or "class" in str(error)
        assert clients > len(labels) or not uses_all
        return
    assert made.clients == clients and made.sizes.min() >= 1 and made.offsets[0] == 0
    assert made.offsets[-1] == len(made.rows) == len(np.unique(made.rows)) and (clients <= len(labels))
    assert made.rows.min() >= 0 and made.rows.max() < len(labels)
    assert len(made.rows) == len(labels) or not uses_all


@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_the_same_seed_draws_the_same_partition_and_another_seed_another(name, options) -> None:
    labels = np.arange(600) % 10
    first, again, other = (draw(name, labels, 10, 20, seed, **options) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.rows, other.rows)


def test_every_client_of_dirichlet_by_class_expects_the_same_samples_whatever_its_index() -> None:
    """100 classes of 500, 100 clients: 500 samples are right for each.

    A count's variance is at most that of its share, 500^2 p (1 - p) / (100 a + 1) with p = 0.01, plus 1/4 of the
    rounding; z = 6 for all clients keeps the false-alarm rate below 2e-7.
    """
    labels, alpha, seeds = np.repeat(np.arange(100), 500), 100.0, 20
    means = np.mean([draw("dirichlet", labels, 100, 100, seed, alpha=alpha).sizes for seed in range(seeds)], axis=0)
    deviation = np.sqrt(100 * (500**2 * 0.01 * 0.99 / (100 * alpha + 1) + 0.25) / seeds)  # 1.6 samples
    assert np.abs(means - 500).max() < 6 * deviation
    assert abs(means[:50].mean() - means[50:].mean()) < 5 * deviation * np.sqrt(2 / 50)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(any), st.integers(0, 400), st.integers(0, 2**32))
def test_rounding_a_share_misses_it_by_less_than_one_sample(shares, total, seed) -> None:
    counts = systematic_counts(np.array(shares), total, np.random.default_rng(seed))
    exact = np.array(shares) / sum(shares) * total
    assert counts.sum() == total and (counts >= 0).all() and (np.abs(counts - exact) < 1 + 1e-9).all()


def test_who_gives_to_an_empty_client_and_who_gets_an_odd_sample_do_not_depend_on_the_index() -> None:
    """Over 200 draws each of 20 like clients gives, or gets, with probability 1/4: z = 5 a client, 2e-5 in all."""
    given, gained = np.zeros(20), np.zeros(20)
    for seed in range(200):
        owner = np.repeat(np.arange(25, dtype=np.int32), [8] * 20 + [0] * 5)
        fill_empty(owner, 25, np.random.default_rng(seed))
        given += 8 - np.bincount(owner)[:20]
        made = draw("shards", np.zeros(105, np.int64), 1, 20, seed, classes_per_client=1, surplus="keep")
        gained += made.sizes - 5
    assert given.sum() == gained.sum() == 200 * 5
    margin = 5 * np.sqrt(200 / 4 * 3 / 4)
    assert np.abs(given - 50).max() < margin and np.abs(gained - 50).max() < margin


def test_small_alpha_leaves_clients_empty_only_when_asked() -> None:
    labels = np.arange(2000) % 10
    filled = draw("dirichlet", labels, 10, 100, alpha=0.01)
    kept = draw("dirichlet", labels, 10, 100, alpha=0.01, empty="keep")
    assert filled.sizes.min() == 1 and "drew no sample" in filled.notes[0]
    assert kept.sizes.min() == 0 and kept.sizes.sum() == 2000


@pytest.mark.parametrize("per_client", [1, 2, 3, 10])
def test_shards_give_every_client_exactly_so_many_classes_in_equal_numbers(per_client: int) -> None:
    labels = np.repeat(np.arange(10), np.arange(500, 700, 20))
    made = draw("shards", labels, 10, 100, classes_per_client=per_client)
    counts = counts_of(made, labels, 10)
    assert ((counts > 0).sum(axis=1) == per_client).all()
    assert set(counts[counts > 0]) == {made.sizes[0] // per_client} and np.ptp(made.sizes) == 0
    assert len(made.rows) > 0.8 * len(labels)


def test_label_sorted_clients_are_blocks_of_the_sorted_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 100))
    made = draw("label-sorted", labels, 4, None, size=30)
    assert made.clients == 13 and set(made.sizes) == {30}
    assert (np.diff(labels[made.rows]) >= 0).all()
    assert draw("label-sorted", labels, 4, 5, size=30).clients == 5


def test_users_are_clients_and_small_ones_can_be_left_out() -> None:
    users = np.array([4, 4, 1, 0, 1, 4])
    made = drawn("user", np.zeros(6, np.int64), 1, None, Streams(0).generator(Purpose.PARTITION), users)
    assert made.users is not None and made.users.tolist() == [0, 1, 4] and made.sizes.tolist() == [1, 2, 3]
    assert all((users[made.rows[a:b]] == user).all() for user, a, b in zip(made.users, made.offsets, made.offsets[1:]))  # noqa: B905
    generator = Streams(0).generator(Purpose.PARTITION)
    large = drawn("user", np.zeros(6, np.int64), 1, None, generator, users, min_samples=2)
    assert large.users is not None and large.users.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("name", "clients", "options", "words"),
    [
        ("dirichlet", 3, {"alpha": float("nan")}, "--alpha"),
        ("shards", 3, {"classes_per_client": 11}, "10 classes"),
        ("label-sorted", None, {"size": 1000}, "Lower --size"),
        ("label-sorted", 12, {"size": 9}, "make only 11 clients of 9"),
        ("sizes", 3, {"mean": 99.0}, "--mean"),
        ("lognormal", 20, {"sigma": 1000.0}, "--mean .* and --sigma .* overflow"),
        ("sizes", 60, {"law": "pareto", "shape": 1e-3}, "Choose a milder one"),
        ("user", 400, {}, "--min-samples"),
        ("pathological", 3, {"classes_per_client": 11}, "10 classes"),
        ("pathological", 60, {"classes_per_client": 9}, "drew class .* which has 10 samples"),
        ("astraea", 3, {"variant": "LTRF2", "skew": -1.0}, "--skew"),
        ("astraea", 3, {"variant": "BAL1", "total": 101}, "--total 101 is more than the 100"),
    ],
)
def test_impossible_requests_are_rejected_in_a_sentence(name, clients, options, words) -> None:
    with pytest.raises(UserError, match=words), np.errstate(over="ignore"):
        draw(name, np.arange(100) % 10, 10, clients, **options)


def test_dirichlet_draws_again_until_every_client_has_enough_samples_or_says_that_it_cannot() -> None:
    labels = np.arange(6000) % 10
    for by in ("class", "client"):
        assert draw("dirichlet", labels, 10, 20, alpha=0.5, by=by, min_samples=60).sizes.min() >= 60
    first = draw("dirichlet", labels, 10, 20, alpha=10.0)  # enough at once: the same draw
    assert np.array_equal(draw("dirichlet", labels, 10, 20, alpha=10.0, min_samples=60).rows, first.rows)
    least = int(first.sizes.min())
    for redraws in (0, 9):
        again = draw("dirichlet", labels, 10, 20, alpha=10.0, min_samples=least, redraws=redraws)
        assert np.array_equal(again.rows, first.rows)
    assert set(draw("dirichlet", labels, 10, 20, alpha=0.1, by="client", min_samples=300).sizes) == {300}
    assert draw("dirichlet", labels, 10, 20, alpha=10.0, min_samples=least + 1, redraws=99).sizes.min() > least
    with pytest.raises(UserError, match="fewer than 1 samples"):
        draw("dirichlet", labels, 10, 20, alpha=0.01, min_samples=1, redraws=0)
    with pytest.raises(UserError, match=r"each of 11 draws has fewer than 200 samples \(\d+ in the last draw\)"):
        draw("dirichlet", labels, 10, 20, alpha=0.1, min_samples=200)
    with pytest.raises(UserError, match="6000 samples are too few for 20 clients with 301 each"):
        draw("dirichlet", labels, 10, 20, alpha=0.1, by="client", min_samples=301)


@pytest.mark.parametrize("name", ["dirichlet", "shards", "label-sorted", "user"])
def test_schemes_that_use_classes_or_users_are_rejected_where_rows_have_none(name: str) -> None:
    with pytest.raises(UserError, match="names its users" if name == "user" else "have no classes"):
        options = {"alpha": 1.0} if name == "dirichlet" else {}
        drawn(name, np.zeros(40, np.int64), 1, 4, np.random.default_rng(0), labeled=False, **options)


@pytest.mark.parametrize(("name", "draws", "clients"), [("shards", 200, 20), ("pathological", 1, 4000)])
def test_every_pair_of_classes_is_equally_likely(name: str, draws: int, clients: int) -> None:
    """Chi-square of 45 pairs over 4,000 nearly independent clients; the quantile of 44 degrees at 1e-5 is 96."""
    labels = np.repeat(np.arange(10), 40 * clients // 20)
    pairs = Counter[tuple[int, ...]]()
    for seed in range(draws):
        counts = counts_of(draw(name, labels, 10, clients, seed, classes_per_client=2), labels, 10)
        pairs.update(tuple(np.flatnonzero(row).tolist()) for row in counts)
    assert all(len(pair) == 2 for pair in pairs) and len(pairs) == 45
    assert sum((seen - 4000 / 45) ** 2 for seen in pairs.values()) / (4000 / 45) < 96


def test_a_class_is_shared_evenly_among_the_clients_that_drew_it() -> None:
    labels = np.repeat(np.arange(7), [0, 100, 333, 250, 90, 400, 127])
    made = draw("pathological", labels, 7, 30, classes_per_client=2)
    counts = counts_of(made, labels, 7)
    assert ((counts > 0).sum(axis=1) == 2).all()
    for label in range(1, 7):
        held = counts[counts[:, label] > 0, label]
        assert np.ptp(held) <= 1 and held.sum() == (labels == label).sum()


@pytest.mark.parametrize(("law", "size"), [("linear", lambda k: k), ("square", lambda k: k * k)])
def test_ranked_sizes_are_the_ranks_or_their_squares(law: str, size) -> None:
    falling = np.sort(relative_sizes("exponential", 4, 0.5, np.random.default_rng(0)))
    np.testing.assert_allclose(falling, np.exp([-1.5, -1.0, -0.5, 0.0]))
    wanted = [size(k) for k in range(1, 31)]
    made = draw("sizes", np.zeros(sum(wanted), np.int64), 1, 30, law=law)
    assert sorted(made.sizes.tolist()) == wanted
    ranks = np.mean(
        [draw("sizes", np.zeros(sum(wanted), np.int64), 1, 30, seed, law=law).sizes[0] for seed in range(99)]
    )
    assert abs(ranks - np.mean(wanted)) < 5 * np.std(wanted) / np.sqrt(99)  # any client may be the largest


def test_lognormal_sizes_follow_the_paper_and_the_published_code() -> None:
    """Means of 200,000 draws at sigma = 1 have a standard error of 0.3 %; tolerances are above five of them."""
    paper = lognormal_sizes(200_000, 50.0, 1.0, "paper", np.random.default_rng(1))
    code = lognormal_sizes(200_000, 2.0, 1.0, "code", np.random.default_rng(1))
    assert paper.min() >= 1 and paper.mean() == pytest.approx(50, rel=0.02)
    assert np.log(paper).std() == pytest.approx(1, rel=0.02)
    draws = np.random.default_rng(1).lognormal(0, 1, 200_000)
    np.testing.assert_array_equal(code, np.ceil(2 * draws / np.ceil(draws).mean()))


@pytest.mark.parametrize(("sigma", "mean"), [(0.5, 2.006), (2.0, 2.559)])
def test_the_mean_of_the_lognormal_law_is_before_rounding_and_the_realized_one_is_reported(sigma, mean) -> None:
    """E[max(1, round(2 L / E[L]))] = 1 + sum_j P(2 L / E[L] > j + 1/2); 100,000 clients, five standard errors."""
    made = draw("lognormal", np.zeros(400_000, np.int64), 1, 100_000, mean=2.0, sigma=sigma)
    error = made.sizes.std() / np.sqrt(100_000)
    assert abs(made.sizes.mean() - mean) < 5 * error
    assert made.options["realized_mean"] == pytest.approx(made.sizes.mean(), abs=1e-4)
    assert f"{made.options['realized_mean']:g} samples on average" in made.notes[0]


def test_lognormal_sizes_are_scaled_to_the_samples_there_are() -> None:
    made = draw("lognormal", np.zeros(500, np.int64), 1, 400, mean=10.0)
    assert made.sizes.sum() == 500 and made.sizes.min() == 1 and "scaled" in made.notes[1]


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


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=50), st.integers(0, 500))
def test_whole_sizes_keep_the_total_and_give_every_client_one(relative, extra) -> None:
    sizes = whole_sizes(np.array(relative), len(relative) + extra)
    assert sizes.sum() == len(relative) + extra and sizes.min() >= 1
    assert whole_sizes(np.array([2.0, 3.0, 15.0]), 20).tolist() == [2, 3, 15]  # the sample of everyone is part of it
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
