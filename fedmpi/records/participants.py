"""Who took part in a round, as a record says it: "0-9 12 15-16", each run of neighbouring clients by its ends."""

from __future__ import annotations

import numpy as np

from fedmpi.common.types import Ints


def told(clients: Ints) -> str:
    """The text of clients (m,), sorted and each once; "" of none."""
    if not len(clients):
        return ""
    first = np.flatnonzero(np.diff(clients, prepend=clients[0] - 2) != 1)
    last = np.append(first[1:], len(clients)) - 1
    runs = zip(clients[first].tolist(), clients[last].tolist(), strict=True)
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def heard(text: str) -> Ints:
    """The clients (m,) of such a text.

    Raises
    ------
    ValueError
        It is none.
    """
    ends = [[int(end) for end in run.split("-")] for run in text.split()]
    if any(len(run) > 2 for run in ends):
        raise ValueError(f"{text[:40]!r} does not name clients")
    runs = [np.arange(run[0], run[-1] + 1, dtype=np.int64) for run in ends]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)
