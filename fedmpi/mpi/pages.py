"""Pages in a node's shared memory that rank 0 writes and the others read: small arrays, by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from fedmpi.common.types import AnyArray, Bytes
from fedmpi.mpi.buffers import HEADER, as_bytes, from_bytes, header_of, size_in_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

PAGE = 1 << 20
"""Bytes of a page: a plan of 60,000 participants. What is larger goes through MPI."""
PAGES = 2
NUMBER, ARRAYS, TITLE = 0, 1, 2
"""Of a page's first values: what number it has, how many arrays lie on it, and how many such values there are."""
NOTHING, TOO_LARGE = -1, -1


class Pages:
    """Two pages, written in turns: what has an even number lies on the first one.

    Who writes a number has to know that all have read the number before the last one. All ranks of the node build it
    together.
    """

    def __init__(self, node: MPI.Intracomm):
        from mpi4py import MPI

        self._window = MPI.Win.Allocate_shared(PAGES * PAGE if node.rank == 0 else 0, 1, comm=node)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory, _ = self._window.Shared_query(0)
        self._pages: Bytes = np.ndarray((PAGES, PAGE), np.uint8, cast(bytes, memory))
        if node.rank == 0:
            self._pages[:] = 0  # takes the memory now: where none is left in the middle of a run, writing is deadly
            self._pages.view(np.int64)[:, NUMBER] = NOTHING
        self._window.Sync()
        node.Barrier()

    def write(self, number: int, arrays: Sequence[AnyArray]) -> None:
        """Put these arrays on the page of this number; of too large ones only that they are."""
        page = self._pages[number % PAGES]
        values = page.view(np.int64)
        headers = np.array([header_of(array) for array in arrays], np.int64).reshape(len(arrays), HEADER)
        start = 8 * (TITLE + headers.size)
        fits = start + sum(array.nbytes for array in arrays) <= PAGE
        values[ARRAYS] = len(arrays) if fits else TOO_LARGE
        if fits:
            values[TITLE : TITLE + headers.size] = headers.ravel()
            for array in arrays:
                page[start : start + array.nbytes] = as_bytes(array)
                start += array.nbytes
        self._window.Sync()
        values[NUMBER] = number

    def has(self, number: int) -> bool:
        """Whether this number has been written, and nothing after it on its page."""
        self._window.Sync()
        return bool(self._pages[number % PAGES].view(np.int64)[NUMBER] == number)

    def read(self, number: int) -> list[AnyArray] | None:
        """Copies of the arrays of this number, which has been written; None where they are too large for a page."""
        if not self.has(number):
            raise RuntimeError(f"page {number} has not been written")
        page = self._pages[number % PAGES]
        values = page.view(np.int64)
        count = int(values[ARRAYS])
        if count == TOO_LARGE:
            return None
        headers = values[TITLE : TITLE + count * HEADER].reshape(count, HEADER)
        arrays, start = [], 8 * (TITLE + headers.size)
        for header in headers:
            end = start + size_in_bytes(header)
            arrays.append(from_bytes(page[start:end], header))
            start = end
        return arrays

    def close(self) -> None:
        """Give the memory back; collective."""
        self._window.Unlock_all()
        self._window.Free()
