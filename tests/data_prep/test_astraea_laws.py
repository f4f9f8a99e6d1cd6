"""Astraea's Table I: class totals by English letters, the published totals from EMNIST's stock, and the local mixes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data_prep.holdout import balanced_rows
from data_prep.partitions.astraea import LETTER_FREQUENCIES, class_shares, class_totals
from fedmpi import UserError
from fedmpi.data.assignment import fill_by_mix
from tests.data_prep.test_partitions import counts_of, draw

UPPER, LOWER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"
BYCLASS_NAMES = "0123456789" + UPPER + LOWER
# Training images of every class of EMNIST byclass, in this order; bymerge has the same images.
BYCLASS_STOCK = dict(
    zip(
        BYCLASS_NAMES,
        [34585, 38374, 34203, 35143, 33535, 31416, 34232, 35754, 33946, 33847]
        + [6411, 3874, 10094, 4562, 4934, 9182, 2517, 3152, 11946, 3762, 2468, 5076, 9002]
        + [8237, 24983, 8347, 2605, 5073, 20764, 9820, 12602, 4637, 4695, 2771, 4743, 2701]
        + [10033, 5159, 2854, 10177, 24631, 2561, 3687, 8738, 2725, 1896, 2491, 15318, 2645]
        + [11418, 2749, 2448, 2994, 14105, 2699, 18262, 2830, 2910, 2697, 2822, 2365, 2725],
        strict=True,
    )
)
APART = "abdefghnqrt"  # lower-case letters that are separate classes in bymerge and balanced
BYMERGE_NAMES = tuple("0123456789" + UPPER + APART)
BYMERGE_STOCK = np.array(
    [
        BYCLASS_STOCK[name] + (BYCLASS_STOCK[name.lower()] if name.isupper() and name.lower() not in APART else 0)
        for name in BYMERGE_NAMES
    ]
)


def frequency(letter: str) -> float:
    return float(LETTER_FREQUENCIES[UPPER.index(letter.upper())])


def divergence(shares: np.ndarray) -> float:
    return float((shares * np.log(shares * len(shares))).sum())


def test_letter_totals_are_as_uneven_for_ten_classes_as_for_47() -> None:
    for classes in (2, 10, 26, 47, 100):
        shares = class_shares("letters", classes)
        assert shares.sum() == pytest.approx(1) and (np.diff(shares) < 0).all()
        assert shares[0] / shares[-1] == pytest.approx(12.702 / 0.074)
    assert divergence(class_shares("letters", 10)) == pytest.approx(0.433, abs=0.001)
    assert divergence(class_shares("letters", 47)) == pytest.approx(0.351, abs=0.001)
    np.testing.assert_allclose(
        class_shares("letters", 26), np.sort(LETTER_FREQUENCIES)[::-1] / LETTER_FREQUENCIES.sum()
    )


@pytest.mark.parametrize("split", ["letters", "balanced", "byclass", "bymerge"])
def test_a_letters_own_frequency_belongs_to_its_classes(split: str) -> None:
    names = {
        "letters": tuple(upper + upper.lower() for upper in UPPER),
        "byclass": tuple(BYCLASS_NAMES),
    }.get(split, BYMERGE_NAMES)
    shares = class_shares("letters", len(names), names)
    of_letter = {
        letter: sum(shares[i] for i, name in enumerate(names) if name[0].upper() == letter) for letter in UPPER
    }
    letters = sum(of_letter.values())
    for letter in UPPER:
        assert of_letter[letter] / letters == pytest.approx(frequency(letter) / LETTER_FREQUENCIES.sum())
    digits = [shares[names.index(digit)] for digit in "0123456789" if digit in names]
    assert digits == pytest.approx([letters * 100 / 26 / LETTER_FREQUENCIES.sum()] * len(digits))


def test_both_cases_of_a_letter_share_its_frequency_as_the_data_set_holds_them() -> None:
    shares = class_shares("letters", 47, BYMERGE_NAMES, BYMERGE_STOCK)
    upper, lower = (shares[BYMERGE_NAMES.index(name)] for name in "Ee")
    assert lower / upper == pytest.approx(24631 / 4934)
    nobody = class_shares("letters", 3, ("E", "e", "T"), np.array([0, 0, 5]))
    assert nobody[0] == nobody[1] and nobody[0] + nobody[1] == pytest.approx(12.702 / (12.702 + 9.056))


def test_digits_can_be_rarer_and_class_totals_evener() -> None:
    plain = class_shares("letters", 47, BYMERGE_NAMES, BYMERGE_STOCK)
    rare = class_shares("letters", 47, BYMERGE_NAMES, BYMERGE_STOCK, digit_weight=0.25)
    digits = np.arange(47) < 10
    assert rare[digits] / rare[~digits].sum() == pytest.approx(plain[digits] / plain[~digits].sum() / 4)
    labels = np.repeat(np.arange(47), BYMERGE_STOCK)
    options = {"variant": "LTRF2", "total": 20_000, "class_names": BYMERGE_NAMES}
    made = draw("astraea", labels, 47, 50, **options, digit_weight=0.25, skew=0.5)
    both = np.sqrt(rare) / np.sqrt(rare).sum() * 20_000
    assert np.abs(np.bincount(labels[made.rows], minlength=47) - both).max() < 1


def test_classes_that_are_no_letters_follow_the_ranked_curve() -> None:
    for names in (tuple("0123456789"), ("cat", "dog"), ("a", "b", "cat"), ("Ab", "C"), ("",), ("a", "é")):
        np.testing.assert_array_equal(class_shares("letters", len(names), names), class_shares("letters", len(names)))
    labels = np.repeat(np.arange(2), 100)
    for names, rarer in (((), 1), (("Z", "E"), 0)):
        totals = counts_of(draw("astraea", labels, 2, 5, variant="LTRF2", class_names=names), labels, 2).sum(axis=0)
        assert totals.argmin() == rarer


def test_a_class_without_share_limits_nothing_and_one_without_stock_is_named() -> None:
    np.testing.assert_array_equal(class_totals(np.array([0, 6, 9]), np.array([0, 0.5, 0.5]), 0), [0, 6, 6])
    with pytest.raises(UserError, match="class 1 has too few"):
        class_totals(np.array([5, 0]), np.array([0.5, 0.5]), 0)


@pytest.mark.parametrize(
    ("variant", "total"),
    [("BAL1", 117_500), ("BAL2", 117_500), ("INS", 117_500), ("LTRF1", 117_500), ("LTRF2", 230_752)],
)
def test_table_ones_totals_can_be_drawn_from_the_stock_of_emnist_bymerge(variant: str, total: int) -> None:
    assert BYMERGE_STOCK.sum() == 697_932
    labels = np.repeat(np.arange(47), BYMERGE_STOCK)
    made = draw("astraea", labels, 47, 500, variant=variant, total=total, class_names=BYMERGE_NAMES)
    assert len(made.rows) == len(np.unique(made.rows)) == total and made.clients == 500
    totals = np.bincount(labels[made.rows], minlength=47)
    if variant.startswith("LTRF"):
        expected = class_shares("letters", 47, BYMERGE_NAMES, BYMERGE_STOCK) * total
        assert np.abs(totals - expected).max() < 1
        assert totals.max() > 100 * totals.min()
    else:
        assert set(totals) == {2_500}


def test_a_test_part_of_a_given_total_is_balanced_or_rejected() -> None:
    labels = np.array([0, 1, 1, 3, 0, 1, 3, 0])
    assert balanced_rows(labels, 4, 3).tolist() == [0, 1, 3]
    assert balanced_rows(labels, 4, 6).tolist() == balanced_rows(labels, 4).tolist() == [0, 1, 2, 3, 4, 6]
    for total in (4, 9):
        with pytest.raises(UserError, match=f"--test-total {total} is impossible. .* 3 classes .* at most 6"):
            balanced_rows(labels, 4, total)


def test_bal1_gives_every_client_every_class_in_proportion_to_rounding() -> None:
    labels = np.repeat(np.arange(10), 300)
    made = draw("astraea", labels, 10, 40, variant="BAL1")
    counts = counts_of(made, labels, 10)
    assert np.abs(counts - made.sizes[:, None] / 10).max() <= 1


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_mixes_of_ltrf_are_class_shares_times_gamma(alpha: float) -> None:
    """Against mixes p ∝ s · Γ(α) written out here and served from the same stock, by Kolmogorov and Smirnov.

    4,000 clients on either side; counts of four classes and Σ counts². 0.0497 is the critical value at one false alarm
    in 10,000 (two-sided, asymptotic), so at most one in 2,000 for all five.
    """
    clients, size = 4_000, 60
    shares = class_shares("letters", 10)
    labels = np.repeat(np.arange(10), np.ceil(shares * clients * size).astype(int) + 10)
    options = {"variant": "LTRF2", "size_law": "even", "total": clients * size, "alpha": alpha}
    drawn = counts_of(draw("astraea", labels, 10, clients, **options), labels, 10)
    stock = drawn.sum(axis=0)
    assert np.abs(stock - shares * clients * size).max() < 1
    generator = np.random.default_rng(1)
    gammas = generator.gamma(alpha, size=(clients, 10)) * shares
    sizes = np.full(clients, size)
    expected = fill_by_mix(sizes, stock, gammas / gammas.sum(axis=1, keepdims=True), generator)
    for statistic in (*(lambda counts, label=label: counts[:, label] for label in (0, 2, 4, 7)), concentration):
        assert distance(statistic(drawn), statistic(expected)) < math.sqrt(math.log(2e4) / clients)


def concentration(counts: np.ndarray) -> np.ndarray:
    return (counts**2).sum(axis=1)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Largest distance of two empirical distribution functions."""
    points = np.union1d(first, second)
    below = [np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (first, second)]
    return float(np.abs(below[0] - below[1]).max())
