"""One preparation from the checked command line to the shards: find the files, read, partition, write."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.own import read_own
from data_prep.datasets.registry import data_set
from data_prep.display import WriteDisplay
from data_prep.listing import FLAGS, flag
from data_prep.partitions import PARTITIONS, Law, law_named, partition
from data_prep.partitions.common import OptionValue
from data_prep.sources import fetch
from data_prep.stop import check
from data_prep.writer import write_shards
from fedmpi.cluster import Cluster
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams


@dataclass(frozen=True)
class Job:
    """What the command line asks for.

    Parameters
    ----------
    name : str
        The data set.
    raw : Path or None
        Where its files are.
    download : bool
        Whether to fetch them.
    law : str
        The partition.
    law_options : dict
        Its options as given.
    clients : int or None
        N; None where the law counts them.
    shards : int
        Training shards.
    seed : int
        Seed of the partition and the validation part.
    out : Path
        The folder to write.
    val : float
        Share of every client's samples for validation.
    strict : bool
        Refuse unreadable rows.
    overwrite : bool
        Replace what a previous preparation wrote.
    read_options : dict
        Fields of ReadOptions as given.
    reader_options : dict
        Options of a reader of the user's own, as given.
    command : str
        The command line, for the manifest.
    """

    name: str
    raw: Path | None
    download: bool
    law: str
    law_options: dict[str, OptionValue]
    clients: int | None
    shards: int
    seed: int
    out: Path
    val: float
    strict: bool
    overwrite: bool
    read_options: dict[str, Any]
    reader_options: dict[str, OptionValue]
    command: str


def prepare(job: Job, console: Console, cluster: Cluster) -> None:
    """Write the shards of one job; everything that can be refused is refused before the data are read.

    Under several processes each reads and partitions alike, and writes its share of the shards.

    Raises
    ------
    UserError
        Unknown names, options that do not belong, missing or damaged files, an impossible partition.
    """
    chosen = data_set(job.name)
    if chosen.own is not None:
        chosen.own.checked(job.reader_options)
    options = _read_options(chosen, job.read_options)
    law = _checked_law(job)
    console.print(f"{chosen.name}: licence: {chosen.licence}", f"cite: {chosen.citation}", sep="\n", markup=False)
    folder = _locate(chosen, job) or _fetch_once(chosen, cluster)
    tally = Tally(strict=job.strict)
    if chosen.own is None:
        raw = chosen.read(folder, options, tally)
    else:
        raw = read_own(chosen.own, job.reader_options, folder, options, tally)
    _report_rows(tally, console)
    generator = Streams(job.seed).generator(Purpose.PARTITION)
    parts = partition(
        job.law, raw.labels, raw.classes, job.clients, generator, raw.users, raw.class_names, **job.law_options
    )
    console.print(f"partition {job.law}: {law.sentence}; seed {job.seed}", markup=False)
    for note in parts.notes:
        console.print(f"note: {note}", markup=False)
    with WriteDisplay(console) as display:

        def tick(done: int, total: int) -> None:
            check()
            display.update(done, total)

        write_shards(raw, parts, job.out, job.shards, job.seed, job.command, job.val, job.overwrite, tick, cluster)


def check_job(job: Job) -> None:
    """Refuse what can be refused before data are read or fetched.

    Raises
    ------
    UserError
        As `prepare`.
    """
    chosen = data_set(job.name)
    if chosen.own is not None:
        chosen.own.checked(job.reader_options)
    _read_options(chosen, job.read_options)
    _checked_law(job)
    _locate(chosen, job)


def parse_options(words: list[str], law: str, data: DataSet) -> tuple[dict[str, OptionValue], dict[str, OptionValue]]:
    """Options of the partition and of a reader of the user's own from the words that the command line did not know:
    --name value, --name=value or --name.

    Parameters
    ----------
    words : list of str
    law : str
        The partition: one of the user's own has options of its own.
    data : DataSet

    Returns
    -------
    law_options, reader_options : dict
        An option that both have is given to both.

    Raises
    ------
    UserError
        A word that is no option, or an option of nothing; names the nearest one.
    """
    own = law_named(law) if ":" in law else None
    laws = [*PARTITIONS.values(), *([own] if own else [])]
    known = {option.name: (option.kind is bool, option.help) for entry in laws for option in entry.options}
    read = {option.name: (option.annotation is bool, option.doc) for option in (data.own.options if data.own else ())}
    named = {*read, *(option.name for option in (own.options if own else ()))}
    if clash := sorted(named & set(COMMON)):
        raise UserError(f"{flag(clash[0])} is an option of data_prep itself: name the one of your own otherwise")
    given: dict[str, OptionValue] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UserError(f"what is {word!r} for? an option begins with -- and takes one value")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in known and name not in read:
            close = difflib.get_close_matches(name, [*known, *read, *COMMON], n=1)
            hint = f"; did you mean {flag(close[0])}?" if close else "; `python -m data_prep list` shows them"
            raise UserError(f"there is no option {word.partition('=')[0]}{hint}")
        if not equals and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        takes_none, meaning = read[name] if name in read else known[name]
        if not equals and not takes_none:
            raise UserError(f"{flag(name)} needs a value: {meaning or 'an option of your own'}")
        given[name] = value if equals else True
    of_the_law = {option.name for option in _law(law).options} | (known.keys() - read.keys())
    return (
        {name: value for name, value in given.items() if name in of_the_law},
        {name: value for name, value in given.items() if name in read},
    )


COMMON = (
    "raw",
    "download",
    "partition",
    "clients",
    "shards",
    "seed",
    "out",
    "val",
    "strict",
    "overwrite",
    "dry_run",
    "plot",
)


def _checked_law(job: Job) -> Law:
    """The law of a job whose options are its own."""
    law = _law(job.law)
    taken = [option.name for option in law.options]
    for name in job.law_options:
        if name not in taken:
            owners = [law for law, entry in PARTITIONS.items() if name in {option.name for option in entry.options}]
            raise UserError(
                f"the partition {job.law} takes no {flag(name)} (that is for {', '.join(owners)}); "
                f"its options: {', '.join(map(flag, taken)) or 'none'}"
            )
    return law


def _law(name: str) -> Law:
    law = law_named(name)
    if law is None:
        close = difflib.get_close_matches(name, PARTITIONS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PARTITIONS)}"
        raise UserError(f"there is no partition {name!r}; {hint}")
    return law


def _read_options(chosen: DataSet, given: dict[str, Any]) -> ReadOptions:
    for name in given:
        if name not in chosen.options:
            taken = ", ".join(sorted(FLAGS.get(option, flag(option)) for option in chosen.options)) or "none"
            raise UserError(
                f"{chosen.name} takes no {FLAGS.get(name, flag(name))}; options of reading this data set: {taken}"
            )
    options = ReadOptions(**given)
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"{flag(field.name)} {value} is impossible; give at least 1")
    return options


def _locate(chosen: DataSet, job: Job) -> Path | None:
    """The folder or file to read; None where it is to be downloaded."""
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
        raise UserError(f"--raw {job.raw} does not exist; it must name {chosen.files}{page}")
    return job.raw


def _fetch_once(chosen: DataSet, cluster: Cluster) -> Path:
    """The downloaded files: rank 0 fetches them, then the others find them in the cache."""
    if not cluster.is_server:
        cluster.barrier()
    folder = fetch(chosen.name, chosen.sources)
    if cluster.is_server:
        cluster.barrier()
    return folder


def _report_rows(tally: Tally, console: Console) -> None:
    if tally.unreadable:
        console.print(
            f"rows that cannot be read, left out: {tally.unreadable:,}; the first: {tally.first}", markup=False
        )
    for rule, count in tally.dropped.items():
        console.print(f"left out: {count:,} {rule}", markup=False)
    for note in tally.notes:
        console.print(f"note: {note}", markup=False)
