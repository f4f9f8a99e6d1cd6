"""Reading ahead: the system fetches what will be needed soon from disk while everybody computes; no thread, no copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from fedmpi.common.types import Ints

NEIGHBOURS = 64 << 10
"""Ranges closer than this, in bytes, are asked for as one: a request costs more than so much more data."""
MOST_RANGES = 256
MOST_BYTES = 256 << 20
"""What is asked for at once at most: pages that nobody has room for would be dropped before they are read."""


@dataclass(frozen=True)
class ReadRequest:
    """Ranges of a mapped file."""

    mapping: mmap.mmap
    starts: Ints  # (k,): Bytes of the mapping, starts ascending
    stops: Ints

    def joined(self) -> ReadRequest:
        """Neighbouring ranges made one, beginning on pages."""
        ends = np.maximum.accumulate(self.stops)
        first = np.concatenate([[True], self.starts[1:] - ends[:-1] > NEIGHBOURS])
        starts = self.starts[first] // mmap.PAGESIZE * mmap.PAGESIZE
        return ReadRequest(self.mapping, starts, np.append(ends[:-1][first[1:]], ends[-1]))


def read_ahead(requests: Sequence[ReadRequest]) -> None:
    """Have the system begin to read the ranges, the first ones only where they are many or large; does not wait."""
    ranges, room = MOST_RANGES, MOST_BYTES
    for request in map(ReadRequest.joined, requests):
        for start, stop in zip(request.starts.tolist(), request.stops.tolist(), strict=True):
            if not ranges or room <= 0:
                return
            length = min(stop - start, room)
            request.mapping.madvise(mmap.MADV_WILLNEED, start, length)
            ranges, room = ranges - 1, room - length


@cache
def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
