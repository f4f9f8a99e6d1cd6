"""Astraea's augmentation stored once: a prepared folder and its warped copies as a new folder of shards.

The copies equal those that a run with `rebalance.mode = "virtual"` and the same seed makes while reading (Duan et al.
2019, Algorithm 2). Runs on the new folder use `rebalance.mode = "stored"` and the same α.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.writer import write_again
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.config.tables import RebalanceTable
from fedmpi.data.augmentation import ORIGINAL_COUNTS, AugmentedStore, Rebalancing, rebalance
from fedmpi.data.shards import open_folder

COPIED = ("alpha", "copies", "rotation", "shear", "shift", "zoom")
"""Keys of `[rebalance]` that determine the copies."""


def write_augmented(
    folder: Path, out: Path, part: RebalanceTable, seed: int = 0, overwrite: bool = False, command: str = ""
) -> Rebalancing:
    """Write the shards of a folder again, with the augmented copies of every client after its samples.

    The copies are those of runs with this seed. `overhead` of the result is that of the paper's Fig 9.
    """
    if out.resolve() == folder.resolve():
        raise UserError(f"{out} is the folder to be augmented. Choose another --out")
    store = open_folder(folder)
    if store.validation() is not None:
        raise UserError(f"{folder} has a validation part, which would be lost. Prepare it again without --val")
    if ORIGINAL_COUNTS in store.extras:
        raise UserError(f"{folder} holds augmented copies already. Name the folder that it was made from")
    streams, manifest = Streams(seed), store.manifest
    rebalancing = rebalance(store.class_counts(), part.alpha, part.copies, streams)
    used = {"seed": seed} | {name: getattr(part, name) for name in COPIED}
    write_again(
        store,
        AugmentedStore(store, rebalancing, streams, part),
        out,
        len(store.shard_starts) - 1,
        manifest.seed,
        command,
        overwrite,
        {**store.extras, ORIGINAL_COUNTS: rebalancing.original_counts.astype(np.int32)},
        options=manifest.partition_options | {f"augment_{name}": value for name, value in used.items()},
        notes=(f"augmented: {int(rebalancing.added.sum())} copies, {rebalancing.overhead:.1%} of the samples",),
    )
    return rebalancing
