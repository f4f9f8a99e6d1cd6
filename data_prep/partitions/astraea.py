"""The distributed data sets of Astraea (Duan et al. 2019, Table I): sizes x class totals x local mixes.

The paper does not publish its size table (uploads of Instagram users) and its letter counts (Simple English Wikipedia).
The distributions that replace them are stated below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.partitions import CountOrZero, NotNegative, Partition, Positive, Request
from data_prep.partitions.sizes import SizeLaw, in_proportion, relative_sizes, whole_sizes
from fedmpi.common.apportionment import places_within
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import Rows, even_sizes, fill_by_mix, take_counts

# Letter frequencies of English text in per cent, A to Z: R. E. Lewand, Cryptological Mathematics (2000), p. 36.
LETTER_FREQUENCIES = np.array(
    [8.167, 1.492, 2.782, 4.253, 12.702, 2.228, 2.015, 6.094, 6.966, 0.153, 0.772, 4.025, 2.406]
    + [6.749, 7.507, 1.929, 0.095, 5.987, 6.327, 9.056, 2.758, 0.978, 2.360, 0.150, 1.974, 0.074]
)
DIGIT_FREQUENCY = 100 / 26  # per cent: a digit counts as a letter of mean frequency
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
LTRF1_SHARE = 117_500 / 230_752  # share of LTRF2's samples, Table I
NORMAL_RANGE = 3.0  # standard deviations spanned by the classes


@dataclass(frozen=True)
class AstraeaVariant:
    """One row of Table I: even or heavy-tailed sizes, class totals, local mixes."""

    even: bool
    totals: str
    mix: str
    share: float = 1.0  # share of the largest total with these class totals


VARIANTS = {
    "BAL1": AstraeaVariant(True, "balanced", "balanced"),
    "BAL2": AstraeaVariant(True, "balanced", "random"),
    "INS": AstraeaVariant(False, "balanced", "random"),
    "LTRF1": AstraeaVariant(False, "letters", "random", LTRF1_SHARE),
    "LTRF2": AstraeaVariant(False, "letters", "random"),
    "NORMAL": AstraeaVariant(False, "normal", "random"),
}


def class_shares(
    totals: str,
    classes: int,
    names: Sequence[str] = (),
    stock: Ints | None = None,
    digit_weight: float = 1.0,
    skew: float = 1.0,
) -> Floats:
    """Return the shares of the classes in the pooled data, float64 (C,), summing to one.

    balanced: 1 / C. letters: `letter_shares` if the classes are named after letters; else the ranked curve of the 26
    letters (log frequency against rank) interpolated linearly at C points from the first rank to the last, in falling
    order. The largest class then has 172 times the samples of the smallest for every C > 1. normal: the mass of the
    standard normal distribution in C equal intervals of [-3, 3], so the middle classes are the largest. `stock` is
    that of `letter_shares`, None means equal. The shares are raised to the power `skew`: 0 makes all equal.
    """
    if totals == "balanced":
        shares = np.ones(classes)
    elif totals == "normal":
        edges = np.linspace(-NORMAL_RANGE, NORMAL_RANGE, classes + 1)
        shares = np.diff([math.erf(edge / math.sqrt(2)) for edge in edges])
    elif (named := letters_of(names)) is not None:
        held = np.ones(classes) if stock is None else stock.astype(np.float64)
        shares = letter_shares(named, held, digit_weight)
    else:
        ranked = np.sort(LETTER_FREQUENCIES)[::-1]
        ranks = np.arange(len(ranked))
        shares = np.exp(np.interp(np.linspace(0, len(ranked) - 1, classes), ranks, np.log(ranked)))
    shares = shares**skew
    return np.asarray(shares / shares.sum(), np.float64)


def letters_of(names: Sequence[str]) -> list[str] | None:
    """Return the letter (upper case) or digit of every class name; None if one has neither, or if there is no letter.

    "a", "A" and "Aa" (both cases in one class, as in EMNIST letters) all denote the letter A.
    """
    characters = [name.upper()[:1] for name in names]
    known = all(
        character in LETTERS + DIGITS and set(name.upper()) == {character}
        for character, name in zip(characters, names, strict=True)
    )
    return characters if known and set(characters) & set(LETTERS) else None


def letter_shares(named: Sequence[str], stock: Floats, digit_weight: float = 1.0) -> Floats:
    """Return the relative shares of classes named after letters and digits, float64 (C,).

    A letter's frequency is split among all classes named after it, in proportion to their stock: English text gives the
    frequency of E, the data set its split into E and e. Digits do not occur in a table of letters. Each digit has the
    mean frequency of a letter times `digit_weight`, shared by all classes of that digit.
    """
    characters = np.array(named)
    frequency = {letter: float(share) for letter, share in zip(LETTERS, LETTER_FREQUENCIES, strict=True)}
    shares = np.zeros(len(named))
    for character in set(named):
        members = characters == character
        held = stock[members]
        within = held / held.sum() if held.any() else np.full(len(held), 1 / len(held))
        shares[members] = frequency.get(character, DIGIT_FREQUENCY * digit_weight) * within
    return shares


def class_totals(stock: Ints, shares: Floats, total: int) -> Ints:
    """Return the samples of every class to use (C,), in the given shares; a `total` of 0 uses the most possible."""
    allowed = np.where(shares > 0, stock / np.where(shares > 0, shares, 1.0), np.inf)
    most = int(np.floor(allowed.min() + 1e-9))
    if most == 0:
        raise UserError(f"class {int(allowed.argmin())} has too few samples for these class totals. Add some")
    if total > most:
        raise UserError(f"--total {total} is more than the {most} samples that these class totals allow. Lower it")
    return np.minimum(in_proportion(shares, total or most), stock)


@register("partition", "astraea", by_label=True)
def draw_astraea(
    request: Request,
    *,
    variant: Literal["BAL1", "BAL2", "INS", "LTRF1", "LTRF2", "NORMAL"],
    size_law: SizeLaw = "pareto",
    shape: Positive = 1.5,
    alpha: Positive = 1.0,
    digit_weight: NotNegative = 1.0,
    skew: NotNegative = 1.0,
    total: CountOrZero = 0,
    test_total: CountOrZero = 0,
) -> Partition:
    """Astraea's Table I: even or heavy-tailed sizes x balanced, letter or normal class totals x local mixes.

    No two clients share rows, and the test part is cut to equal class totals. The default sizes, Pareto with tail index
    1.5, replace the uploads of Instagram users. LTRF1 uses 117,500 / 230,752 of LTRF2's total as in Table I; the other
    rows are dropped. Local mixes: balanced gives every client each class in proportion, up to rounding. random draws
    the client's class mix in proportion to (class share) x Gamma(alpha), for balanced totals Dirichlet(alpha), and
    samples from it while the stock lasts (`fedmpi.data.assignment.fill_by_mix`).

    Parameters
    ----------
    variant : str
        Data set of Table I.
    size_law : str
        Distribution of uneven sizes; each client has at least one sample.
    shape : float
        Sigma (lognormal), tail index (pareto) or exponent (zipf).
    alpha : float
        Concentration of random class mixes.
    digit_weight : float
        Frequency of a digit among letters, relative to a mean letter; the paper does not state it.
    skew : float
        Exponent of unequal class totals; 0 makes them equal.
    total : int
        Training samples of all clients; 0 uses as many as the class totals allow.
    test_total : int
        Test samples, equally many per class; 0 uses as many as the test set allows.
    """
    row, stock, generator, clients = VARIANTS[variant], request.stock, request.generator, request.clients or 1
    shares = class_shares(row.totals, request.classes, request.class_names, stock, digit_weight, skew)
    used = class_totals(stock, shares, total)
    if not total and row.share < 1:
        used = class_totals(stock, shares, max(1, round(row.share * int(used.sum()))))
    samples = int(used.sum())
    if samples < clients:
        raise UserError(
            f"the class totals of {variant} leave {samples} of {len(request.labels)} samples, too few for {clients} "
            f"clients. Ask for at most {samples} clients"
        )
    if row.even:
        sizes = even_sizes(samples, clients)
    else:
        sizes = whole_sizes(relative_sizes(size_law, clients, shape, generator), samples)
    if row.mix == "balanced":
        rows, offsets = _deal_evenly(request.labels, used, sizes, generator)
    else:
        weights = shares * generator.standard_gamma(alpha, (clients, request.classes))
        mass = weights.sum(axis=1, keepdims=True)
        mixes = np.where(mass > 0, weights / np.where(mass > 0, mass, 1), shares)
        rows, offsets = take_counts(request.labels, fill_by_mix(sizes, used, mixes, generator), generator)
    return Partition(rows, offsets, balanced_test=True, test_total=test_total)


def _deal_evenly(labels: Ints, used: Ints, sizes: Ints, generator: np.random.Generator) -> Rows:
    """Assign rows sorted by class along a sequence in which every client recurs at even distances."""
    slots = np.repeat(np.arange(len(sizes)), sizes)
    phase = generator.random(len(sizes))
    sequence = slots[np.argsort((places_within(sizes) + phase[slots]) / sizes[slots], kind="stable")]
    counts = np.zeros((len(sizes), len(used)), np.int64)
    np.add.at(counts, (sequence, np.repeat(np.arange(len(used)), used)), 1)
    return take_counts(labels, counts, generator)
