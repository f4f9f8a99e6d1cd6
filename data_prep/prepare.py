"""One preparation from the command line to the shards: check the options, find the files, read, partition, write.

SIGINT and SIGTERM unwind the preparation, so that no partial file remains.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_prep.datasets import data_set, read_own
from data_prep.download import fetch
from data_prep.output import check_folder
from data_prep.partitions import Request, completed, partition
from data_prep.parts import parse_options
from data_prep.raw import DataSet, ReadOptions, Tally
from data_prep.shifts import LABEL_NOISE, SHIFT, shifted, with_label_noise
from data_prep.writer import check_numbers, write_shards
from fedmpi.common.errors import MissingFiles, UserError
from fedmpi.common.registry import Component, resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.mpi import Cluster

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


def catch_signals() -> None:
    """Turn the signals into `KeyboardInterrupt`; one that the parent ignored stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def signal_code() -> int:
    """Return the exit code of a process ended by a signal."""
    return 128 + (_received[0] if _received else int(signal.SIGINT))


@contextmanager
def _shown_bytes(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Give a function that shows how many bytes are written of how many, on a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("writing"), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)

        def update(done: int, total: int) -> None:
            if _received:  # Python drops exceptions raised in a weak reference's callback
                raise KeyboardInterrupt
            bar.update(task, completed=done, total=total)

        yield update


@dataclass(frozen=True)
class Job:
    """One preparation as requested on the command line, by the parameters of the command."""

    dataset: str
    partition: str
    out: Path
    clients: int | None  # N; None if the scheme counts them
    shards: int
    seed: int
    raw: Path | None
    download: bool
    val: float
    feature_shift: str | None
    label_noise: str | None
    strict: bool
    overwrite: bool
    words: Sequence[str]  # Options of the chosen components, as written
    reserved: Sequence[str]  # Names of the command's own options
    command: str  # The command line, for the manifest


def prepare(job: Job, console: Console, cluster: Cluster) -> None:
    """Write the shards of one job, after checking everything that can be checked before the data are read.

    With several processes, each reads and partitions the same data, and writes its share of the shards.
    """
    data, options, law, given = _checked(job)
    console.print(f"{data.name}: licence: {data.licence}", f"cite: {data.citation}", sep="\n", markup=False)
    folder = _locate(data, job)
    if folder is None:  # rank 0 downloads, then the others find the files in the cache
        if not cluster.is_server:
            cluster.barrier()
        folder = fetch(data.name, data.sources)
        if cluster.is_server:
            cluster.barrier()
    tally = Tally(strict=job.strict)
    if data.own is None:
        raw = data.read(folder, options, tally)
    else:
        raw = read_own(data.own, given[data.own], folder, options, tally)
    if tally.unreadable:
        console.print(f"rows that cannot be read, left out: {tally.unreadable:,}.{tally.first_bad}", markup=False)
    for rule, count in tally.dropped.items():
        console.print(f"left out: {count:,} {rule}", markup=False)
    request = Request(
        np.asarray(raw.labels, np.int64),
        raw.label_classes,
        job.clients,
        Streams(job.seed).generator(Purpose.PARTITION),
        raw.users,
        raw.class_names if raw.has_classes else (),
        raw.superclasses,
        raw.attribute,
    )
    drawn = partition(job.partition, request, raw.labeled, **given[law])
    noted = (*tally.notes, *drawn.notes)
    console.print(f"partition {job.partition}: {law.title} Seed {job.seed}", markup=False)
    changed = raw
    for part in given:
        if part.kind == SHIFT:
            changed = shifted(changed, drawn, part, given[part], job.seed)
        elif part.kind == LABEL_NOISE:
            changed = with_label_noise(changed, drawn, part, given[part], job.seed)
    for note in noted:
        console.print(f"note: {note}", markup=False)
    with _shown_bytes(console) as progress:
        manifest = write_shards(
            changed, drawn, job.out, job.shards, job.seed, job.command, job.val, job.overwrite, progress, cluster
        )
    for note in manifest.notes:
        if note not in (*raw.notes, *noted):
            console.print(f"note: {note}", markup=False)


def check_job(job: Job) -> None:
    """Raise the errors that can be found before data are read or downloaded."""
    data = _checked(job)[0]
    check_folder(job.out, job.overwrite)
    _locate(data, job)  # last, since missing files need not stop the other checks
    if job.raw is not None and job.raw.is_dir() and os.access(job.raw, os.R_OK) and not any(job.raw.iterdir()):
        raise MissingFiles(f"--raw {job.raw} is empty; it must name {data.files}")


def _checked(job: Job) -> tuple[DataSet, ReadOptions, Component, dict[Component, dict[str, Any]]]:
    """Return the data set, how to read it, the partition scheme, and the options given to each component."""
    data, law = data_set(job.dataset), resolve("partition", job.partition)
    named = ((SHIFT, job.feature_shift), (LABEL_NOISE, job.label_noise))
    own = [data.own] if data.own is not None else []
    parts = [data.reading, *own, law, *(resolve(kind, name) for kind, name in named if name is not None)]
    texts = parse_options(job.words, parts, job.reserved)
    given = {part: part.checked(texts[part]) for part in parts}
    completed(law, job.clients, given[law])
    check_numbers(job.shards, job.val)
    return data, ReadOptions(**given[parts[0]]), law, given


def _locate(data: DataSet, job: Job) -> Path | None:
    """Return the folder or file to read; None if it is to be downloaded."""
    if job.raw is not None and job.download:
        raise UserError("--raw and --download exclude each other; give one of them")
    if data.raw == "none":
        if job.raw is not None or job.download:
            raise UserError(f"{data.name} is built in; leave out --raw and --download")
        return Path()
    page = f" (from {data.page})" if data.page else ""
    kind = "FILE" if data.raw == "file" else "DIR"
    if job.download:
        if not data.sources:
            raise UserError(
                f"{data.name} has no address with a published checksum; fetch it by hand{page} and pass --raw {kind} "
                f"with {data.files}"
            )
        return None
    if job.raw is None:
        alternative = " or --download" if data.sources else ""
        raise UserError(f"where is {data.name}? give --raw {kind}{alternative}; --raw names {data.files}{page}")
    if not job.raw.exists():
        raise MissingFiles(f"--raw {job.raw} does not exist; it must name {data.files}{page}")
    return job.raw
