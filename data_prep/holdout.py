"""Parts held out of a partitioned data set: validation samples of every client, and a class-balanced test part."""

from __future__ import annotations

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.common.whole_numbers import offsets_of


def hold_out_validation(
    rows: Ints, offsets: Ints, fraction: float, generator: np.random.Generator
) -> tuple[Ints, Ints, Ints, Ints]:
    """Take a share of every client's samples for validation, chosen uniformly at random.

    Client k gives floor(f o_{k+1} + u) - floor(f o_k + u) samples, o the offsets and u ~ U(0, 1), which is f n_k on
    average and f n to within one in all, but never its last sample: among clients of few samples less is held out.

    Parameters
    ----------
    rows, offsets : int64 (n,), int64 (N + 1,)
        A partition.
    fraction : float
        f in [0, 1).

    Returns
    -------
    rows, offsets : int64 (n - v,), int64 (N + 1,)
        What is left for training.
    held, held_offsets : int64 (v,), int64 (N + 1,)
        What is held out, client after client.
    """
    if fraction == 0.0:
        return rows, offsets, rows[:0], np.zeros_like(offsets)
    sizes = np.diff(offsets)
    given = np.diff(np.floor(fraction * offsets + generator.random()).astype(np.int64))
    given = np.clip(given, 0, np.maximum(sizes - 1, 0))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((generator.random(len(rows)), owner))  # a random order within every client
    within = np.arange(len(rows)) - np.repeat(offsets[:-1], sizes)
    chosen = np.zeros(len(rows), bool)
    chosen[order[within < np.repeat(given, sizes)]] = True
    return rows[~chosen], offsets_of(sizes - given), rows[chosen], offsets_of(given)


def balanced_rows(labels: Ints, classes: int, total: int = 0) -> Ints:
    """Rows (sorted) of a part with equal class totals: of every class the first m.

    Classes without any sample are not counted. m is the smallest class's size, or, with a total, its share of it.

    Raises
    ------
    UserError
        The total is no multiple of the number of classes, or more than they hold.
    """
    counts = np.bincount(labels, minlength=classes)
    if not counts.any():
        return np.arange(len(labels))
    present = int(np.count_nonzero(counts))
    keep = counts[counts > 0].min()
    if total:
        if total % present or total // present > keep:
            raise UserError(
                f"--test-total {total} cannot be had: ask for a multiple of the {present} classes of the test part, "
                f"at most {keep * present}"
            )
        keep = total // present
    order = np.argsort(labels, kind="stable")
    rank = np.arange(len(labels)) - np.repeat(offsets_of(counts)[:-1], counts)
    return np.sort(order[rank < keep])
