"""Checks of row rules: sorted local rows in range that depend on the client and the round alone; cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.samples.row_rule import Pool, RowClient
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice
from fedmpi.testing.cost import CLIENTS, cost

SIZES = np.array([5, 1, 40, 12, 300, 2, 17])
CLASSES, STREAMS = 4, Streams(13)


def row_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a row rule but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: exercise(s)))
    yield subject.check("same rows from the same generator", lambda s: same_twice(lambda: exercise(s)))
    yield subject.check("rows sorted and in range", sorted_in_range)
    yield subject.check("rows do not depend on who else is asked", independent)
    yield subject.check(f"cost with {CLIENTS:,} clients", lambda s: cost(np.arange, lambda k: _round(s, k)))


def pooled(subject: Subject) -> bool:
    """Whether the rule is asked for the whole cohort at once."""
    return bool(subject.mark("pooled", False))


def client(index: int, round: int, wanted: int | None = None) -> RowClient:
    """A made-up client whose classes are unevenly common."""
    size = int(SIZES[index])
    labels = (np.arange(size) ** 2 // 3 + index) % CLASSES
    labels.flags.writeable = False
    share = float(size) if wanted is None else min(float(size), wanted * size / SIZES.sum())
    return RowClient(index, round, labels, STREAMS.generator(Purpose.ROWS, round, index), share)


def pool(subject: Subject, round: int, start: int = 0, stop: int | None = None) -> Pool:
    """The same clients on one axis."""
    wanted = subject.settings.get("samples.wanted")
    probability = 1.0 if wanted is None else min(1.0, wanted / int(SIZES.sum()))
    return Pool(round, SIZES, start, int(SIZES.sum()) if stop is None else stop, probability, wanted, STREAMS)


def rows_of_all(subject: Subject, round: int, elsewhere: bool = False) -> list[Ints]:
    """Every client's rows, or the positions of the whole pool, asked of a rule made afresh; in another order where
    `elsewhere`."""
    made, wanted = subject.made(), subject.settings.get("samples.wanted")
    if pooled(subject):
        return [np.asarray(made(pool(subject, round)))]
    order = [*range(1, len(SIZES)), 0] if elsewhere else range(len(SIZES))
    found = {k: np.asarray(made(client(k, round, wanted))) for k in order}
    return [found[k] for k in range(len(SIZES))]


def exercise(subject: Subject) -> list[Ints]:
    """The rows of two rounds."""
    return [rows for round in (0, 5) for rows in rows_of_all(subject, round)]


def sorted_in_range(subject: Subject) -> str:
    """Whole numbers from 0 below the number of samples, each once, in rising order."""
    used = 0
    for round in range(20):
        for k, rows in enumerate(rows_of_all(subject, round)):
            whose = "the pool's" if pooled(subject) else f"client {k}'s"
            size = int(SIZES.sum()) if pooled(subject) else int(SIZES[k])
            demand(rows.ndim == 1, f"{whose} rows have the shape {rows.shape}: return (r,)")
            demand(not rows.size or np.issubdtype(rows.dtype, np.integer), f"{whose} rows are {rows.dtype}, not whole")
            wrong = rows[(rows < 0) | (rows >= size)]
            demand(not wrong.size, f"{whose} row {wrong[:1]} lies outside 0 … {size - 1}")
            demand(bool((np.diff(rows) > 0).all()), f"{whose} rows are not sorted, or one is there twice: {rows[:12]}")
            used += len(rows)
    return f"{used / 20:.1f} of {int(SIZES.sum())} rows a round, over 20 rounds"


def independent(subject: Subject) -> str:
    """On another rank other clients come before: a client's rows may not depend on them."""
    for round in (0, 5):
        if pooled(subject):
            (whole,) = rows_of_all(subject, round)
            cuts = [0, 9, 60, 61, int(SIZES.sum())]
            parts = [subject.made()(pool(subject, round, *cut)) for cut in zip(cuts, cuts[1:], strict=False)]
            demand(
                np.array_equal(whole, np.concatenate(parts)),
                "parts of the axis drawn alone differ from the same parts of the whole: ranks draw parts. Let every "
                "block of the axis have its own generator, pool.generator(block)",
            )
            continue
        for k, (one, other) in enumerate(
            zip(rows_of_all(subject, round), rows_of_all(subject, round, True), strict=True)
        ):
            demand(
                np.array_equal(one, other),
                f"client {k} has other rows when the clients are asked in another order, as on another rank: keep "
                "nothing between calls, draw from client.generator alone",
            )
    return "in parts, the same" if pooled(subject) else "in another order, the same"


def _round(subject: Subject, clients: Ints) -> None:
    """A round of all clients for a pooled rule, of every fiftieth for one that is asked client by client."""
    made, wanted = subject.made(), subject.settings.get("samples.wanted")
    if pooled(subject):
        sizes = 1 + clients % 20
        probability = 1.0 if wanted is None else min(1.0, wanted / int(sizes.sum()))
        made(Pool(3, sizes, 0, int(sizes.sum()), probability, wanted, STREAMS))
        return
    for k in clients[::50].tolist():
        made(client(k % len(SIZES), k, wanted))
