"""The command line: `python -m data_prep list` and `python -m data_prep DATASET --partition NAME ... --out DIR`.

Exit codes: 0 done, 1 our fault, 2 the user's input is wrong (one sentence on stderr, no traceback).
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from data_prep.datasets.base import Task
from data_prep.listing import help_of_laws, show_lists
from data_prep.prepare import Job, parse_law_options, prepare
from fedmpi.errors import UserError
from fedmpi.inspection import inspect_folder

DONE, OUR_FAULT, USER_ERROR = 0, 1, 2
# Several processes would write the same folder.
RANK_COUNTS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
TASKS: dict[str, Task] = {"image": "image", "text": "text", "vector": "vector"}
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
    "\n\b\nPartitions and their options (`python -m data_prep list` explains them):\n" + help_of_laws()
)

app = typer.Typer(
    name="data_prep", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    rich_markup_mode=None,
)  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    words : list of str or None
        The command line without the program's name; None takes that of the process.

    Returns
    -------
    int
        The exit code.
    """
    words = sys.argv[1:] if words is None else words
    try:
        _check_alone()
        code = app(_with_command(words), standalone_mode=False, prog_name="python -m data_prep", obj=tuple(words))
        return code if isinstance(code, int) else DONE
    except UserError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refuse("interrupted; repeat the command to start again", 130)
    except OSError as error:
        return _refuse(f"{error.filename or 'a file'}: {error.strerror or error}; check the path and its permissions")
    except Exception as error:
        # Usage errors are private to typer in some versions and click's in others; both can say what is wrong.
        if hasattr(error, "format_message"):
            return _refuse(error.format_message() or "no command; see python -m data_prep --help")
        traceback.print_exc()
        return OUR_FAULT


def _with_command(words: list[str]) -> list[str]:
    if not words:
        return ["--help"]
    if words[0] in COMMANDS or words[0] == "--help":
        return words
    if words[0].startswith("-"):
        raise UserError(f"the data set comes first: python -m data_prep DATASET {words[0]} ...")
    return ["prepare", *words]


def _check_alone() -> None:
    for variable in RANK_COUNTS:
        if int(os.environ.get(variable, "1")) > 1:
            raise UserError(
                f"{variable} is {os.environ[variable]}, but data_prep is one process; run it without mpiexec"
            )


def _refuse(sentence: str, code: int = USER_ERROR) -> int:
    sys.stdout.flush()
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    return code


@app.command("list")
def list_all() -> None:
    """List data sets (samples, classes, licences, where from) and partitions (options, laws).

    Example: python -m data_prep list
    """
    show_lists(Console())


@app.command("prepare", help=HELP_PREPARE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare_command(
    context: typer.Context,
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="A name that `list` shows.")],
    law: Annotated[str, typer.Option("--partition", metavar="NAME", help="How samples are given to clients.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    clients: Annotated[int | None, typer.Option(metavar="N", help="Clients; some partitions count them.")] = None,
    shards: Annotated[int, typer.Option(metavar="S", help="Training shards.")] = 8,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**64 - 1, help="Seed of the partition.")] = 0,
    raw: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the official files are.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch the files from their official address.")] = False,
    val: Annotated[float, typer.Option(metavar="FRACTION", help="Share of every client kept for validation.")] = 0.0,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in DIR.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw clients x classes and sizes.")] = None,
    files: Annotated[list[str] | None, typer.Option("--file", help="amazon: a file to read; repeatable.")] = None,
    length: Annotated[int | None, typer.Option(help="texts: tokens kept of each [30].")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="texts: words kept [20000].")] = None,
    vectors: Annotated[Path | None, typer.Option(metavar="FILE", help="texts: GloVe vectors to store.")] = None,
    label: Annotated[str | None, typer.Option(help="arrays: label column of a CSV file [label].")] = None,
    task: Annotated[str | None, typer.Option(help="arrays: image, text or vector.")] = None,
    image_size: Annotated[int | None, typer.Option(help="imagefolder: resize to this height and width.")] = None,
) -> None:
    """Replaced by HELP_PREPARE."""
    given: dict[str, Any] = {
        "files": tuple(files) if files else None,
        "length": length,
        "vocabulary": vocabulary,
        "vectors": vectors,
        "label": label,
        "task": _task(task),
        "image_size": image_size,
    }
    job = Job(
        name=dataset,
        raw=raw,
        download=download,
        law=law,
        law_options=parse_law_options(list(context.args)),
        clients=clients,
        shards=shards,
        seed=seed,
        out=out,
        val=val,
        strict=strict,
        overwrite=overwrite,
        read_options={name: value for name, value in given.items() if value is not None},
        command="python -m data_prep " + shlex.join(context.obj),
    )
    console = Console(soft_wrap=True)
    prepare(job, console)
    inspection = inspect_folder(out)
    inspection.render(console)
    if plot is not None:
        inspection.plot(plot)
        console.print(f"drawn to {plot}", markup=False)


def _task(task: str | None) -> Task | None:
    if task is None:
        return None
    if task not in TASKS:
        raise UserError(f"--task {task!r} is unknown; choose image, text or vector")
    return TASKS[task]


if __name__ == "__main__":
    sys.exit(main())
