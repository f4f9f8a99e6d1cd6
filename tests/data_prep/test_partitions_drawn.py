"""Laws that draw classes, users or places for every client: each against its definition, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from scipy import stats

from data_prep.partitions.mixes import draw_in_turn, random_turns
from fedmpi.common.streams import Purpose, Streams
from tests.data_prep.command import drawn
from tests.data_prep.test_partitions import counts_of, draw

Z = 5.0
"""Critical value of a normal statistic: a false-alarm rate of 6e-7 each."""


def test_every_client_of_the_pathological_law_draws_its_classes_uniformly() -> None:
    """4,000 clients, 45 pairs of 10 classes, independent: chi-square of 44 degrees at 1e-5 is 96."""
    labels = np.repeat(np.arange(10), 3000)
    counts = counts_of(draw("pathological", labels, 10, 4000, classes_per_client=2), labels, 10)
    pairs = Counter(tuple(np.flatnonzero(row)) for row in counts)
    assert all(len(pair) == 2 for pair in pairs) and len(pairs) == 45
    assert sum((seen - 4000 / 45) ** 2 for seen in pairs.values()) / (4000 / 45) < 96


@pytest.mark.parametrize("draws", ["random", "first", "rotated"])
def test_a_class_is_shared_evenly_among_the_clients_that_drew_it(draws: str) -> None:
    labels = np.repeat(np.arange(7), [0, 100, 333, 250, 90, 400, 127])
    made = draw("pathological", labels, 7, 30, classes_per_client=2, draws=draws)
    counts = counts_of(made, labels, 7)
    assert ((counts > 0).sum(axis=1) == 2).all()
    for label in range(1, 7):
        held = counts[counts[:, label] > 0, label]
        assert np.ptp(held) <= 1 and held.sum() == (labels == label).sum()
    present = np.arange(1, 7)
    if draws == "first":
        assert all(counts[k, present[k % 6]] > 0 for k in range(30))
    if draws == "rotated":
        assert all(counts[k, present[k % 6]] and counts[k, present[(k + 1) % 6]] for k in range(30))


STOCK, FAMILIES = (1, 2, 1, 1), (0, 0, 1, 1)
MIXES = np.array([[0.6, 0.1, 0.2, 0.1], [0.05, 0.25, 0.0, 0.7]])
TURNS = np.array([0, 1, 1, 0, 0])


def probabilities(families: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Every order of classes and its probability, one sample after another, as the papers' pseudocode draws them."""

    def after(turn: int, left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], float]]:
        if turn == len(TURNS):
            yield (), 1.0
            return
        mix = MIXES[TURNS[turn]]
        of_family = {f: sum(mix[y] for y in range(4) if families[y] == f) for f in set(families)}
        there = {f: sum(mix[y] for y in range(4) if families[y] == f and left[y]) for f in set(families)}
        alive = sum(mass for f, mass in of_family.items() if there[f])
        for label in range(4):
            family = families[label]
            if left[label] and there[family]:
                share = of_family[family] / alive * mix[label] / there[family]
                rest = tuple(n - (y == label) for y, n in enumerate(left))
                for later, chance in after(turn + 1, rest):
                    yield (label, *later), share * chance

    found: dict[tuple[int, ...], float] = {}
    for order, chance in after(0, STOCK):
        found[order] = found.get(order, 0.0) + chance
    return found


@pytest.mark.parametrize("families", [FAMILIES, (0, 1, 2, 3)])
def test_drawing_together_has_the_distribution_of_sequential_draws(families: tuple[int, ...]) -> None:
    """2,000 draws against all orders of five samples of four classes, whose stock is used up: chi-square at 1e-5.

    Client 1 has no mass on class 2, so where only that is left it must
    take it; those orders (its mix is then that of the stock) have another probability in the count.
    """
    expected = {order: chance for order, chance in probabilities(families).items() if chance > 0}
    generator, draws = np.random.default_rng(11), 2000
    seen = Counter(
        tuple(draw_in_turn(TURNS, np.array(STOCK), MIXES, generator, np.array(families)).tolist()) for _ in range(draws)
    )
    lost = 1 - sum(expected.values())  # client 1 had nothing but class 2 left
    forced = sum(number for order, number in seen.items() if order not in expected)
    assert abs(forced - lost * draws) < Z * np.sqrt(draws * max(lost * (1 - lost), 1e-9)) + 1e-6
    cells = [(seen[order], chance * draws) for order, chance in expected.items() if chance * draws >= 5]
    statistic = sum((number - wanted) ** 2 / wanted for number, wanted in cells)
    assert len(cells) > 10 and statistic < stats.chi2.ppf(1 - 1e-5, len(cells))
    assert all(np.bincount(order, minlength=4).tolist() == list(STOCK) for order in seen)


def test_the_client_with_the_turn_is_uniform_among_those_that_still_need_samples() -> None:
    """Sizes 1, 2 and 3: the last turn is client 2's with probability 49/108 + ..., by counting; 6,000 draws, z = 5."""

    def last(left: tuple[int, ...]) -> float:
        """Probability that client 2 has the last turn."""
        wanting = [k for k, n in enumerate(left) if n]
        if sum(left) == 1:
            return float(wanting[0] == 2)
        return sum(last(tuple(n - (k == j) for j, n in enumerate(left))) for k in wanting) / len(wanting)

    chance, generator = last((1, 2, 3)), np.random.default_rng(2)
    turns = [random_turns(np.array([1, 2, 3]), generator) for _ in range(6000)]
    assert all(np.bincount(order).tolist() == [1, 2, 3] for order in turns)
    ended = np.mean([order[-1] == 2 for order in turns])
    first = np.mean([order[0] == 0 for order in turns])
    assert abs(ended - chance) < Z * np.sqrt(chance * (1 - chance) / 6000)
    assert abs(first - 1 / 3) < Z * np.sqrt(2 / 9 / 6000)


def one_after_another(labels: np.ndarray, clients: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    """Class counts (N, C) sample by sample: a client that wants one, a class of its mix among those left."""
    stock = np.bincount(labels).tolist()
    wanted = [len(labels) // clients] * clients
    mixes = generator.dirichlet([alpha] * len(stock), size=clients).tolist()
    counts = np.zeros((clients, len(stock)))
    while any(wanted):
        client = int(generator.integers(clients))
        if not wanted[client]:
            continue
        wanted[client] -= 1
        left = [mass if there else 0.0 for mass, there in zip(mixes[client], stock, strict=True)]
        number, label = generator.random() * sum(left), 0
        while number >= left[label]:
            number -= left[label]
            label += 1
        stock[label] -= 1
        counts[client, label] += 1
    return counts


def test_inner_dirichlet_has_the_distribution_of_the_loop_that_defines_it() -> None:
    """Sum of squared class counts of a draw, which measures how uneven clients are: 500 draws of each, z = 5."""
    labels = np.arange(60) % 3
    generator = np.random.default_rng(5)
    loop = [(one_after_another(labels, 4, 0.5, generator) ** 2).sum() for _ in range(500)]
    ours = []
    for seed in range(500):
        made = draw("inner-dirichlet", labels, 3, 4, seed, alpha=0.5)
        assert np.ptp(made.sizes) == 0
        ours.append((counts_of(made, labels, 3) ** 2).sum())
    error = np.sqrt((np.var(loop) + np.var(ours)) / 500)
    assert abs(np.mean(loop) - np.mean(ours)) < Z * error and error < 0.05 * np.mean(loop)


def test_pachinko_mixes_superclasses_and_the_classes_within_them() -> None:
    """Pairs of samples of a client that share superclass, or class: E = (a + 1) / (R a + 1), times (b + 1) / (5 b + 1).

    20 superclasses of 5 classes, far more samples than are requested, so that clients are independent: means over 600
    clients of 40 samples, z = 5. At most 1 % of the samples of a class are taken by ten like clients.
    """
    labels, alpha, beta = np.repeat(np.arange(100), 3000), 0.5, 2.0
    generator = Streams(3).generator(Purpose.PARTITION)
    superclasses = np.arange(100) % 20
    options = {"alpha": alpha, "beta": beta, "size": 40}
    made = drawn("pachinko", labels, 100, 600, generator, superclasses=superclasses, **options)
    counts = counts_of(made, labels, 100).astype(float)
    families = np.stack([counts[:, superclasses == family].sum(axis=1) for family in range(20)], axis=1)
    for held, expected in (
        (families, (alpha + 1) / (20 * alpha + 1)),
        (counts, (alpha + 1) / (20 * alpha + 1) * (beta + 1) / (5 * beta + 1)),
    ):
        pairs = (held * (held - 1)).sum(axis=1) / (40 * 39)
        assert abs(pairs.mean() - expected) < Z * pairs.std() / np.sqrt(600)


@pytest.mark.parametrize(("law", "size"), [("linear", lambda k: k), ("square", lambda k: k * k)])
def test_ranked_sizes_are_the_ranks_or_their_squares(law: str, size) -> None:
    wanted = [size(k) for k in range(1, 31)]
    made = draw("sizes", np.zeros(sum(wanted), np.int64), 1, 30, law=law)
    assert sorted(made.sizes.tolist()) == wanted
    ranks = np.mean(
        [draw("sizes", np.zeros(sum(wanted), np.int64), 1, 30, seed, law=law).sizes[0] for seed in range(99)]
    )
    assert abs(ranks - np.mean(wanted)) < Z * np.std(wanted) / np.sqrt(99)  # any client may be the largest


@pytest.mark.parametrize(("rest", "sizes"), [("smaller", [1] + [3] * 3), ("drop", [3] * 3), ("spread", [3, 3, 4])])
def test_a_group_of_users_is_a_client(rest: str, sizes: list[int]) -> None:
    users = np.repeat(np.arange(11), np.arange(11) + 1)  # user 0 has one sample and is left out
    generator = Streams(1).generator(Purpose.PARTITION)
    options = {"group": 3, "rest": rest, "min_samples": 2}
    made = drawn("user-groups", np.zeros(len(users), np.int64), 1, None, generator, users, **options)
    held = [set(users[made.rows[a:b]].tolist()) for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    assert sorted(map(len, held)) == sizes
    assert sum(map(len, held)) == len(set().union(*held)) and 0 not in set().union(*held)
    assert len(made.rows) == sum(user + 1 for user in set().union(*held)) == len(np.unique(made.rows))
    assert ("in no group" in " ".join(made.notes)) == (rest == "drop")
