"""Which worker owns which clients: contiguous ranges, balanced by samples, on shard borders where there are enough."""

from __future__ import annotations

import numpy as np

from fedmpi.common.types import Ints


def ownership(sizes: Ints, shard_starts: Ints, workers: int) -> Ints:
    """Boundaries of the workers' client ranges.

    With at least as many shards as workers a worker owns whole shards, else whole clients. Each boundary is the one
    nearest to an equal division of the samples that leaves every worker a shard (or client), so no worker holds more
    than its equal part plus the largest shard (or client). Workers beyond the number of clients get empty ranges.
    """
    if workers < 1:
        raise ValueError(f"there must be at least one worker, not {workers}")
    clients = len(sizes)
    borders = shard_starts if len(shard_starts) - 1 >= workers else np.arange(clients + 1)
    units = len(borders) - 1
    busy = min(workers, units)
    before = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[borders]
    targets = before[-1] * np.arange(busy + 1) / busy
    chosen = np.zeros(busy + 1, np.int64)
    chosen[busy] = units
    for worker in range(1, busy):
        chosen[worker] = np.clip(_nearest(before, targets[worker]), chosen[worker - 1] + 1, units - (busy - worker))
    boundaries = np.full(workers + 1, clients, np.int64)
    boundaries[: busy + 1] = borders[chosen]
    return boundaries


def _nearest(ascending: Ints, target: float) -> int:
    right = int(np.searchsorted(ascending, target))
    if right == 0 or (right < len(ascending) and ascending[right] - target < target - ascending[right - 1]):
        return right
    return right - 1
