"""The data that a configuration names, as a shard store, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.data_choices import in_memory, is_digits
from fedmpi.common.errors import UserError
from fedmpi.data.arrays import arrays_of
from fedmpi.data.embedded import open_digits
from fedmpi.data.shards import ShardStore, open_folder


def open_store(where: Any, options: Mapping[str, Any] | None = None, verify: bool = False) -> ShardStore:
    """Open the data that ``data.shards`` names.

    Parameters
    ----------
    where : str, Path, ClientArrays or function
        A folder written by data_prep, or ``"digits"``, or ``"digits:clients=50,partition=iid"`` (see
        `fedmpi.data.embedded.DigitsOptions`). A folder of that name is reached as ``"./digits"``. Or data in memory:
        ClientArrays, or a function that gives them, itself or as ``"package.module:function"``.
    options : mapping, optional
        Options of the embedded digits, over those in `where`, or of the function.
    verify : bool
        Also compare every file's sha256 with the manifest, and look at every value (reads everything twice).

    Raises
    ------
    UserError
        The folder or a file in it is missing, damaged or of another schema, or an option of the digits is wrong.
    """
    if is_digits(where):
        return open_digits(str(where), options or {})
    if in_memory(where):
        return arrays_of(where, options or {}).store
    if options:
        raise UserError(f"data.{next(iter(options))} means nothing for the shard folder {where}: remove it")
    return open_folder(Path(where), verify)
