"""Every partition law: no row twice, totals kept, no client empty, and the law itself."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.partitions import PARTITIONS, partition
from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.data.assignment import fill_empty, systematic_counts
from fedmpi.data.opening import open_store
from tests.data_prep.command import main
from tests.data_prep.partition_draws import counts_of, draw

EVERYTHING_USED = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.05}),
    ("dirichlet", {"alpha": 0.001}),
    ("dirichlet", {"alpha": 10.0, "redraws": 0}),
    ("dirichlet", {"alpha": 0.05, "by": "client"}),
    ("inner-dirichlet", {"alpha": 0.05}),
    ("inner-dirichlet", {"alpha": 0.001, "sigma": 1.0}),
    ("pachinko", {}),
    ("sizes", {"law": "even"}),
    ("sizes", {"law": "linear"}),
    ("sizes", {"law": "square"}),
    ("sizes", {"law": "exponential"}),
    ("sizes", {"law": "pareto", "shape": 0.5}),
    ("sizes", {"law": "zipf", "shape": 2.0}),
    ("sizes", {"law": "lognormal", "shape": 3.0}),
]
SOME_DROPPED = [
    ("shards", {"classes_per_client": 1}),
    ("shards", {"classes_per_client": 2, "surplus": "keep"}),
    ("pathological", {"classes_per_client": 2}),
    ("pathological", {"classes_per_client": 1, "draws": "first"}),
    ("pathological", {"classes_per_client": 3, "draws": "rotated"}),
    ("pachinko", {"size": 2}),
    ("lognormal", {"mean": 1.5, "sigma": 2.0}),
    ("lognormal", {"mean": 30.0, "law": "code"}),
    ("label-sorted", {"size": 4}),
    ("user", {}),
    ("user-groups", {"group": 2, "rest": "spread"}),
    ("attribute", {"attribute": "age", "strictness": 0.5}),
    *(("astraea", {"variant": variant}) for variant in ("BAL1", "BAL2", "INS", "LTRF1", "LTRF2", "NORMAL")),
]


labelled = st.tuples(st.integers(1, 6), st.integers(1, 120), st.integers(0, 2**32)).map(
    lambda case: (case[0], np.random.default_rng(case[2]).integers(0, case[0], case[1]))
)


@pytest.mark.parametrize(("name", "options"), EVERYTHING_USED)
@settings(deadline=None, max_examples=25)
@given(labelled, st.integers(1, 140), st.integers(0, 2**63))
def test_every_row_is_in_exactly_one_client_and_no_client_is_empty(name, options, case, clients, seed) -> None:
    classes, labels = case
    if clients > len(labels):
        with pytest.raises(UserError, match="at most|choose a mean"):
            draw(name, labels, classes, clients, seed, **options)
        return
    made = draw(name, labels, classes, clients, seed, **options)
    assert made.clients == clients and made.sizes.min() >= 1
    np.testing.assert_array_equal(np.sort(made.rows), np.arange(len(labels)))


@pytest.mark.parametrize(("name", "options"), SOME_DROPPED)
@settings(deadline=None, max_examples=25)
@given(labelled, st.integers(1, 20), st.integers(0, 2**63))
def test_no_row_is_in_two_clients_and_none_is_empty_or_the_reason_is_reported(
    name, options, case, clients, seed
) -> None:
    classes, labels = case
    try:
        made = draw(name, labels, classes, clients, seed, **options)
    except UserError as refusal:
        words = ("client", "class", "for every row")
        assert any(word in str(refusal) for word in words) and "\n" not in str(refusal)
        return
    assert made.clients == clients and made.sizes.min() >= 1 and made.offsets[0] == 0
    assert made.offsets[-1] == len(made.rows) == len(np.unique(made.rows))
    assert made.rows.min() >= 0 and made.rows.max() < len(labels)


@pytest.mark.parametrize(("name", "options"), EVERYTHING_USED + SOME_DROPPED)
def test_the_same_seed_draws_the_same_partition_and_another_seed_another(name, options) -> None:
    labels = np.arange(600) % 10
    first, again, other = (draw(name, labels, 10, 20, seed, **options) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.rows, again.rows)
    np.testing.assert_array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.rows, other.rows)


@pytest.mark.parametrize("client", [0, 3])
def test_dirichlet_by_class_has_the_moments_of_its_law(client: int) -> None:
    """Share of a client of 4 in 800 independent classes: Beta(a, 3a), a = 0.5. False-alarm rate below 1e-4 (z = 4)."""
    classes, alpha = 800, 0.5
    labels = np.repeat(np.arange(classes), 500)
    share = counts_of(draw("dirichlet", labels, classes, 4, alpha=alpha), labels, classes)[client] / 500
    variance = 0.25 * 0.75 / (4 * alpha + 1)
    assert abs(share.mean() - 0.25) < 4 * np.sqrt(variance / classes)
    assert abs(share.var() / variance - 1) < 4 * np.sqrt(2 / classes) * 1.5


def test_every_client_of_dirichlet_by_class_expects_the_same_samples_whatever_its_index() -> None:
    """100 classes of 500, 100 clients: 500 samples are right for each.

    A count's variance is at most that of its share, 500^2 p (1 - p) / (100 a + 1) with p = 0.01, plus 1/4 of the
    rounding; z = 5 for the first and the last client and z = 6 for all of them keep the false-alarm rate below 2e-6.
    """
    labels, alpha, seeds = np.repeat(np.arange(100), 500), 100.0, 20
    sizes = np.stack([draw("dirichlet", labels, 100, 100, seed, alpha=alpha).sizes for seed in range(seeds)])
    deviation = np.sqrt(100 * (500**2 * 0.01 * 0.99 / (100 * alpha + 1) + 0.25) / seeds)  # 1.6 samples
    means = sizes.mean(axis=0)
    assert abs(means[0] - 500) < 5 * deviation and abs(means[-1] - 500) < 5 * deviation
    assert np.abs(means - 500).max() < 6 * deviation
    halves = means[:50].mean() - means[50:].mean()
    assert abs(halves) < 5 * deviation * np.sqrt(2 / 50)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(any), st.integers(0, 400), st.integers(0, 2**32))
def test_rounding_a_share_misses_it_by_less_than_one_sample(shares, total, seed) -> None:
    counts = systematic_counts(np.array(shares), total, np.random.default_rng(seed))
    exact = np.array(shares) / sum(shares) * total
    assert counts.sum() == total and (counts >= 0).all() and (np.abs(counts - exact) < 1 + 1e-9).all()


def test_rounding_a_share_is_right_on_average_for_every_client() -> None:
    """20,000 roundings; a count is one of two neighbours, variance f (1 - f). Largest |z| of 5: below 1e-5."""
    shares, total, trials = np.array([0.05, 0.3, 1.7, 0.15, 0.8]), 11, 20_000
    generator = np.random.default_rng(3)
    mean = np.mean([systematic_counts(shares, total, generator) for _ in range(trials)], axis=0)
    exact = shares / shares.sum() * total
    fraction = exact % 1
    assert (np.abs(mean - exact) < 5 * np.sqrt(fraction * (1 - fraction) / trials)).all()


def test_no_two_clients_are_rounded_up_together_more_often_than_others() -> None:
    """Two of four equal shares are rounded up: 6 pairs, 6,000 draws, chi-square of 5 degrees at 1e-6."""
    generator, seen = np.random.default_rng(5), Counter()
    for _ in range(6000):
        seen[tuple(np.flatnonzero(systematic_counts(np.full(4, 0.25), 2, generator)))] += 1
    assert len(seen) == 6 and sum((count - 1000) ** 2 for count in seen.values()) / 1000 < 35.9


def test_who_gives_to_an_empty_client_and_who_gets_an_odd_sample_do_not_depend_on_the_index() -> None:
    """Over 400 draws each of 20 like clients gives, or gets, with probability 1/4: z = 5 a client, 2e-5 in all."""
    given, gained = np.zeros(20), np.zeros(20)
    for seed in range(400):
        owner = np.repeat(np.arange(25, dtype=np.int32), [8] * 20 + [0] * 5)
        fill_empty(owner, 25, np.random.default_rng(seed))
        given += 8 - np.bincount(owner)[:20]
        made = draw("shards", np.zeros(105, np.int64), 1, 20, seed, classes_per_client=1, surplus="keep")
        gained += made.sizes - 5
    assert given.sum() == gained.sum() == 400 * 5
    margin = 5 * np.sqrt(400 / 4 * 3 / 4)
    assert np.abs(given - 100).max() < margin and np.abs(gained - 100).max() < margin


def test_dirichlet_by_client_gives_equal_sizes_and_skewed_mixes() -> None:
    labels = np.arange(6000) % 10
    made = draw("dirichlet", labels, 10, 60, alpha=0.1, by="client")
    assert np.ptp(made.sizes) == 0
    largest = counts_of(made, labels, 10).max(axis=1) / 100
    assert largest.mean() > 0.5  # a Dirichlet(0.1) mix over 10 classes has a mean largest share of about 0.75


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


def test_label_pairs_of_a_hundred_clients_vary_at_random() -> None:
    """45 pairs, 100 clients: nearly uniform pairs. The mean over 30 draws of the number of pairs held by two clients
    or more is near that of 100 independent uniform pairs, 45 (1 - (44/45)^100 - 100/45 (44/45)^99) = 29.4, with a
    standard deviation below 2.5 a draw; the margin of 3 exceeds six standard errors (false alarms below 1e-6)."""
    labels = np.repeat(np.arange(10), 600)
    shared = []
    for seed in range(30):
        made = draw("shards", labels, 10, 100, seed, classes_per_client=2)
        pairs = Counter(tuple(np.flatnonzero(row)) for row in counts_of(made, labels, 10))
        assert all(len(pair) == 2 for pair in pairs)
        shared.append(sum(holders > 1 for holders in pairs.values()))
    assert abs(np.mean(shared) - 29.4) < 3 and len(set(shared)) > 3


def test_every_pair_of_classes_is_equally_likely() -> None:
    """Chi-square of 45 pairs over 200 draws of 20 clients; clients of a draw are nearly independent. Limit at 1e-5."""
    labels = np.repeat(np.arange(10), 40)
    seen = Counter()
    for seed in range(200):
        made = draw("shards", labels, 10, 20, seed, classes_per_client=2)
        seen.update(tuple(np.flatnonzero(row)) for row in counts_of(made, labels, 10))
    expected = 200 * 20 / 45
    assert sum((count - expected) ** 2 for count in seen.values()) / expected < 96  # chi2(44) quantile at 1 - 1e-5
    assert len(seen) == 45


def test_label_sorted_clients_are_blocks_of_the_sorted_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 100))
    made = draw("label-sorted", labels, 4, None, size=30)
    assert made.clients == 13 and set(made.sizes) == {30}
    assert (np.diff(labels[made.rows]) >= 0).all()
    assert draw("label-sorted", labels, 4, 5, size=30).clients == 5


@pytest.mark.parametrize("size, clients", [(103, 14), (206, 7), (721, 2), (1442, 1), (104, 13), (1441, 1)])
def test_label_sorted_clients_leave_no_more_than_a_remainder(
    size: int, clients: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,442 = 2 · 7 · 103 training digits: where the size divides them, all are used."""
    words = f"digits --partition label-sorted --size {size} --shards 1 --out {tmp_path / 'shards'}"
    assert main(words.split()) == 0
    store = open_store(str(tmp_path / "shards"))
    assert store.sizes.tolist() == [size] * clients
    assert main([*words.replace("--out", f"--clients {clients + 1} --out").split(), "--overwrite"]) == 2
    assert f"make only {clients} clients of {size}" in capsys.readouterr().err


def test_users_are_clients_and_small_ones_can_be_left_out() -> None:
    users = np.array([4, 4, 1, 0, 1, 4])
    made = partition("user", np.zeros(6, np.int64), 1, None, Streams(0).generator(Purpose.PARTITION), users)
    assert made.users is not None and made.users.tolist() == [0, 1, 4] and made.sizes.tolist() == [1, 2, 3]
    assert all((users[made.rows[a:b]] == user).all() for user, a, b in zip(made.users, made.offsets, made.offsets[1:]))  # noqa: B905
    generator = Streams(0).generator(Purpose.PARTITION)
    large = partition("user", np.zeros(6, np.int64), 1, None, generator, users, min_samples=2)
    assert large.users is not None and large.users.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("name", "clients", "options", "words"),
    [
        ("dirichlets", 3, {}, "did you mean dirichlet"),
        ("iid", None, {}, "--clients"),
        ("iid", 0, {}, "at least one"),
        ("dirichlet", 3, {}, "needs --alpha"),
        ("dirichlet", 3, {"alpha": float("nan")}, "impossible"),
        ("dirichlet", 3, {"alpha": -1.0}, "impossible"),
        ("dirichlet", 3, {"alpha": "x"}, "not a float"),
        ("dirichlet", 3, {"alpha": 1.0, "by": "row"}, "class, client"),
        ("iid", 3, {"alpha": 1.0}, "no option --alpha"),
        ("shards", 3, {"classes_per_client": 11}, "10 classes"),
        ("label-sorted", None, {"size": 1000}, "Lower --size"),
        ("sizes", 3, {"mean": 99.0}, "--mean"),
        ("user", 400, {}, "--min-samples"),
        ("user-groups", None, {}, "needs --group"),
        ("user-groups", None, {"group": 99, "rest": "drop"}, "make 0 groups of 99"),
        ("user-groups", 17, {"group": 2}, "make 16 groups of 2"),
        ("user-groups", None, {"group": 2, "rest": "keep"}, "smaller, spread, drop"),
        ("pathological", 3, {"classes_per_client": 11}, "10 classes"),
        ("pathological", 60, {"classes_per_client": 9}, "drew class .* which has 10 samples"),
        ("pathological", 3, {"draws": "all"}, "random, first, rotated"),
        ("inner-dirichlet", 3, {}, "needs --alpha"),
        ("inner-dirichlet", 101, {"alpha": 1.0}, "at most 100 clients"),
        ("pachinko", 30, {"size": 4}, "need 120, and there are 100"),
        ("astraea", 3, {"variant": "LTRF2", "digit_weight": -0.5}, "--digit-weight -0.5 is impossible"),
        ("astraea", 3, {"variant": "LTRF2", "skew": -1.0}, "--skew -1.0 is impossible"),
        ("attribute", 3, {}, "needs --attribute"),
        ("attribute", 3, {"attribute": "age", "strictness": 1.5}, "from 0 to 1"),
    ],
)
def test_impossible_requests_are_refused_in_a_sentence(name, clients, options, words) -> None:
    with pytest.raises(UserError, match=words):
        draw(name, np.arange(100) % 10, 10, clients, **options)


def test_a_data_set_without_users_has_no_partition_by_user() -> None:
    with pytest.raises(UserError, match="names its users"):
        partition("user", np.zeros(3, np.int64), 1, None, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("user-groups", {"group": 2}, "names its users"),
        ("pachinko", {}, "superclass"),
        ("attribute", {"attribute": "x"}, "is read"),
    ],
)
def test_what_a_law_needs_of_the_data_set_is_reported(name, options, words) -> None:
    with pytest.raises(UserError, match=words):
        partition(name, np.arange(30) % 3, 3, 2, np.random.default_rng(0), **options)


def test_every_law_states_itself_and_its_options() -> None:
    for law in PARTITIONS.values():
        assert len(law.sentence) > 20 and law.draw.__doc__ and all(option.help for option in law.options)


def test_fedssos_clients_of_mnist_hold_one_or_two_digits(data_folder: Path) -> None:
    path = data_folder / "mnist" / "train-labels-idx1-ubyte.gz"
    if not path.exists():
        pytest.skip(f"no MNIST at {path}")
    labels = np.frombuffer(gzip.decompress(path.read_bytes())[8:], np.uint8).astype(np.int64)
    totals = np.bincount(labels)
    for per_client in (1, 2):
        made = draw("shards", labels, 10, 100, classes_per_client=per_client)
        counts = counts_of(made, labels, 10)
        assert ((counts > 0).sum(axis=1) == per_client).all()
        enough = [size for size in range(1, 601) if (totals // size).sum() >= 100 * per_client]
        assert (counts[counts > 0] == max(enough)).all()  # the largest shards of one digit that are enough for all
        assert max(enough) == {1: 584, 2: 293}[per_client]
        assert ((counts > 0).sum(axis=0) <= totals // max(enough)).all()
    sorted_by_digit = draw("label-sorted", labels, 10, None, size=300)
    assert sorted_by_digit.clients == 200 and (sorted_by_digit.sizes == 300).all()
    boundaries = np.flatnonzero((counts_of(sorted_by_digit, labels, 10) > 0).sum(axis=1) != 1)
    assert np.array_equal(boundaries, np.cumsum(totals)[:-1] // 300)  # where one digit ends and the next one begins
