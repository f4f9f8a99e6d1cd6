"""One preparation from the checked command line to the shards: find the files, read, partition, write.

SIGINT and SIGTERM unwind the preparation, so that no partial file remains.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_prep.datasets import data_set, read_own
from data_prep.download import fetch
from data_prep.options import FLAGS, Given
from data_prep.output import check_folder
from data_prep.partitions import PARTITIONS, Law, completed, flag, law_of, partition
from data_prep.raw import DataSet, ReadOptions, Tally
from data_prep.shifts import LABEL_NOISE, SHIFT, shifted, with_label_noise
from data_prep.writer import check_numbers, write_shards
from fedmpi.common.errors import MissingFiles, UserError
from fedmpi.common.registry import components as parts_of
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.mpi import Cluster

SECONDS_BETWEEN_LINES = 5.0
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


def check_signals() -> None:
    """Raise `KeyboardInterrupt` again if it was lost: Python drops exceptions raised in a weak reference's callback."""
    if _received:
        raise KeyboardInterrupt


def signal_code() -> int:
    """Return the exit code of a process ended by a signal."""
    return 128 + (_received[0] if _received else int(signal.SIGINT))


class WriteDisplay:
    """Display of the bytes written; a context manager whose `update` is the writer's progress callback."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._shown = time.perf_counter()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("writing"), *columns, console=console)
            self._task = self._bar.add_task("writing", total=None)

    def __enter__(self) -> WriteDisplay:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        now = time.perf_counter()
        if done >= total or now - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = now
            rate = done / max(now - self._started, 1e-9) / 1e6
            self._console.print(f"writing {done / 1e6:.1f} of {total / 1e6:.1f} MB  {rate:.0f} MB/s", markup=False)


@dataclass(frozen=True)
class Job:
    """One preparation as requested on the command line."""

    name: str  # The data set
    raw: Path | None  # Location of its files
    download: bool  # True to download them
    law: str  # Partition scheme
    clients: int | None  # N; None if the scheme counts them
    shards: int  # Training shards
    seed: int  # Seed of the partition and the validation part
    out: Path  # Output folder
    val: float  # Share of every client's samples for validation
    strict: bool  # Reject unreadable rows
    overwrite: bool  # Replace the output of a previous preparation
    command: str  # The command line, for the manifest
    given: Given  # Options of the data set, the partition and the sample changes
    shift: str | None = None  # Shift of features and labels by client
    label_noise: str | None = None


def prepare(job: Job, console: Console, cluster: Cluster) -> None:
    """Write the shards of one job, after checking everything that can be checked before the data are read.

    With several processes, each reads and partitions the same data, and writes its share of the shards.
    """
    chosen, options, law = _checked(job)
    console.print(f"{chosen.name}: licence: {chosen.licence}", f"cite: {chosen.citation}", sep="\n", markup=False)
    folder = _locate(chosen, job)
    if folder is None:  # rank 0 downloads, then the others find the files in the cache
        if not cluster.is_server:
            cluster.barrier()
        folder = fetch(chosen.name, chosen.sources)
        if cluster.is_server:
            cluster.barrier()
    tally = Tally(strict=job.strict)
    if chosen.own is None:
        raw = chosen.read(folder, options, tally)
    else:
        raw = read_own(chosen.own, job.given.own, folder, options, tally)
    _report_rows(tally, console)
    generator = Streams(job.seed).generator(Purpose.PARTITION)
    parts = partition(
        job.law,
        raw.labels,
        raw.label_classes,
        job.clients,
        generator,
        raw.users,
        raw.class_names if raw.has_classes else (),
        raw.superclasses,
        raw.attribute,
        raw.labelled,
        **job.given.law,
    )
    console.print(f"partition {job.law}: {law.sentence}; seed {job.seed}", markup=False)
    for note in parts.notes:
        console.print(f"note: {note}", markup=False)
    changed = raw if job.shift is None else shifted(raw, parts, job.shift, job.given.shift, job.seed)
    if job.label_noise is not None:
        changed = with_label_noise(changed, parts, job.label_noise, job.given.noise, job.seed)
    with WriteDisplay(console) as display:

        def tick(done: int, total: int) -> None:
            check_signals()
            display.update(done, total)

        manifest = write_shards(
            changed, parts, job.out, job.shards, job.seed, job.command, job.val, job.overwrite, tick, cluster
        )
    for note in manifest.notes:
        if note not in (*raw.notes, *parts.notes):
            console.print(f"note: {note}", markup=False)


def check_job(job: Job) -> None:
    """Raise the errors that can be found before data are read or downloaded."""
    chosen, _, _ = _checked(job)
    check_folder(job.out, job.overwrite)
    _locate(chosen, job)  # last, since missing files need not stop the other checks
    if job.raw is not None and job.raw.is_dir() and os.access(job.raw, os.R_OK) and not any(job.raw.iterdir()):
        raise MissingFiles(f"--raw {job.raw} is empty; it must name {chosen.files}")


def _checked(job: Job) -> tuple[DataSet, ReadOptions, Law]:
    """Return the data set, its read options and the partition scheme, after all checks that need no data."""
    chosen = data_set(job.name)
    if chosen.own is not None:
        chosen.own.checked(job.given.own)
    options = _read_options(chosen, job.given.read)
    law = _checked_law(job)
    check_numbers(job.shards, job.val)
    for kind, name, given in ((SHIFT, job.shift, job.given.shift), (LABEL_NOISE, job.label_noise, job.given.noise)):
        if name is not None:
            resolve(kind, name).checked(given)
    return chosen, options, law


def _checked_law(job: Job) -> Law:
    """Return the partition scheme of a job whose options are its own."""
    law = law_of(job.law)
    taken = [option.name for option in law.options]
    for name in job.given.law:
        if name not in taken:
            owners = [law for law, entry in PARTITIONS.items() if name in {option.name for option in entry.options}]
            owners += [f"--feature-shift {part.name}" for part in parts_of(SHIFT) if part.option(name)]
            owners += [f"--label-noise {part.name}" for part in parts_of(LABEL_NOISE) if part.option(name)]
            raise UserError(
                f"the partition {job.law} takes no {flag(name)} (that is for {', '.join(owners)}); "
                f"its options: {', '.join(map(flag, taken)) or 'none'}"
            )
    completed(law, job.law, job.clients, job.given.law)
    return law


def _read_options(chosen: DataSet, given: dict[str, Any]) -> ReadOptions:
    for name in given:
        if name not in chosen.options:
            taken = ", ".join(sorted(FLAGS.get(option, flag(option)) for option in chosen.options)) or "none"
            raise UserError(
                f"{chosen.name} takes no {FLAGS.get(name, flag(name))}; options of reading this data set: {taken}"
            )
    options = ReadOptions(**{**chosen.defaults, **given})
    for entry in fields(options):
        value = getattr(options, entry.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"{flag(entry.name)} {value} is impossible; give at least 1")
    return options


def _locate(chosen: DataSet, job: Job) -> Path | None:
    """Return the folder or file to read; None if it is to be downloaded."""
    if job.raw is not None and job.download:
        raise UserError("--raw and --download exclude each other; give one of them")
    if chosen.raw == "none":
        if job.raw is not None or job.download:
            raise UserError(f"{chosen.name} is built in; leave out --raw and --download")
        return Path()
    page = f" (from {chosen.page})" if chosen.page else ""
    if job.download:
        if not chosen.sources:
            raise UserError(
                f"{chosen.name} has no address with a published checksum; fetch it by hand{page} "
                f"and pass --raw {'FILE' if chosen.raw == 'file' else 'DIR'} with {chosen.files}"
            )
        return None
    if job.raw is None:
        alternative = " or --download" if chosen.sources else ""
        raise UserError(
            f"where is {chosen.name}? give --raw {'FILE' if chosen.raw == 'file' else 'DIR'}{alternative}; "
            f"--raw names {chosen.files}{page}"
        )
    if not job.raw.exists():
        raise MissingFiles(f"--raw {job.raw} does not exist; it must name {chosen.files}{page}")
    return job.raw


def _report_rows(tally: Tally, console: Console) -> None:
    if tally.unreadable:
        console.print(
            f"rows that cannot be read, left out: {tally.unreadable:,}; the first: {tally.first}", markup=False
        )
    for rule, count in tally.dropped.items():
        console.print(f"left out: {count:,} {rule}", markup=False)
    for note in tally.notes:
        console.print(f"note: {note}", markup=False)
