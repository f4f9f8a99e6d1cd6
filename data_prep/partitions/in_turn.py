"""Draws in turn: samples are drawn one after another from the clients' own class mixes, out of a finite stock."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.types import Floats, Ints
from fedmpi.data.assignment import Rows

_CELLS = 1 << 22  # bounds the memory of the mixes that are looked up at once


def draw_in_turn(
    turns: Ints, stock: Ints, mixes: Floats, generator: np.random.Generator, families: Ints | None = None
) -> Ints:
    """Classes of samples that clients draw one after another, without replacement.

    The sample of turn t is of a class drawn from the mix of client ``turns[t]``, restricted to the classes of which
    samples are left: within the family of each class first, among the families that have any left after that. Where a
    client's mix has no mass on what is left, its mix is that of the whole stock, restricted likewise, families or not.

    Drawn together instead of one after another, with the same law: everybody draws from the full mix; the turn at which
    a class has run out is found, and the later turns that drew it draw again from what is left; and so on. A turn that
    drew another class keeps it, since its law given that it is not the class that ran out is the restricted mix.
    """
    if len(turns) > stock.sum():
        raise ValueError(f"{len(turns)} samples asked for, {stock.sum()} in stock")
    families = np.arange(len(stock)) if families is None else np.unique(families, return_inverse=True)[1]
    left = stock > 0
    drawn = np.empty(len(turns), np.min_scalar_type(len(stock)))
    places = np.arange(len(turns))
    drawn[:] = _again(places, turns, mixes, families, left, left, stock, generator)
    before = 0  # turns that are decided
    rest = stock.astype(np.int64)
    while True:
        tail = drawn[before:]
        counts = np.bincount(tail, minlength=len(stock))
        over = np.flatnonzero(counts > rest)
        if not len(over):
            return drawn.astype(np.int64)
        order = np.argsort(tail, kind="stable")
        beyond = order[offsets_of(counts)[over] + rest[over]]  # the first turn of each that finds none left
        gone, turn = int(over[beyond.argmin()]), int(beyond.min())
        rest = rest - np.bincount(tail[:turn], minlength=len(stock))
        before += turn
        left[gone] = False
        late = before + np.flatnonzero(drawn[before:] == gone)
        relatives = left & (families == families[gone])
        drawn[late] = _again(late, turns, mixes, families, relatives, left, stock, generator)


def _again(
    late: Ints,
    turns: Ints,
    mixes: Floats,
    families: Ints,
    first: npt.NDArray[np.bool_],
    left: npt.NDArray[np.bool_],
    stock: Ints,
    generator: np.random.Generator,
) -> Ints:
    """Classes of some turns, drawn from the mixes restricted to the classes `first`, families keeping their mass.

    A client without mass on these draws from its mix restricted to those `left`, and without mass there from the whole
    stock's.
    """
    everything = np.where(left, stock, 0).astype(np.float64)
    drawn = np.empty(len(late), np.int64)
    clients, whose = np.unique(turns[late], return_inverse=True)
    uniform = generator.random(len(late))
    step = max(1, _CELLS // len(stock))
    order = np.argsort(whose, kind="stable")
    cuts = np.searchsorted(whose[order], np.arange(0, len(clients) + step, step))
    for block, low in enumerate(range(0, len(clients), step)):
        own = mixes[clients[low : low + step]]
        mass = _restricted(own, families, first)
        nothing = mass.sum(axis=1) == 0
        mass[nothing] = _restricted(own[nothing], families, left)
        mass[mass.sum(axis=1) == 0] = everything
        ends = np.cumsum(mass, axis=1)
        ends /= ends[:, -1:]
        last = mass.shape[1] - 1 - (mass[:, ::-1] > 0).argmax(axis=1)
        mine = order[cuts[block] : cuts[block + 1]]
        row = whose[mine] - low
        flat = (ends + np.arange(len(ends))[:, None]).ravel()
        found = np.searchsorted(flat, uniform[mine] + row, side="right") - row * mass.shape[1]
        drawn[mine] = np.minimum(found, last[row])
    return drawn


def _restricted(mixes: Floats, families: Ints, among: npt.NDArray[np.bool_]) -> Floats:
    """Mixes (m, C) on some classes only, every family with any of them keeping its mass."""
    mass = mixes * among
    count = int(families.max()) + 1
    if count == len(families):
        return mass
    belongs = np.zeros((len(families), count))
    belongs[np.arange(len(families)), families] = 1.0
    whole, kept = mixes @ belongs, mass @ belongs
    scale = np.divide(whole, kept, out=np.zeros_like(kept), where=kept > 0)
    restricted: Floats = mass * scale[:, families]
    return restricted


def rows_of_turns(labels: Ints, turns: Ints, drawn: Ints, clients: int, generator: np.random.Generator) -> Rows:
    """Rows and offsets of clients from the classes of their turns: every turn gets a random row of its class."""
    classes = int(max(labels.max(initial=0), drawn.max(initial=0))) + 1
    shuffled = generator.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = offsets_of(np.bincount(labels, minlength=classes))
    order = np.argsort(drawn, kind="stable")
    counts = np.bincount(drawn, minlength=classes)
    rank = np.arange(len(drawn)) - np.repeat(offsets_of(counts)[:-1], counts)
    rows = np.empty(len(drawn), np.int64)
    rows[order] = by_class[starts[drawn[order]] + rank]
    back = np.argsort(turns, kind="stable")
    return rows[back], offsets_of(np.bincount(turns, minlength=clients))
