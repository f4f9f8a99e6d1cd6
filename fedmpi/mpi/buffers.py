"""Arrays over MPI as they lie in memory: a small int64 header, then bytes; no pickles, any length.

Messages longer than `CHUNK` bytes are cut, since most MPI libraries count in 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.types import AnyArray, Bytes, Ints

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK = 1 << 30
DTYPES = tuple(np.dtype(name) for name in ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
DIMENSIONS = 8
HEADER = 2 + DIMENSIONS


def header_of(array: AnyArray) -> Ints:
    """Dtype and shape of an array as int64 (HEADER,): dtype code, number of dimensions, shape."""
    if array.dtype not in DTYPES or array.ndim > DIMENSIONS:
        raise TypeError(f"cannot send {array.dtype} with {array.ndim} dimensions: numbers with up to {DIMENSIONS}")
    header = np.zeros(HEADER, np.int64)
    header[0] = DTYPES.index(array.dtype)
    header[1] = array.ndim
    header[2 : 2 + array.ndim] = array.shape
    return header


def dtype_and_shape(header: Ints) -> tuple[np.dtype, tuple[int, ...]]:
    """What `header_of` wrote."""
    return DTYPES[header[0]], tuple(int(length) for length in header[2 : 2 + header[1]])


def size_in_bytes(header: Ints) -> int:
    """Bytes of the array that the header describes."""
    dtype, shape = dtype_and_shape(header)
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def as_bytes(array: AnyArray) -> Bytes:
    """The array's values as uint8, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def broadcast_arrays(comm: MPI.Intracomm, arrays: Sequence[AnyArray] | None) -> list[AnyArray]:
    """Rank 0's arrays on every rank; the others pass None. All ranks have arrived when this is called."""
    number = np.array([0 if arrays is None else len(arrays)], np.int64)
    comm.Bcast(number, root=0)
    headers = np.zeros((number[0], HEADER), np.int64)
    if arrays is not None:
        for row, array in zip(headers, arrays, strict=True):
            row[:] = header_of(array)
    if not number[0]:
        return []
    comm.Bcast(headers, root=0)
    sizes = [size_in_bytes(header) for header in headers]
    if arrays is not None:
        payload = np.concatenate([as_bytes(array) for array in arrays])
    else:
        payload = np.empty(sum(sizes), np.uint8)
    for start in range(0, len(payload), CHUNK):
        comm.Bcast(payload[start : start + CHUNK], root=0)
    if arrays is not None:
        return list(arrays)
    pieces = np.split(payload, np.cumsum(sizes)[:-1])
    return [from_bytes(piece, header) for piece, header in zip(pieces, headers, strict=True)]


def from_bytes(payload: Bytes, header: Ints) -> AnyArray:
    """An array of its own out of its bytes."""
    dtype, shape = dtype_and_shape(header)
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = payload
    return array


def gather_arrays(comm: MPI.Intracomm, array: AnyArray) -> list[AnyArray] | None:
    """Every rank's array on rank 0, in rank order; None elsewhere. All ranks have arrived when this is called."""
    headers = np.empty((comm.size, HEADER), np.int64)
    comm.Allgather(header_of(array), headers)
    sizes = np.array([size_in_bytes(header) for header in headers], np.int64)
    received = [np.empty(shape, dtype) for dtype, shape in map(dtype_and_shape, headers)] if comm.rank == 0 else None
    mine = as_bytes(array)
    step = max(1, CHUNK // comm.size)
    for start in range(0, int(sizes.max()), step):
        lengths = np.clip(sizes - start, 0, step)
        if received is None:
            comm.Gatherv(mine[start : start + step], None, root=0)
            continue
        ends = np.cumsum(lengths)
        staging = np.empty(ends[-1], np.uint8)
        comm.Gatherv(mine[start : start + step], [staging, (lengths, ends - lengths)], root=0)
        for whole, piece in zip(received, np.split(staging, ends[:-1]), strict=True):
            whole.reshape(-1).view(np.uint8)[start : start + len(piece)] = piece
    return received


def exchange_parts(
    comm: MPI.Intracomm, outgoing: NDArray[np.floating], sent: Ints, incoming: NDArray[np.floating], received: Ints
) -> None:
    """Neighbouring parts of `outgoing`, one a rank, into neighbouring parts of `incoming` (Alltoallv).

    All ranks have arrived when this is called.
    """
    from mpi4py import MPI

    kind = MPI.DOUBLE if outgoing.dtype == np.float64 else MPI.FLOAT

    def spec(values: NDArray[np.floating], counts: Ints) -> list[object]:
        return [values, (counts, np.cumsum(counts) - counts), kind]

    comm.Alltoallv(spec(outgoing, sent), spec(incoming, received))
