"""Hold-out of data: a test part if the files have none, and validation samples of every client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from data_prep.raw import RawDataset, Tally
from fedmpi.common.apportionment import largest_remainders, offsets_of, places_within
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints

TEST_SHARE = 0.2


def hold_out_test(raw: RawDataset, split: str, tally: Tally) -> RawDataset:
    """Hold out a fifth of the rows for testing if there is no test part; the same for every seed."""
    if len(raw.test):
        if split != "rows":
            raise UserError(f"{raw.name} has a test part, so --split {split} has no effect. Leave --split out.")
        return raw
    labels = raw.y[raw.train] if raw.has_classes else None
    users, groups = (None if codes is None else codes[raw.train] for codes in (raw.users, raw.groups))
    if users is not None and users.min(initial=0) < 0:
        users = None
    chosen = users if split == "users" else groups
    if split == "rows":
        train, test = stratified_rows(len(raw.train), labels)
    elif chosen is not None:
        train, test = train_test_groups(chosen, labels)
    elif split == "users":
        raise UserError(
            f"--split users needs a user of each sample, but {raw.name} names none. Name their column with --user and "
            "fill it, give an array user, or leave --split out."
        )
    else:
        raise UserError(f"--split {split} is unknown for {raw.name}. Choose rows, users, or a column of a table.")
    if not len(train) or not len(test):
        what = "sample" if split == "rows" else "user" if split == "users" else f"value of {split}"
        raise UserError(
            f"{raw.name} holds one {what}, so no test part can be held out. Give more data, or a test part."
        )
    if split == "rows" and users is not None:
        note_users_in_both(users, train, test, tally)
    return replace(raw, train=raw.train[train], test=raw.train[test])


def note_users_in_both(users: Ints, train: Ints, test: Ints, tally: Tally) -> None:
    """Note how many users (n,) of test rows also have training rows."""
    tested = np.unique(users[test])
    if both := int(np.isin(tested, users[train]).sum()):
        tally.note(
            f"the test part is drawn by rows: {both:,} of its {len(tested):,} users also have training samples; "
            "--split users keeps the samples of one together"
        )


def stratified_rows(n: int, labels: Ints | None) -> tuple[Ints, Ints]:
    """Draw the rows of the training and the test part (sorted) at random, stratified by class.

    Shares are rounded by largest remainders. Each class with two samples or more has at least one in either part.
    Without labels, or if no class has two samples, floor(n / 5) rows are drawn, at least one.
    """
    counts = np.zeros(0, np.int64) if labels is None else np.bincount(labels)
    if counts.max(initial=0) < 2:
        return train_test_rows(n, least=min(n - 1, 1))
    assert labels is not None
    shares = largest_remainders(TEST_SHARE * counts.astype(np.float64), int(n * TEST_SHARE))
    shares = np.clip(shares, np.minimum(counts // 2, 1), np.maximum(counts - 1, 0))
    drawn = _generator().permutation(n)
    drawn = drawn[np.argsort(labels[drawn], kind="stable")]
    chosen = np.zeros(n, bool)
    chosen[drawn[places_within(counts) < np.repeat(shares, counts)]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def train_test_rows(n: int, least: int = 0) -> tuple[Ints, Ints]:
    """Draw the rows of the training and the test part (sorted) at random: floor(n / 5) test rows, at least `least`."""
    chosen = np.zeros(n, bool)
    chosen[_generator().choice(n, max(int(n * TEST_SHARE), least), replace=False)] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def train_test_groups(groups: Ints, labels: Ints | None = None) -> tuple[Ints, Ints]:
    """Draw the rows of the training and the test part (sorted), with all rows of a group in the same part.

    Groups come in random order. Each is assigned to the test part if the part then has at most floor(n / 5) rows and
    its class counts come nearer to a fifth of each class. If no group qualifies, the smallest of several is the test
    part.
    """
    n, classes = len(groups), labels if labels is not None else np.zeros(len(groups), np.int64)
    _, groups = np.unique(groups, return_inverse=True)
    missing = np.bincount(classes) * TEST_SHARE
    order = np.argsort(groups, kind="stable")
    starts = offsets_of(np.bincount(groups))
    left, chosen = int(n * TEST_SHARE), np.zeros(len(starts) - 1, bool)
    for group in _generator().permutation(len(chosen)).tolist():
        size = int(starts[group + 1] - starts[group])
        if size > left:
            continue
        found, counts = np.unique(classes[order[starts[group] : starts[group + 1]]], return_counts=True)
        if labels is None or np.abs(missing[found] - counts).sum() < np.abs(missing[found]).sum():
            missing[found] -= counts
            left -= size
            chosen[group] = True
    if not chosen.any() and len(chosen) > 1:
        chosen[np.argmin(np.diff(starts))] = True
    return np.flatnonzero(~chosen[groups]), np.flatnonzero(chosen[groups])


def _generator() -> np.random.Generator:
    """Return the generator of the test part: the same for every seed, so that runs over seeds share one test part."""
    return Streams(0).generator(Purpose.PARTITION, round=2**32)


def hold_out_validation(
    rows: Ints, offsets: Ints, fraction: float, generator: np.random.Generator
) -> tuple[Ints, Ints, Ints, Ints]:
    """Hold out a share of every client's samples for validation, chosen uniformly at random.

    Client k gives floor(f o_{k+1} + u) - floor(f o_k + u) samples, with o the offsets and u ~ U(0, 1). This is f n_k on
    average and f n to within one in total. A client never gives its last sample, so clients with few samples give less.
    """
    if fraction == 0.0:
        return rows, offsets, rows[:0], np.zeros_like(offsets)
    sizes = np.diff(offsets)
    given = np.diff(np.floor(fraction * offsets + generator.random()).astype(np.int64))
    given = np.clip(given, 0, np.maximum(sizes - 1, 0))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((generator.random(len(rows)), owner))  # a random order within every client
    chosen = np.zeros(len(rows), bool)
    chosen[order[places_within(sizes) < np.repeat(given, sizes)]] = True
    return rows[~chosen], offsets_of(sizes - given), rows[chosen], offsets_of(given)


def balanced_rows(labels: Ints, classes: int, total: int = 0) -> Ints:
    """Return the rows (sorted) of a part with equal class totals: the first m of every class.

    Classes without samples are not counted. m is the smallest class's size, or, with a total, the class's share of it.
    """
    counts = np.bincount(labels, minlength=classes)
    if not counts.any():
        return np.arange(len(labels))
    present = int(np.count_nonzero(counts))
    keep = counts[counts > 0].min()
    if total:
        if total % present or total // present > keep:
            raise UserError(
                f"--test-total {total} is impossible. Choose a multiple of the {present} classes of the test part, "
                f"at most {keep * present}"
            )
        keep = total // present
    order = np.argsort(labels, kind="stable")
    return np.sort(order[places_within(counts) < keep])
