"""Options on the command line: their display in `list` and the help, and the parsing of options chosen by name.

The lists are plain lines without frames, so that addresses stay whole and `grep` finds a line.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from rich.console import Console

from data_prep.datasets import DATASETS
from data_prep.partitions import PARTITIONS, Law, OptionValue, flag, law_of
from data_prep.raw import DataSet, ReadOptions
from data_prep.shifts import LABEL_NOISE, SHIFT
from fedmpi.common.errors import UserError
from fedmpi.common.options import Option
from fedmpi.common.registry import components, resolve

WIDEST = 120
INDENT = 4
FLAGS = {"files": "--file"}
"""Names on the command line that differ from the reader's option."""
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
"""Options of data_prep itself."""


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} {text!r} is not a whole number") from None


def _one_of(choices: dict[str, str]) -> Callable[[str, str], str]:
    def chosen(name: str, text: str) -> str:
        if text not in choices:
            known = " or ".join(f"{choice} ({meaning})" if meaning else choice for choice, meaning in choices.items())
            raise UserError(f"{name} {text!r} is unknown; choose {known}")
        return text

    return chosen


def _size(name: str, text: str) -> tuple[int, int]:
    """Parse width and height of --image-size 64x48 or --image-size 64."""
    width, _, height = text.lower().partition("x")
    try:
        size = int(width), int(height or width)
    except ValueError:
        raise UserError(f"{name} {text!r} is no size; give pixels as WIDTHxHEIGHT or one number") from None
    if min(size) < 1:
        raise UserError(f"{name} {text} is impossible; give at least 1 pixel")
    return size


def _text(name: str, text: str) -> str:
    return text


TARGETS = {
    "classification": "one class a row",
    "tokens": "one a position",
    "multilabel": "0 or 1 each",
    "regression": "numbers",
}
READ_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any] | None]] = {
    "files": ("amazon: a file to read; repeatable", _text),
    "split": ("your data: rows, users or a column held out for testing; image folders: folders; amazon: texts", _text),
    "keep_duplicates": ("amazon: keep reviews that repeat another", None),
    "length": ("texts: tokens kept of each [30]", _whole),
    "vocabulary": ("texts: words kept [20000]", _whole),
    "vectors": ("texts: GloVe vectors to store", lambda _, text: Path(text)),
    "label": ("tables: label column, or columns A,B [label]", _text),
    "user": ("tables: column of users [user]", _text),
    "features": ("tables: columns A,B that samples are made of", lambda _, text: tuple(text.split(","))),
    "delimiter": ("CSV: what separates columns, e.g. tab [detected]", _text),
    "decimal": ("CSV: the decimal sign [detected]", _one_of({".": "1.5", ",": "1,5"})),
    "encoding": ("CSV: encoding of the text, e.g. latin-1 [utf-8]", _text),
    "targets": (f"arrays, tables: {', '.join(TARGETS)}", _one_of(TARGETS)),
    "task": ("arrays, tables: image, text or vector", _one_of({"image": "", "text": "", "vector": ""})),
    "channels": (
        "arrays: which axis of an image holds its channels, first or last",
        _one_of({"first": "(n, C, h, w)", "last": "(n, h, w, C)"}),
    ),
    "skip_unlabelled": ("arrays, tables: leave out rows without a label", None),
    "numbers_are_classes": ("arrays, tables: labels may be fractions, each a class", None),
    "image_size": ("image folders, tables: resize to WIDTHxHEIGHT, or N to N x N", _size),
    "skip_odd_sizes": ("image folders, tables: leave out images of another size than most", None),
}
"""Fields of ReadOptions, each with its help and the parser of its text; None takes no value."""
RESERVED = {*COMMON, *READ_OPTIONS} - {"files"}
"""Options of data_prep and of built-in data sets, as written on the command line."""
GIVEN_AS: dict[str, type] = {
    name: kind
    for name, hint in get_type_hints(ReadOptions).items()
    for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
    if kind in (int, bool, str, Path)
}
"""Options that custom readers may share with built-in ones, and the type that the command line gives them."""


def show_lists(console: Console) -> None:
    """Print the data sets, the partitions, and the components that change clients' samples."""
    wrapper = textwrap.TextWrapper(min(console.width, WIDEST), break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * INDENT, " " * (INDENT + 4)
    for heading, entries in (
        ("DATA SETS", {name: list(_about(data_set)) for name, data_set in DATASETS.items()}),
        ("PARTITIONS", {name: _about_law(law) for name, law in PARTITIONS.items()}),
        (f"FEATURE SHIFTS (--{SHIFT.replace(' ', '-')} NAME)", _changes(SHIFT)),
        (f"LABEL NOISE (--{LABEL_NOISE.replace(' ', '-')} NAME)", _changes(LABEL_NOISE)),
    ):
        console.print(heading, style="bold", highlight=False)
        for name, facts in entries.items():
            console.print(f"\n{name}", style="bold", markup=False, highlight=False)
            for line in (line for fact in facts for line in wrapper.wrap(fact)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _about(data_set: DataSet) -> Iterator[str]:
    parts = " (train + test)" if "+" in data_set.samples else ""
    yours = data_set.samples == data_set.classes
    yield f"samples: {data_set.samples if yours else f'{data_set.samples}{parts}, {data_set.classes} classes'}"
    yield f"licence: {data_set.licence}"
    built_in = data_set.raw == "none"
    yield "built in: nothing to fetch" if built_in else f"--raw {data_set.raw.upper()}: {data_set.files}"
    if data_set.sources:  # for several files, the address of their folder
        files, url = len(data_set.sources), data_set.sources[0].url
        yield f"--download: {url if files == 1 else url.rpartition('/')[0] + '/'}{f' ({files} files)' * (files > 1)}"
    if data_set.page:
        yield f"page: {data_set.page}"
    if data_set.options:
        yield f"options: {' '.join(sorted(FLAGS.get(option, flag(option)) for option in data_set.options))}"


def _about_law(law: Law) -> list[str]:
    lines = [law.sentence, f"--clients: {law.clients.replace('optional', 'counted by the law when left out')}"]
    for option in law.options:
        choices = f"{' | '.join(option.choices)}; " if option.choices else ""
        default = "required" if option.default is None else f"default {option.default}"
        lines.append(f"{flag(option.name)}: {option.help} ({choices}{default})")
    return lines


def _changes(kind: str) -> dict[str, list[str]]:
    return {
        part.name: [part.title, *(f"{flag(o.name)}: {o.doc} (default {o.default})" for o in part.options)]
        for part in components(kind)
    }


def help_of_options() -> str:
    """Return the options of data sets and partitions for `--help`, one option or partition per line."""
    read = "\n".join(f"  {FLAGS.get(name, flag(name))}: {meaning}" for name, (meaning, _) in READ_OPTIONS.items())
    flags = {name: " ".join(flag(option.name) for option in law.options) for name, law in PARTITIONS.items()}
    laws = "\n".join(f"  {name}: {named or 'no options'}" for name, named in flags.items())
    return (
        f"\b\nOptions of data sets:\n{read}\n\n\b\n"
        f"Partitions and their options (`python -m data_prep list` explains them):\n{laws}\n"
    )


@dataclass
class Given:
    """Options given on the command line, by the component that takes them; a shared option is given to each."""

    read: dict[str, Any] = field(default_factory=dict)  # Fields of ReadOptions
    own: dict[str, Any] = field(default_factory=dict)  # Options of a custom reader
    law: dict[str, OptionValue] = field(default_factory=dict)
    shift: dict[str, OptionValue] = field(default_factory=dict)
    noise: dict[str, OptionValue] = field(default_factory=dict)


def parse_options(
    words: list[str], law: str, data: DataSet, shift: str | None = None, label_noise: str | None = None
) -> Given:
    """Parse the options of the data set, the partition and the sample changes from words of the command line.

    Each is --name value, --name=value or --name.
    """
    own = law_of(law) if ":" in law else None
    laws = [*PARTITIONS.values(), *([own] if own else [])]
    of_shift, of_noise = (
        {option.name: option for option in resolve(kind, name).options} if name is not None else {}
        for kind, name in ((SHIFT, shift), (LABEL_NOISE, label_noise))
    )
    of_reader = {option.name: option for option in (data.own.options if data.own else ())}
    known = {option.name: (option.kind is bool, option.help) for entry in laws for option in entry.options}
    others = [option for part in (*components(SHIFT), *components(LABEL_NOISE)) for option in part.options]
    for option in (*others, *of_shift.values(), *of_noise.values(), *of_reader.values()):
        known[option.name] = option.annotation is bool, option.doc
    named = {option.name for option in (own.options if own else ())} | {*of_shift, *of_noise}
    clash = (named & RESERVED) | {name for name, option in of_reader.items() if not _free(option)}
    if clash:
        raise UserError(f"{flag(min(clash))} is an option of data_prep itself: name the one of your own otherwise")
    given = Given()
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UserError(f"what is {word!r} for? an option begins with -- and takes one value")
        written, equals, value = word.partition("=")
        name = "files" if written == "--file" else written[2:].replace("-", "_")
        meaning, convert = READ_OPTIONS.get(name, ("", None)) if written != "--files" else ("", None)
        reads = name in READ_OPTIONS and written != "--files"
        if not reads and name not in known:
            close = difflib.get_close_matches(name, [*known, *COMMON, *READ_OPTIONS], n=1)
            hint = f"; did you mean {flag(close[0])}?" if close else "; `python -m data_prep list` shows them"
            raise UserError(f"there is no option {written}{hint}")
        takes_none, meaning = (convert is None, meaning) if reads else known[name]
        if not equals and left and not left[0].startswith("--") and not (reads and takes_none):
            equals, value = "=", left.pop(0)
        if not equals and not takes_none:
            raise UserError(f"{written} needs a value: {meaning or 'an option of your own'}")
        found: Any = value if equals else True
        if reads:
            found = found if convert is None else convert(written, value)
            if name in of_reader:
                given.own[name] = found
            else:
                given.read[name] = (*given.read.get(name, ()), found) if name == "files" else found
            continue
        takers = [(given.own, of_reader), (given.shift, of_shift), (given.noise, of_noise)]
        for holder, takes in takers:
            if name in takes:
                holder[name] = found
        if name in {option.name for option in law_of(law).options} or not any(name in takes for _, takes in takers):
            given.law[name] = found  # rejected later if the partition does not take it
    return given


def _free(option: Option) -> bool:
    """Check whether a custom reader may define this option: it is unused, or has the type of the built-in one."""
    kind = GIVEN_AS.get(option.name)
    if kind is None:
        return option.name not in RESERVED
    takes = {option.annotation, *get_args(option.annotation)}
    return kind is str or not takes.isdisjoint({Any, kind, *([float] if kind is int else [])})
