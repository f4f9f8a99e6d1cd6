"""Command line: `python -m data_prep list` and `python -m data_prep DATASET --partition NAME ... --out DIR`.

Under mpiexec or srun the first process does all the work. Exit codes: 0 done, 1 internal error, 2 invalid user input
(one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pooch
import requests
import typer
from pydantic.fields import FieldInfo
from rich.console import Console

from data_prep.datasets import DATASETS, data_set
from data_prep.formats.traces import device_table, interval_table, write_tables
from data_prep.output import FULL, check_folder
from data_prep.partitions import Request, completed
from data_prep.partitions import partition as partition_by
from data_prep.raw import READING, DataSet, RawDataset, ReadOptions, Source, Tally
from data_prep.writer import COPIED, write_augmented, write_shards
from fedmpi.common.errors import UserError, suggestion
from fedmpi.common.files import named_folder
from fedmpi.common.options import type_text
from fedmpi.common.registry import Component, components, resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config.tables import RebalanceTable
from fedmpi.data.opening import open_store
from fedmpi.describe.data import show_store
from fedmpi.mpi import read_launch
from fedmpi.process.exit_codes import DONE, INTERRUPTED, run_guarded

UNPACKED = "unpacked"
ARCHIVES = (".zip", ".tar.gz", ".tar.bz2", ".tgz")
WIDEST = 120
INDENT = 4
# ClickException of whichever copy of click this typer carries.
CommandLineError: Any = typer.BadParameter.__mro__[2]
COMMANDS = ("list", "prepare", "augment", "traces")
HELP = (
    "Prepare federated data sets: official files in, HDF5 shards out.\n\n"
    "`python -m data_prep list` shows data sets and partitions; `python -m data_prep DATASET ...` is short for "
    "`prepare DATASET ...`.\n\n"
    "Example: python -m data_prep digits --partition iid --clients 20 --out shards/digits"
)
HELP_PREPARE = (
    "Read a data set, assign its samples to clients, write shards.\n\n\b\n"
    "Examples:\n"
    "  python -m data_prep digits --partition iid --clients 20 --shards 2 --out shards/digits\n"
    "  python -m data_prep mnist --raw mnist --partition dirichlet --alpha 0.1 --clients 100 --out shards/mnist\n"
    "\n`python -m data_prep list` shows the options of data sets and partitions."
)

OPEN = {"allow_extra_args": True, "ignore_unknown_options": True}
app = typer.Typer(
    name="data_prep", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    rich_markup_mode=None,
)  # fmt: skip


def main() -> None:
    """Entry point: run one command; any failure ends all processes of the job."""
    run_guarded(lambda: run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command in the first of the processes that were launched together."""
    launch = read_launch()
    if launch is not None and launch.rank:
        return DONE
    try:
        code = app(_with_command(words), standalone_mode=False, prog_name="python -m data_prep", obj=tuple(words))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        where = error.filename or "a file"
        advice = "Make room there" if error.errno in FULL else "Check the path and its permissions"
        raise UserError(f"{where}: {error.strerror or error}. {advice}") from error
    except CommandLineError as error:
        message = " ".join(error.format_message().split()).rstrip(".")  # names the option, error.message does not
        raise UserError(f"{message or 'no command'} (try --help)") from error
    if code == INTERRUPTED:  # some versions of typer raise, others return it
        print("interrupted: repeat the command to start again", file=sys.stderr, flush=True)
    return code if isinstance(code, int) else DONE


def _with_command(words: list[str]) -> list[str]:
    if not words:
        return ["--help"]
    if words[0] in COMMANDS or words[0] == "--help":
        return words
    if words[0].startswith("-"):
        raise UserError(f"the data set comes first. Write python -m data_prep DATASET {words[0]} ...")
    data_set(words[0])  # report an unknown name before anything else
    return ["prepare", *words]


@app.command("list")
def list_all() -> None:
    """List data sets and partitions with their options.

    Example: python -m data_prep list
    """
    console = Console()
    lists = {"DATA SETS": {name: list(_about(data)) for name, data in DATASETS.items()}}
    lists["PARTITIONS (--partition NAME)"] = {
        part.name: [part.title, *starmap(_about_option, part.fields.items())] for part in components("partition")
    }
    lists["OPTIONS OF DATA SETS"] = {flag(name): [field.description or ""] for name, field in READING.items()}
    wrapper = textwrap.TextWrapper(min(console.width, WIDEST), break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * INDENT, " " * (INDENT + 4)
    for heading, entries in lists.items():
        console.print(heading, style="bold", markup=False, highlight=False)
        for name, facts in entries.items():
            console.print(f"\n{name}", style="bold", markup=False, highlight=False)
            for line in (line for fact in facts for line in wrapper.wrap(fact)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _about(data: DataSet) -> Iterator[str]:
    yield f"samples: {data.size}"
    yield f"license: {data.licence}"
    yield "built in: nothing to fetch" if data.raw == "none" else f"--raw {data.raw.upper()}: {data.files}"
    if data.sources:  # for several files, the address of their folder
        files, url = len(data.sources), data.sources[0].url
        yield f"--download: {url if files == 1 else url.rpartition('/')[0] + '/'}{f' ({files} files)' * (files > 1)}"
    if data.page:
        yield f"page: {data.page}"
    if data.options:
        yield f"options: {' '.join(sorted(map(flag, data.options)))}"


def _about_option(name: str, field: FieldInfo) -> str:
    kind = type_text(field.annotation)
    choices = f"{kind}; " if "|" in kind else ""
    default = "required" if field.is_required() else f"default {field.default}"
    return f"{flag(name)}: {field.description} ({choices}{default})"


@app.command("prepare", help=HELP_PREPARE, context_settings=OPEN)
def prepare(
    context: typer.Context,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="A name that `list` shows, or your module:reader.")],
    partition: Annotated[str, typer.Option(metavar="NAME", help="Assignment of samples to clients.")],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=named_folder, help="Output folder.")],
    clients: Annotated[
        int | None, typer.Option(metavar="N", help="Number of clients, if the partition needs it.")
    ] = None,
    shards: Annotated[int, typer.Option(metavar="S", min=1, help="Number of training shards.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**64 - 1, help="Seed of the partition.")] = 0,
    raw: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the official files.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the files from their official address.")] = False,
    val: Annotated[
        float, typer.Option(metavar="FRACTION", min=0, max=0.99, help="Share of every client kept for validation.")
    ] = 0.0,
    strict: Annotated[bool, typer.Option("--strict", help="Reject rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in DIR.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check names and options; write nothing.")] = False,
) -> None:
    """Replaced by HELP_PREPARE."""
    data, scheme = data_set(dataset), resolve("partition", partition)
    parts = [data.reading, *([data.own] if data.own is not None else []), scheme]
    given = parse_options(context, parts)
    completed(scheme, clients, given[scheme])
    if dry_run:
        check_folder(out, overwrite)
    folder = _locate(data, raw, download)
    if dry_run:
        print(f"{out} would be written: names, options and the place of the files are right")
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{data.name}: license: {data.licence}", f"cite: {data.citation}", sep="\n", markup=False)
    tally = Tally(strict=strict)
    if data.own is not None:
        data = data_set(dataset, given[data.own])
    folder = fetch(data.name, data.sources) if folder is None else folder
    found = data.read(folder, ReadOptions(**given[parts[0]]), tally)
    if tally.unreadable:
        console.print(f"rows that cannot be read, left out: {tally.unreadable:,}.{tally.first_bad}", markup=False)
    found, request = requested(found, clients, Streams(seed).generator(Purpose.PARTITION))
    drawn = partition_by(partition, request, found.has_classes, **given[scheme])
    console.print(f"partition {partition}: {scheme.title} Seed {seed}", markup=False)
    console.print(f"writing {len(drawn.rows):,} training samples to {out}", markup=False)
    write_shards(found, drawn, out, shards, seed, command_of(context), val, overwrite)
    show_store(open_store(out), console)


@app.command("augment", context_settings=OPEN)
def augment(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="SHARDS", help="Folder of prepared images.")],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=named_folder, help="Output folder.")],
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the runs that will use the copies.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in DIR.")] = False,
) -> None:
    """Store the augmented copies of scarce classes (Astraea).

    Further options: --alpha, --copies, --rotation, --shear, --shift and --zoom, the keys of [rebalance].

    Example: python -m data_prep augment shards/mnist --alpha 0.67 --out shards/mnist-augmented
    """
    keys = {name: RebalanceTable.model_fields[name] for name in COPIED}
    (options,) = parse_options(context, [Component("data set", "augment", own=keys)]).values()
    part = RebalanceTable(**options)
    done = write_augmented(folder, out, part, seed, overwrite, command_of(context))
    original, copied = int(done.original_sizes.sum()), int(done.added.sum())
    print(f"{out}: {original} samples and {copied} copies, storage overhead {done.overhead:.1%}")
    chosen = f'rebalance.alpha = {part.alpha}, rebalance.copies = "{part.copies}"'
    print(f'train on it with rebalance.mode = "stored", {chosen}')


@app.command("traces")
def traces(
    clients: Annotated[int, typer.Option(metavar="N", min=1, max=2**30, help="Number of clients.")],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=named_folder, help="Output folder.")],
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="FedScale's client_device_capacity.")] = None,
    availability: Annotated[Path | None, typer.Option(metavar="FILE", help="FedScale's client_behave_trace.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace earlier tables in DIR.")] = False,
) -> None:
    """Convert FedScale's traces to tables of devices and availability.

    Writes devices.parquet for `devices.speed`, `.upload` and `.download`, and availability.parquet for
    `clients.availability`.

    Example: python -m data_prep traces --devices client_device_capacity --clients 100 --out traces
    """
    readers = {"devices": (devices, device_table), "availability": (availability, interval_table)}
    tables = {name: read(path, clients) for name, (path, read) in readers.items() if path is not None}
    if not tables:
        raise UserError("give --devices FILE, --availability FILE, or both")
    write_tables(out, tables, overwrite)
    for name, columns in tables.items():
        print(f"{out / name}.parquet: {len(columns['client']):,} rows of {clients:,} clients")


def command_of(context: typer.Context) -> str:
    """Return the command as the user wrote it."""
    return "python -m data_prep " + shlex.join(context.obj).encode("utf-8", "backslashreplace").decode()


def requested(data: RawDataset, clients: int | None, generator: np.random.Generator) -> tuple[RawDataset, Request]:
    """Return the input of a partition scheme, and the data with a note if some rows for training name no user."""
    users = None if data.users is None else data.users[data.train]
    if users is not None and (nobody := int((users < 0).sum())):
        note = f"{nobody:,} of {len(users):,} training rows name no user, so the data have no natural clients"
        data, users = replace(data, notes=(*data.notes, note)), None
    if not data.has_classes:
        return data, Request(np.zeros(len(data.train), np.int64), 1, clients, generator, users)
    labels = data.y[data.train].astype(np.int64)
    return data, Request(labels, data.classes, clients, generator, users, data.class_names)


def flag(name: str) -> str:
    """Return the command-line form of an option: classes_per_client is --classes-per-client."""
    return "--" + name.replace("_", "-")


def parse_options(context: typer.Context, takers: Sequence[Component]) -> dict[Component, dict[str, Any]]:
    """Parse the options of components from the further words of a command: --name value, --name=value or --name.

    An option that several components have is given to each.
    """
    reserved = ["help", *(parameter.name or "" for parameter in context.command.params)]
    taken: dict[str, dict[Component, FieldInfo]] = {}
    for part in takers:
        for name, field in part.fields.items():
            taken.setdefault(name, {})[part] = field
            if name in reserved:
                raise UserError(f"{flag(name)} is an option of data_prep itself. Rename the option of your component")
    given: dict[Component, dict[str, Any]] = {part: {} for part in takers}
    left = list(context.args)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UserError(f"what is {word!r} for? an option begins with -- and takes one value")
        written, equals, value = word.partition("=")
        name = written[2:].replace("-", "_")
        if name not in taken:
            used = " and ".join(dict.fromkeys(part.name for part in takers))
            advice = suggestion(
                flag(name), map(flag, [*taken, *reserved]), "`python -m data_prep list` shows all options"
            )
            raise UserError(f"{written} is no option of {used}; {advice}")
        if not equals and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        for part, field in taken[name].items():
            if not equals and field.annotation is not bool:
                raise UserError(f"{written} needs a value: {field.description or 'an option of your own'}")
            given[part][name] = value if equals else True
    return {part: part.checked(options) for part, options in given.items()}


def _locate(data: DataSet, raw: Path | None, download: bool) -> Path | None:
    """Return the folder or file to read; None if it is to be downloaded."""
    if raw is not None and download:
        raise UserError("--raw and --download exclude each other; give one of them")
    if data.raw == "none":
        if raw is not None or download:
            raise UserError(f"{data.name} is built in; leave out --raw and --download")
        return Path()
    page = f" (from {data.page})" if data.page else ""
    kind = "FILE" if data.raw == "file" else "DIR"
    if download:
        if not data.sources:
            raise UserError(
                f"{data.name} has no address with a published checksum; fetch it by hand{page} and pass --raw {kind} "
                f"with {data.files}"
            )
        return None
    if raw is None:
        alternative = " or --download" if data.sources else ""
        raise UserError(f"where is {data.name}? give --raw {kind}{alternative}; --raw names {data.files}{page}")
    if not raw.exists():
        raise UserError(f"--raw {raw} does not exist; it must name {data.files}{page}")
    return raw


def fetch(name: str, sources: tuple[Source, ...], folder: Path | None = None) -> Path:
    """Download the files of a data set unless they are cached, check them and unpack the archives.

    The cache is $DATA_PREP_CACHE, else the user's cache folder.
    """
    target = folder or Path(os.environ.get("DATA_PREP_CACHE") or pooch.os_cache("data_prep")).expanduser() / name
    for source in sources:
        unpack = pooch.Unzip if source.filename.endswith(".zip") else pooch.Untar
        packed = source.filename.endswith(ARCHIVES)
        try:
            pooch.retrieve(
                source.url,
                source.checksum,
                fname=source.filename,
                path=target,
                processor=unpack(members=list(source.members) or None, extract_dir=UNPACKED) if packed else None,
                downloader=pooch.HTTPDownloader(timeout=30),
            )
        except requests.exceptions.RequestException as error:
            reason = type(error).__name__
            raise UserError(
                f"cannot download {source.url} ({reason}); fetch it by hand into a folder and pass that with --raw"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{source.url} does not have the published checksum {source.checksum}; nothing was kept, try again or "
                "fetch it by hand and pass the folder with --raw"
            ) from error
        except OSError as error:
            shutil.rmtree(target / UNPACKED, ignore_errors=True)  # a partial file would later pass as complete
            raise UserError(
                f"cannot store {source.filename} in {target}: {error.strerror or error}; make room there, or set "
                "DATA_PREP_CACHE to another folder"
            ) from error
    return target


if __name__ == "__main__":
    main()
