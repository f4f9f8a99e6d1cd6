"""Validation samples of one client of a store."""

from __future__ import annotations

from fedmpi.data.shards import Samples, ShardStore


def validation_of(store: ShardStore, client: int) -> Samples:
    """Return the features and labels that are held out of one client, in the stored types."""
    part, offsets = store.validation(), store.validation_offsets
    assert part is not None and offsets is not None
    rows = slice(offsets[client], offsets[client + 1])
    return part[0][rows], part[1][rows]
