"""TensorFlow Federated's HDF5 files: a group examples/CLIENT for each client, with an array for each field."""

from __future__ import annotations

import math
from collections.abc import Iterator
from gzip import GzipFile
from pathlib import Path
from typing import Any

import h5py

from data_prep.datasets.raw_files import chosen_users, open_bytes
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray

EXAMPLES = "examples"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
MOST_BYTES = 2**31
"""Of one array of one client, unpacked, or of one of its pieces: far beyond what a client has."""
DAMAGED = (OSError, KeyError, ValueError, AttributeError, TypeError, RuntimeError, MemoryError)


def tff_clients(
    path: Path, fields: tuple[str, ...], users: int | None = None, per_user: int | None = None, uneven: bool = False
) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """The clients of a file in the order of their names, each with the arrays of some fields."""
    with open_bytes(path) as stream:
        if isinstance(stream, GzipFile) or stream.read(len(SIGNATURE)) != SIGNATURE:
            raise UserError(f"{path} is not an HDF5 file; unpack it if it is compressed, or fetch it again")
    name = "none yet"
    try:
        with h5py.File(path, "r", locking=False) as file:  # not every file system has locks, and nothing is written
            clients = _held(file, EXAMPLES, h5py.Group)
            for name in chosen_users(list(clients), users):
                group = _held(clients, name, h5py.Group)
                arrays = {field: _array(group, field, per_user) for field in fields}
                if not uneven and len({len(values) for values in arrays.values()}) > 1:
                    raise ValueError("a field has more samples than another")
                yield name, arrays
    except DAMAGED as error:
        raise UserError(
            f"{path}, client {name}: not a TFF file ({EXAMPLES}/CLIENT with {', '.join(fields)}): {error}; fetch it "
            "again"
        ) from error


def _held(group: h5py.Group, name: str, kind: type) -> Any:
    """A group or dataset of this very file; what a file only points to may be any other file of the user's."""
    if not isinstance(group.get(name, getlink=True), h5py.HardLink | None) or not isinstance(group[name], kind):
        raise ValueError(f"{name!r} is no {kind.__name__.lower()} of this file")
    return group[name]


def _array(group: h5py.Group, field: str, per_user: int | None) -> AnyArray:
    dataset = _held(group, field, h5py.Dataset)
    if dataset.is_virtual or dataset.external:
        raise ValueError(f"{field!r} is kept in another file")
    rows = len(dataset) if per_user is None else min(per_user, len(dataset))
    piece = math.prod(dataset.chunks or (0,))
    if max(rows * math.prod(dataset.shape[1:]), piece) * dataset.dtype.itemsize > MOST_BYTES:
        raise ValueError(f"{field!r} of {dataset.shape} values is more than a client has")
    array: AnyArray = dataset[:per_user]
    return array


def texts(values: AnyArray, where: str) -> list[str]:
    """Stored strings, one a row, as texts; bytes that are no UTF-8 as replacement characters."""
    if values.ndim != 1 or not all(isinstance(value, bytes | str) for value in values.tolist()):
        raise UserError(f"{where} holds {values.dtype} {values.shape} where texts belong; fetch the file again")
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]
