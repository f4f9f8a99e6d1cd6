"""Command line: `python -m data_prep list` and `python -m data_prep DATASET --partition NAME ... --out DIR`.

Under mpiexec or srun the processes write the shards together. Exit codes: 0 done, 1 internal error, 2 invalid user
input (one sentence on stderr, no traceback), 130 interrupted. SIGINT and SIGTERM unwind the preparation, so that no
partial file remains.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np
import pooch
import requests
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from data_prep.datasets import data_set, read_own
from data_prep.output import FULL, check_folder
from data_prep.partitions import Request, completed, partition
from data_prep.parts import parse_options, show_lists
from data_prep.raw import DataSet, ReadOptions, Source, Tally
from data_prep.shifts import LABEL_NOISE, SHIFT, shifted, with_label_noise
from data_prep.writer import check_numbers, join_team, write_shards
from fedmpi.common.errors import UserError
from fedmpi.common.files import named_folder
from fedmpi.common.registry import Component, resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.describe.data import inspect_folder
from fedmpi.mpi import Cluster
from fedmpi.process.exit_codes import run_guarded

DONE, INTERRUPTED = 0, 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []
UNPACKED = "unpacked"
ARCHIVES = (".zip", ".tar.gz", ".tar.bz2", ".tgz")
# ClickException of whichever copy of click this typer carries.
CommandLineError: Any = typer.BadParameter.__mro__[2]
COMMANDS = ("list", "prepare")
HELP = (
    "Prepare federated data sets: official files in, HDF5 shards out.\n\n"
    "`python -m data_prep list` shows data sets and partitions; `python -m data_prep DATASET ...` is short for "
    "`prepare DATASET ...`."
)
HELP_PREPARE = (
    "Read a data set, assign its samples to clients, write shards.\n\n\b\n"
    "Examples:\n"
    "  python -m data_prep digits --partition iid --clients 20 --shards 2 --out shards/digits\n"
    "  python -m data_prep mnist --raw mnist --partition dirichlet --alpha 0.1 --clients 100 --out shards/mnist\n"
    "\n`python -m data_prep list` shows the options of data sets and partitions."
)

app = typer.Typer(
    name="data_prep", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    rich_markup_mode=None,
)  # fmt: skip


def main() -> None:
    """Entry point: run one command; any failure ends all processes of the job."""
    catch_signals()
    run_guarded(lambda: run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command."""
    try:
        code = app(_with_command(words), standalone_mode=False, prog_name="python -m data_prep", obj=tuple(words))
    except (KeyboardInterrupt, typer.Abort):
        code = signal_code()
    except OSError as error:
        where = error.filename or "a file"
        advice = "Make room there" if error.errno in FULL else "Check the path and its permissions"
        raise UserError(f"{where}: {error.strerror or error}. {advice}") from error
    except CommandLineError as error:
        message = " ".join(error.format_message().split()).rstrip(".")  # names the option, error.message does not
        raise UserError(f"{message or 'no command'} (try --help)") from error
    if code in (INTERRUPTED, signal_code()):  # some versions of typer raise, others return 130
        code = signal_code()
        print("interrupted: repeat the command to start again", file=sys.stderr, flush=True)
    return code if isinstance(code, int) else DONE


def _with_command(words: list[str]) -> list[str]:
    if not words:
        return ["--help"]
    if words[0] in COMMANDS or words[0] == "--help":
        return words
    if words[0].startswith("-"):
        raise UserError(f"the data set comes first: python -m data_prep DATASET {words[0]} ...")
    data_set(words[0])  # report an unknown name before anything else
    return ["prepare", *words]


@app.command("list")
def list_all() -> None:
    """List data sets and partitions with their options.

    Example: python -m data_prep list
    """
    show_lists(Console())


@app.command("prepare", help=HELP_PREPARE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare_command(
    context: typer.Context,
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A name that `list` shows, or module:reader of yours.")
    ],
    partition: Annotated[str, typer.Option(metavar="NAME", help="Assignment of samples to clients.")],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=named_folder, help="The folder to write.")],
    clients: Annotated[int | None, typer.Option(metavar="N", help="Clients; some partitions count them.")] = None,
    shards: Annotated[int, typer.Option(metavar="S", help="Training shards.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**64 - 1, help="Seed of the partition.")] = 0,
    raw: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the official files are.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the files from their official address.")] = False,
    val: Annotated[float, typer.Option(metavar="FRACTION", help="Share of every client kept for validation.")] = 0.0,
    feature_shift: Annotated[
        str | None, typer.Option(metavar="NAME", help="Change features by client: module:function of yours.")
    ] = None,
    label_noise: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make clients' labels noisy: module:function of yours.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Reject rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in DIR.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the names and options, write nothing.")] = False,
) -> None:
    """Replaced by HELP_PREPARE."""
    own = ("dry_run", "context", "own")
    settings = {name: value for name, value in locals().items() if name not in own}
    reserved = ["help", *(parameter.name or "" for parameter in context.command.params)]
    command = "python -m data_prep " + shlex.join(context.obj).encode("utf-8", "backslashreplace").decode()
    job = Job(**settings, words=context.args, reserved=reserved, command=command)
    if dry_run:
        check_job(job)
        print(f"{out} would be written: names, options and the place of the files are right")
        return
    cluster = join_team()
    console = Console(soft_wrap=True, highlight=False, quiet=not cluster.is_server)
    prepare(job, console, cluster)
    if cluster.is_server:
        inspect_folder(out).render(console)
    cluster.close()


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
        raise UserError(f"--raw {job.raw} is empty; it must name {data.files}")


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
        raise UserError(f"--raw {job.raw} does not exist; it must name {data.files}{page}")
    return job.raw


def cache_folder(name: str) -> Path:
    """Return the cache folder of a data set: $DATA_PREP_CACHE/name, else the user's cache folder."""
    root = os.environ.get("DATA_PREP_CACHE")
    return Path(root).expanduser() / name if root else Path(pooch.os_cache("data_prep")) / name


def fetch(name: str, sources: tuple[Source, ...], folder: Path | None = None) -> Path:
    """Download the files of a data set unless they are cached, check them and unpack the archives."""
    target = folder or cache_folder(name)
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
