"""TensorFlow Federated's HDF5 files: a group examples/CLIENT for each client, with an array for each field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from data_prep.datasets.files import chosen_users
from fedmpi.common.errors import UserError

EXAMPLES = "examples"
DAMAGED = (OSError, KeyError, ValueError, AttributeError, TypeError, RuntimeError, MemoryError)


def tff_clients(
    path: Path, fields: tuple[str, ...], users: int | None = None, per_user: int | None = None
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    """The clients of a file in the order of their names, each with the arrays of some fields.

    Parameters
    ----------
    path : Path
    fields : tuple of str
    users : int or None
        Read so many of the clients, the same ones every time; None reads all.
    per_user : int or None
        Read so many samples of each, the first ones; None reads all.

    Raises
    ------
    UserError
        The file is damaged, or lacks a field.
    """
    name = "none yet"
    try:
        with h5py.File(path, "r") as file:
            for name in chosen_users(list(file[EXAMPLES]), users):
                group = file[EXAMPLES][name]
                yield name, {field: group[field][:per_user] for field in fields}
    except DAMAGED as error:
        raise UserError(
            f"{path}, client {name}: not a TFF file ({EXAMPLES}/CLIENT with {', '.join(fields)}): {error}; fetch it "
            "again"
        ) from error


def texts(values: NDArray[Any]) -> list[str]:
    """Stored strings as texts; bytes that are no UTF-8 as replacement characters."""
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]
