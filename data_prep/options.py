"""Options on the command line: what `list` and the help show of them, and the parsing of those chosen by name.

The lists are plain lines without frames: addresses stay whole, and `grep` finds a line.
"""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from rich.console import Console

from data_prep.datasets import DATASETS
from data_prep.partitions import PARTITIONS, Law, LawOption, OptionValue, flag, law_of
from data_prep.raw import DataSet, ReadOptions
from data_prep.shifts import LABEL_NOISE, SHIFT
from fedmpi.common.errors import UserError
from fedmpi.common.options import Option
from fedmpi.common.registry import parts, resolve

WIDEST = 120
INDENT = 4
FLAGS = {"files": "--file"}
"""Where the name on the command line is not that of the reader's option."""
COMMON = (
    "help",
    "dataset",
    "file",
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
    "feature_shift",
    "label_noise",
)
"""Options that belong to data_prep itself."""
OF_DATA_SETS = get_type_hints(ReadOptions)
RESERVED = {*COMMON, *OF_DATA_SETS} - {"files"}
"""Options of data_prep and of built-in data sets, as the command line writes them."""
GIVEN_AS: dict[str, type] = {
    name: kind
    for name, hint in OF_DATA_SETS.items()
    for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
    if kind in (int, bool, str, Path)
}
"""Of these, what a reader of one's own may have too, and what the command line makes of it."""


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


def help_of_laws() -> str:
    """The partition options for `--help`, one law a line."""
    return "\n".join(f"  {name}: {_flags(law)}" for name, law in PARTITIONS.items())


def _flags(law: Law) -> str:
    return " ".join(flag(option.name) for option in law.options) or "no options"


@dataclass(frozen=True)
class Given:
    """Options given on the command line, by what takes them; one that several have is given to each."""

    law: dict[str, OptionValue]
    reader: dict[str, OptionValue]
    shift: dict[str, OptionValue]
    noise: dict[str, OptionValue]


def parse_options(
    words: list[str], law: str, data: DataSet, shift: str | None = None, label_noise: str | None = None
) -> Given:
    """Options of the partition, of a reader of the user's own and of what changes clients' samples, from the words that
    the command line did not know: --name value, --name=value or --name.
    """
    own = law_of(law) if ":" in law else None
    laws = [*PARTITIONS.values(), *([own] if own else [])]
    changes = [resolve(kind, name) for kind, name in ((SHIFT, shift), (LABEL_NOISE, label_noise)) if name is not None]
    known = {option.name: (option.kind is bool, option.help) for entry in laws for option in entry.options}
    for part in (*parts(SHIFT), *parts(LABEL_NOISE), *changes):
        known |= {option.name: (option.annotation is bool, option.doc) for option in part.options}
    read = {option.name: (option.annotation is bool, option.doc) for option in (data.own.options if data.own else ())}
    named = {option.name for option in (own.options if own else ())}
    named |= {option.name for part in changes for option in part.options}
    clash = (named & RESERVED) | {option.name for option in (data.own.options if data.own else ()) if not _free(option)}
    if clash:
        raise UserError(f"{flag(min(clash))} is an option of data_prep itself: name the one of your own otherwise")
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
    taken = [{option.name for option in part.options} for part in changes]
    shift_takes = taken[0] if shift is not None else set()
    noise_takes = taken[-1] if label_noise is not None else set()
    law_takes = {option.name for option in law_of(law).options}
    law_takes |= given.keys() - read.keys() - shift_takes - noise_takes  # refused as what the partition does not take
    kept = [
        {name: value for name, value in given.items() if name in takes}
        for takes in (law_takes, read.keys(), shift_takes, noise_takes)
    ]
    return Given(*kept)


def _free(option: Option) -> bool:
    """Whether a reader of one's own may have this option: it is nobody's, or gets what the command line makes of it."""
    kind = GIVEN_AS.get(option.name)
    if kind is None:
        return option.name not in RESERVED
    takes = {option.annotation, *get_args(option.annotation)}
    return kind is str or not takes.isdisjoint({Any, kind, *([float] if kind is int else [])})
