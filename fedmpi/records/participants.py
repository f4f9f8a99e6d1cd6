"""Who took part in a round, as a record says it: "0-9 12 15-16", each run of neighbouring clients by its ends."""

from __future__ import annotations

import re

import numpy as np

from fedmpi.common.types import Ints


def clients_as_text(clients: Ints) -> str:
    """The text of clients (m,), sorted and each once; "" of none."""
    if not len(clients):
        return ""
    first = np.flatnonzero(np.diff(clients, prepend=clients[0] - 2) != 1)
    last = np.append(first[1:], len(clients)) - 1
    runs = zip(clients[first].tolist(), clients[last].tolist(), strict=True)
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def clients_from_text(text: str) -> Ints:
    """The clients (m,) of such a text."""
    ends = [run.split("-") for run in text.split()]
    if any(len(run) > 2 for run in ends):
        raise ValueError(f"{text[:40]!r} does not name clients")
    first = np.array([int(run[0]) for run in ends], np.int64)
    lengths = np.array([int(run[-1]) for run in ends], np.int64) + 1 - first
    if (lengths < 1).any():
        raise ValueError(f"{text[:40]!r} does not name clients in ascending order")
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def largest_client(text: str) -> int:
    """The largest number in such a text, which is not spelt out for that; -1 of none."""
    return max(map(int, re.findall(r"\d+", text)), default=-1)
