"""The command line: `python -m data_prep list` and `python -m data_prep DATASET --partition NAME ... --out DIR`.

Under mpiexec or srun the processes share the writing of the shards. Exit codes: 0 done, 1 our fault, 2 the user's input
is wrong (one sentence on stderr, no traceback), 130 interrupted.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from data_prep import stop
from data_prep.datasets.registry import data_set
from data_prep.given import parse_options
from data_prep.listing import help_of_laws, show_lists
from data_prep.prepare import Job, check_job, prepare
from data_prep.room import FULL
from data_prep.writer import join_team
from fedmpi.common.errors import UserError
from fedmpi.common.files import named_folder
from fedmpi.data.schema import Modality
from fedmpi.describe.data import check_picture, inspect_folder
from fedmpi.process.exit_codes import run_guarded

DONE, INTERRUPTED = 0, 130
# ClickException of whichever copy of click this typer carries.
CommandLineError: Any = typer.BadParameter.__mro__[2]
TASKS: dict[str, Modality] = {"image": "image", "text": "text", "vector": "vector"}
COMMANDS = ("list", "prepare")
TARGETS = {
    "classification": "one class a row",
    "tokens": "one a position",
    "multilabel": "0 or 1 each",
    "regression": "numbers",
}
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


def main() -> None:
    """Entry point: run one command; any failure ends all processes of the job."""
    stop.install()
    run_guarded(lambda: run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Run one command."""
    try:
        code = app(_with_command(words), standalone_mode=False, prog_name="python -m data_prep", obj=tuple(words))
    except (KeyboardInterrupt, typer.Abort):
        code = stop.exit_code()
    except OSError as error:
        where = error.filename or "a file"
        advice = "make room there" if error.errno in FULL else "check the path and its permissions"
        raise UserError(f"{where}: {error.strerror or error}; {advice}") from error
    except CommandLineError as error:
        message = " ".join(error.format_message().split()).rstrip(".")  # names the option, unlike error.message
        raise UserError(f"{message or 'no command'} (try --help)") from error
    if code in (INTERRUPTED, stop.exit_code()):  # some versions of typer raise, others return 130
        code = stop.exit_code()
        print("interrupted: repeat the command to start again", file=sys.stderr, flush=True)
    return code if isinstance(code, int) else DONE


def _with_command(words: list[str]) -> list[str]:
    if not words:
        return ["--help"]
    words = _data_set_first(words)
    if words[0] in COMMANDS or words[0] == "--help":
        return words
    if words[0].startswith("-"):
        raise UserError(f"the data set comes first: python -m data_prep DATASET {words[0]} ...")
    data_set(words[0])  # an unknown name is the first thing to be said
    return ["prepare", *words]


def _data_set_first(words: list[str]) -> list[str]:
    """The words with the value of --dataset, where it is given so, in the place of the data set."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--dataset" and (equals or place + 1 < len(words)):
            taken = 1 if equals else 2
            command, rest = (words[:1], words[1:place]) if words[0] in COMMANDS else ([], words[:place])
            return [*command, value if equals else words[place + 1], *rest, *words[place + taken :]]
    return words


@app.command("list")
def list_all() -> None:
    """List data sets (samples, classes, licences, where from) and partitions (options, laws).

    Example: python -m data_prep list
    """
    show_lists(Console())


@app.command("prepare", help=HELP_PREPARE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare_command(
    context: typer.Context,
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="A name that `list` shows, or module:reader of yours.")
    ],
    law: Annotated[str, typer.Option("--partition", metavar="NAME", help="How samples are given to clients.")],
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
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows that cannot be read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier preparation in DIR.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the names and options, write nothing.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw clients x classes and sizes.")] = None,
    files: Annotated[list[str] | None, typer.Option("--file", help="amazon: a file to read; repeatable.")] = None,
    length: Annotated[
        int | None, typer.Option(help="texts: tokens kept of each [30, 20, 80 or 100, by the set].")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="texts: words kept [20000].")] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="KIND", help="arrays, parquet: classification, tokens, multilabel, ...")
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="COLUMN", help="tables: column of users [user].")] = None,
    features: Annotated[
        str | None, typer.Option(metavar="COLUMN,...", help="tables: columns that samples are made of.")
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="CSV: what separates columns, e.g. tab [detected].")] = None,
    decimal: Annotated[str | None, typer.Option(metavar=".|,", help="CSV: the decimal sign [detected].")] = None,
    encoding: Annotated[str | None, typer.Option(help="CSV: encoding of the text, e.g. latin-1 [utf-8].")] = None,
    users: Annotated[
        int | None, typer.Option(help="shakespeare, stackoverflow, ...: users read, at random [all].")
    ] = None,
    per_user: Annotated[int | None, typer.Option(help="the same: samples read of each user [all].")] = None,
    tags: Annotated[int | None, typer.Option(help="stackoverflow-tags: tags kept [500].")] = None,
    vectors: Annotated[Path | None, typer.Option(metavar="FILE", help="texts: GloVe vectors to store.")] = None,
    label: Annotated[str | None, typer.Option(help="arrays, parquet: label column, or columns A,B [label].")] = None,
    task: Annotated[str | None, typer.Option(help="arrays, parquet: image, text or vector.")] = None,
    channels: Annotated[
        str | None, typer.Option(metavar="first|last", help="arrays: which axis of an image holds its channels.")
    ] = None,
    skip_unlabelled: Annotated[
        bool, typer.Option("--skip-unlabelled", help="arrays, parquet: leave out rows without a label.")
    ] = False,
    numbers_are_classes: Annotated[
        bool, typer.Option("--numbers-are-classes", help="arrays, parquet: labels may be fractions, each a class.")
    ] = False,
    image_size: Annotated[
        str | None, typer.Option(metavar="WxH", help="imagefolder, parquet: resize to width x height, or N to N x N.")
    ] = None,
    skip_odd_sizes: Annotated[
        bool, typer.Option("--skip-odd-sizes", help="imagefolder, parquet: leave out images of another size than most.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="rows|users|COLUMN",
            help="your data: what is held out for testing; folders: image folders; texts: amazon.",
        ),
    ] = None,
    keep_duplicates: Annotated[
        bool, typer.Option("--keep-duplicates", help="amazon: keep reviews that repeat another.")
    ] = False,
) -> None:
    """Replaced by HELP_PREPARE."""
    given: dict[str, Any] = {
        "files": tuple(files) if files else None,
        "length": length,
        "vocabulary": vocabulary,
        "vectors": vectors,
        "targets": _one_of("--targets", targets, TARGETS),
        "user": user,
        "features": None if features is None else tuple(features.split(",")),
        "delimiter": delimiter,
        "decimal": _one_of("--decimal", decimal, {".": "1.5", ",": "1,5"}),
        "encoding": encoding,
        "users": users,
        "per_user": per_user,
        "tags": tags,
        "label": label,
        "task": _task(task),
        "channels": _one_of("--channels", channels, {"first": "(n, C, h, w)", "last": "(n, h, w, C)"}),
        "skip_unlabelled": skip_unlabelled or None,
        "numbers_are_classes": numbers_are_classes or None,
        "image_size": _size(image_size),
        "skip_odd_sizes": skip_odd_sizes or None,
        "split": split,
        "keep_duplicates": keep_duplicates or None,
    }
    data = data_set(dataset)
    parsed = parse_options(list(context.args), law, data, feature_shift, label_noise)
    reader_options = parsed.reader
    given = {name: value for name, value in given.items() if value is not None}
    if data.own is not None:  # whose options may have names that other data sets use
        reader_options |= {name: given.pop(name) for name in list(given) if data.own.option(name)}
    job = Job(
        name=dataset,
        raw=raw,
        download=download,
        law=law,
        law_options=parsed.law,
        clients=clients,
        shards=shards,
        seed=seed,
        out=out,
        val=val,
        strict=strict,
        overwrite=overwrite,
        read_options=given,
        reader_options=reader_options,
        command="python -m data_prep " + as_text(shlex.join(context.obj)),
        shift=feature_shift,
        label_noise=label_noise,
        shift_options=parsed.shift,
        noise_options=parsed.noise,
    )
    if plot is not None:
        check_picture(plot)
    if dry_run:
        check_job(job)
        print(f"{out} would be written: names, options and the place of the files are right")
        return
    cluster = join_team()
    console = Console(soft_wrap=True, highlight=False, quiet=not cluster.is_server)
    prepare(job, console, cluster)
    if cluster.is_server:
        inspection = inspect_folder(out)
        inspection.render(console)
        if plot is not None:
            inspection.plot(plot)
            console.print(f"drawn to {plot}", markup=False)
    cluster.close()


def as_text(words: str) -> str:
    """Words of the command line without the bytes that are no UTF-8."""
    return words.encode("utf-8", "backslashreplace").decode()


def _task(task: str | None) -> Modality | None:
    if task is None:
        return None
    if task not in TASKS:
        raise UserError(f"--task {task!r} is unknown; choose image, text or vector")
    return TASKS[task]


def _one_of(name: str, value: str | None, choices: dict[str, str]) -> str | None:
    if value is not None and value not in choices:
        known = " or ".join(f"{choice} ({meaning})" for choice, meaning in choices.items())
        raise UserError(f"{name} {value!r} is unknown; choose {known}")
    return value


def _size(text: str | None) -> tuple[int, int] | None:
    """Width and height of --image-size 64x48 or --image-size 64."""
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    try:
        size = int(width), int(height or width)
    except ValueError:
        raise UserError(f"--image-size {text!r} is no size; give pixels as WIDTHxHEIGHT or one number") from None
    if min(size) < 1:
        raise UserError(f"--image-size {text} is impossible; give at least 1 pixel")
    return size


if __name__ == "__main__":
    main()
