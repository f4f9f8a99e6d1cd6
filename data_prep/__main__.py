"""Command line: `python -m data_prep list` and `python -m data_prep DATASET --partition NAME ... --out DIR`.

Under mpiexec or srun the processes write the shards together. Exit codes: 0 done, 1 internal error, 2 invalid user
input (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from data_prep.datasets import data_set
from data_prep.output import FULL
from data_prep.parts import show_lists
from data_prep.prepare import Job, catch_signals, check_job, prepare, signal_code
from data_prep.writer import join_team
from fedmpi.common.errors import UserError
from fedmpi.common.files import named_folder
from fedmpi.describe.data import inspect_folder
from fedmpi.process.exit_codes import run_guarded

DONE, INTERRUPTED = 0, 130
# ClickException of whichever copy of click this typer carries.
CommandLineError: Any = typer.BadParameter.__mro__[2]
COMMANDS = ("list", "prepare")
HELP = (
    "Prepare federated data sets: official files in, HDF5 shards out.\n\n"
    "`python -m data_prep list` shows data sets and partitions; `python -m data_prep DATASET ...` is short for "
    "`prepare DATASET ...`."
)
HELP_PREPARE = (
    "Read a data set, give its samples to clients and write the shards.\n\n\b\n"
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
        advice = "make room there" if error.errno in FULL else "check the path and its permissions"
        raise UserError(f"{where}: {error.strerror or error}; {advice}") from error
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
    """List data sets (samples, classes, licences, sources) and partitions (options, schemes).

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
        str | None, typer.Option(metavar="NAME", help="Change features by client: rotation, noise, or your own.")
    ] = None,
    label_noise: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make clients' labels noisy: uniform, pair, or your own.")
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


if __name__ == "__main__":
    main()
