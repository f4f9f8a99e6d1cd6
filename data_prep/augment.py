"""Astraea's augmentation stored once: a prepared folder and its warped copies as a new folder of shards.

The copies equal those that a run with `rebalance.mode = "virtual"` and the same seed makes while reading (Duan et al.
2019, Algorithm 2). Runs on the new folder use `rebalance.mode = "stored"` and the same α.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.partitions import Partition
from data_prep.raw import RawDataset, described
from data_prep.writer import write_shards
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.common.types import AnyArray, Ints
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
    augmented = AugmentedStore(store, rebalancing, streams, part)
    named = store.client_ids.dtype.kind == "U"
    used = {"seed": seed} | {name: getattr(part, name) for name in COPIED}
    partition = Partition(
        rows=np.arange(int(augmented.offsets[-1])),
        offsets=augmented.offsets,
        law=manifest.partition,
        options=manifest.partition_options | {f"augment_{name}": value for name, value in used.items()},
        users=np.arange(store.clients) if named else store.client_ids,
        notes=(f"augmented: {int(rebalancing.added.sum())} copies, {rebalancing.overhead:.1%} of the samples",),
    )
    test_x, test_y = store.test()
    labels = np.concatenate([augmented.labels(client) for client in range(store.clients)])
    samples, rows = len(labels), np.arange(len(labels) + len(test_y))

    def read(rows: Ints) -> AnyArray:
        tested = rows >= samples
        found = np.empty((len(rows), *test_x.shape[1:]), test_x.dtype)
        found[~tested], found[tested] = augmented.rows(rows[~tested])[0], test_x[rows[tested] - samples]
        return found

    raw = RawDataset(
        name=manifest.dataset,
        class_names=tuple(manifest.class_names),
        read=read,
        y=np.concatenate([labels, test_y]),
        train=rows[:samples],
        test=rows[samples:],
        user_names=tuple(store.client_ids.tolist()) if named else None,
        skipped=manifest.skipped,
        licence=manifest.licence,
        citation=manifest.citation,
        extras={**store.extras, ORIGINAL_COUNTS: rebalancing.original_counts.astype(np.int32)},
        understood=manifest.understood,
        **described(store.description),
    )
    write_shards(raw, partition, out, len(store.shard_starts) - 1, manifest.seed, command, overwrite=overwrite)
    return rebalancing
