"""What `python -m data_prep list` and the help show: the data sets and the partition laws with their options.

Plain lines without frames: addresses stay whole, and `grep` finds a line.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from rich.console import Console

from data_prep.datasets.base import DataSet
from data_prep.datasets.registry import DATASETS
from data_prep.partitions import PARTITIONS, Law, LawOption
from fedmpi.common.registry import parts

WIDEST = 120
INDENT = 4
FLAGS = {"files": "--file"}
"""Where the name on the command line is not that of the reader's option."""


def show_lists(console: Console) -> None:
    """Print the data sets, the partitions, and what changes clients' samples."""
    width = min(console.width, WIDEST)
    for heading, entries in (
        ("DATA SETS", _data_sets()),
        ("PARTITIONS", _partitions()),
        ("FEATURE SHIFTS (--feature-shift NAME)", _changes("feature shift")),
        ("LABEL NOISE (--label-noise NAME)", _changes("label noise")),
    ):
        console.print(heading, style="bold", highlight=False)
        for name, facts in entries:
            console.print(f"\n{name}", style="bold", markup=False, highlight=False)
            for fact in facts:
                for line in _wrapped(fact, width):
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _data_sets() -> Iterator[tuple[str, list[str]]]:
    for name, data_set in DATASETS.items():
        parts = " (train + test)" if "+" in data_set.samples else ""
        yours = data_set.samples == data_set.classes
        samples = data_set.samples if yours else f"{data_set.samples}{parts}, {data_set.classes} classes"
        yield name, [f"samples: {samples}", f"licence: {data_set.licence}", *_origin(data_set)]


def _origin(data_set: DataSet) -> Iterator[str]:
    if data_set.raw == "none":
        yield "built in: nothing to fetch"
    else:
        yield f"--raw {data_set.raw.upper()}: {data_set.files}"
    for address, files in Counter(_address(data_set, source.url) for source in data_set.sources).items():
        yield f"--download: {address}{f' ({files} files)' if files > 1 else ''}"
    if data_set.page:
        yield f"page: {data_set.page}"
    if data_set.options:
        yield f"options: {' '.join(sorted(FLAGS.get(option, flag(option)) for option in data_set.options))}"


def _address(data_set: DataSet, url: str) -> str:
    """The file's address, or, of several files, that of their folder."""
    return url if len(data_set.sources) == 1 else url.rpartition("/")[0] + "/"


def _partitions() -> Iterator[tuple[str, list[str]]]:
    for name, law in PARTITIONS.items():
        clients = "required" if law.clients == "required" else "counted by the law when left out"
        yield name, [law.sentence, f"--clients: {clients}", *(describe(option) for option in law.options)]


def _changes(kind: str) -> Iterator[tuple[str, list[str]]]:
    for part in parts(kind):
        yield part.name, [part.title, *(f"{flag(o.name)}: {o.doc} (default {o.default})" for o in part.options)]


def _wrapped(text: str, width: int) -> list[str]:
    first, rest = " " * INDENT, " " * (INDENT + 4)
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def describe(option: LawOption) -> str:
    """One line: flag, meaning, choices, default."""
    facts = [*([" | ".join(option.choices)] if option.choices else [])]
    facts.append("required" if option.default is None else f"default {option.default}")
    return f"{flag(option.name)}: {option.help} ({'; '.join(facts)})"


def flag(name: str) -> str:
    """The option on the command line: classes_per_client is --classes-per-client."""
    return "--" + name.replace("_", "-")


def help_of_laws() -> str:
    """The partition options for `--help`, one law a line."""
    return "\n".join(f"  {name}: {_flags(law)}" for name, law in PARTITIONS.items())


def _flags(law: Law) -> str:
    return " ".join(flag(option.name) for option in law.options) or "no options"
