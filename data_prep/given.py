"""Options of what is chosen by name on the command line: a partition, a reader, a feature shift, label noise."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from data_prep.datasets.base import DataSet, ReadOptions
from data_prep.listing import flag
from data_prep.partitions import PARTITIONS, Law, law_named
from data_prep.partitions.common import OptionValue
from data_prep.shifts import LABEL_NOISE, SHIFT
from fedmpi.common.errors import UserError
from fedmpi.common.options import Option
from fedmpi.common.registry import parts, resolve

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
    own = law_named(law) if ":" in law else None
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


def law_of(name: str) -> Law:
    """The law of a name; raises `UserError` with the nearest one where there is none."""
    law = law_named(name)
    if law is None:
        close = difflib.get_close_matches(name, PARTITIONS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PARTITIONS)}"
        raise UserError(f"there is no partition {name!r}; {hint}")
    return law
