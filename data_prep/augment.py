"""Astraea's augmentation stored once: a prepared folder and its warped copies as a new folder of shards.

    python -m data_prep.augment shards/emnist --alpha 0.67 --out shards/emnist-augmented

The copies equal those that a run with `rebalance.mode = "virtual"` and the same seed makes while reading (Duan et al.
2019, Algorithm 2). Runs on the new folder use `rebalance.mode = "stored"` and the same α.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from data_prep.partitions import Partition
from data_prep.raw import RawDataset, described
from data_prep.writer import write_shards
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.config.server_tables import RebalanceTable
from fedmpi.data.augmentation import ORIGINAL_COUNTS, AugmentedStore, Rebalancing, rebalance
from fedmpi.data.shards import open_folder
from fedmpi.mpi import read_launch
from fedmpi.process.exit_codes import run_guarded

Reading = Literal["ratio", "ratio-minus-one"]
_DEFAULTS = RebalanceTable()


def write_augmented(
    folder: Path,
    out: Path,
    part: RebalanceTable,
    seed: int = 0,
    overwrite: bool = False,
    command: str = "",
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
    streams = Streams(seed)
    rebalancing = rebalance(store.class_counts(), part.alpha, part.copies, streams)
    augmented, manifest = AugmentedStore(store, rebalancing, streams, part), store.manifest
    named = store.client_ids.dtype.kind == "U"
    partition = Partition(
        rows=np.arange(int(augmented.offsets[-1])),
        offsets=augmented.offsets,
        law=manifest.partition,
        options=manifest.partition_options
        | {"augment_alpha": part.alpha, "augment_copies": part.copies, "augment_seed": seed}
        | {f"augment_{name}": getattr(part, name) for name in ("rotation", "shear", "shift", "zoom")},
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


def augment(
    folder: Annotated[Path, typer.Argument(help="a prepared folder of images")],
    out: Annotated[Path, typer.Option(help="the folder to write")],
    alpha: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="α: (C̄/C_y)^α copies of every sample of a scarce class")
    ] = 0.67,
    copies: Annotated[Reading, typer.Option(help="ratio: so many copies; ratio-minus-one: one less")] = "ratio",
    seed: Annotated[int, typer.Option(min=0, help="seed of the runs whose copies these are")] = 0,
    rotation: Annotated[float, typer.Option(min=0.0, max=180.0, help="largest angle, in degrees")] = _DEFAULTS.rotation,
    shear: Annotated[float, typer.Option(min=0.0, max=89.0, help="largest angle, in degrees")] = _DEFAULTS.shear,
    shift: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="largest shift, as a share of the side")
    ] = _DEFAULTS.shift,
    zoom: Annotated[float, typer.Option(min=0.0, max=0.99, help="scales 1 - zoom to 1 + zoom")] = _DEFAULTS.zoom,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what is in --out")] = False,
) -> None:
    """Store the augmented copies of scarce classes, for example

    python -m data_prep.augment shards/emnist --alpha 0.67 --out shards/emnist-augmented
    """
    command = shlex.join(["python", "-m", "data_prep.augment", *sys.argv[1:]])
    try:
        part = RebalanceTable(alpha=alpha, copies=copies, rotation=rotation, shear=shear, shift=shift, zoom=zoom)
        done = write_augmented(folder, out, part, seed, overwrite, command)
    except UserError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    original = int(done.sizes.sum() - done.added.sum())
    print(f"{out}: {original} samples and {int(done.added.sum())} copies, storage overhead {done.overhead:.1%}")
    print(f'train on it with rebalance.mode = "stored", rebalance.alpha = {alpha}, rebalance.copies = "{copies}"')


def main() -> None:
    """Entry point: any failure ends all processes of the job."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(augment)
    launch = read_launch()
    run_guarded(app if launch is None or not launch.rank else lambda: None)


if __name__ == "__main__":
    main()
