"""The data that a configuration names, as a shard store, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmpi.common.data_choices import in_memory, is_digits
from fedmpi.common.errors import UserError
from fedmpi.data.arrays import arrays_of
from fedmpi.data.digits import open_digits
from fedmpi.data.shards import ShardStore, open_folder


def open_store(where: Any, options: Mapping[str, Any] | None = None, verify: bool = False) -> ShardStore:
    """Open the data that ``data.shards`` names."""
    if is_digits(where):
        return open_digits(str(where), options or {})
    if in_memory(where):
        return arrays_of(where, options or {}).store
    if options:
        raise UserError(f"data.{next(iter(options))} means nothing for the shard folder {where}: remove it")
    return open_folder(Path(where), verify)
