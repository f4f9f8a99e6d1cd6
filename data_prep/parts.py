"""Components of data_prep on the command line: built-in data sets as components, lists, help, and given options.

The lists are plain lines without frames, so that addresses stay whole and `grep` finds a line.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.datasets import DATASETS
from data_prep.raw import READING, DataSet, RawDataset, ReadOptions, Tally
from fedmpi.common.errors import UserError
from fedmpi.common.options import REQUIRED, Option
from fedmpi.common.registry import Component, components, register

WIDEST = 120
INDENT = 4


def _register(data: DataSet) -> None:
    """Make a built-in data set a component (raw, *, options) -> `RawDataset`."""

    def read(raw: Path = Path(), **options: Any) -> RawDataset:
        return data.read(Path(raw), ReadOptions(**options), Tally())

    options = data.reading.options
    positional = [] if data.raw == "none" else [Parameter("raw", Parameter.POSITIONAL_OR_KEYWORD)]
    keywords = [Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default) for option in options]
    read.__name__ = read.__qualname__ = data.name
    read.__annotations__ = {option.name: option.annotation for option in options}
    read.__signature__ = Signature([*positional, *keywords])  # type: ignore[attr-defined]
    listed = "".join(f"\n{option.name} : {option.type}\n    {option.doc}" for option in options)
    size = "data of your own" if data.samples == "yours" else data.size
    files = f"; --raw names {data.files}" if data.files else ""
    read.__doc__ = f"{size[:1].upper()}{size[1:]}{files}." + (f"\n\nParameters\n----------{listed}" if options else "")
    register("data set", data.name)(read)


for _data in DATASETS.values():
    _register(_data)
for _family in ("labels", "sizes", "mixes", "astraea"):
    import_module(f"data_prep.partitions.{_family}")  # registers its schemes; they are listed in this order


def flag(name: str) -> str:
    """Return the command-line form of an option: classes_per_client is --classes-per-client."""
    return "--" + name.replace("_", "-")


def show_lists(console: Console) -> None:
    """Print the data sets, the partitions, and their options."""
    lists = {"DATA SETS": {name: list(_about(data)) for name, data in DATASETS.items()}}
    lists["PARTITIONS (--partition NAME)"] = {
        part.name: [part.title, *map(_about_option, part.options)] for part in components("partition")
    }
    lists["OPTIONS OF DATA SETS"] = {flag(option.name): [option.doc] for option in READING}
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
    yield f"licence: {data.licence}"
    yield "built in: nothing to fetch" if data.raw == "none" else f"--raw {data.raw.upper()}: {data.files}"
    if data.sources:  # for several files, the address of their folder
        files, url = len(data.sources), data.sources[0].url
        yield f"--download: {url if files == 1 else url.rpartition('/')[0] + '/'}{f' ({files} files)' * (files > 1)}"
    if data.page:
        yield f"page: {data.page}"
    if data.options:
        yield f"options: {' '.join(sorted(map(flag, data.options)))}"


def _about_option(option: Option) -> str:
    choices = f"{option.type}; " if "|" in option.type else ""
    default = "required" if option.default is REQUIRED else f"default {option.default}"
    return f"{flag(option.name)}: {option.doc} ({choices}{default})"


def parse_options(
    words: Sequence[str], takers: Sequence[Component], reserved: Sequence[str]
) -> dict[Component, dict[str, Any]]:
    """Parse the options of components from words of the command line: --name value, --name=value or --name.

    An option that several components have is given to each; `reserved` names the options of data_prep itself.
    """
    taken: dict[str, dict[Component, Option]] = {}
    for part in takers:
        for option in part.options:
            taken.setdefault(option.name, {})[part] = option
            if option.name in reserved:
                name = flag(option.name)
                raise UserError(f"{name} is an option of data_prep itself. Rename the option of your component")
    given: dict[Component, dict[str, Any]] = {part: {} for part in takers}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise UserError(f"what is {word!r} for? an option begins with -- and takes one value")
        written, equals, value = word.partition("=")
        name = written[2:].replace("-", "_")
        if name not in taken:
            used = " and ".join(dict.fromkeys(part.name for part in takers))
            close = difflib.get_close_matches(name, [*taken, *reserved], n=1)
            hint = f"did you mean {flag(close[0])}?" if close else "`python -m data_prep list` shows all options"
            raise UserError(f"{written} is no option of {used}; {hint}")
        if not equals and left and not left[0].startswith("--"):
            equals, value = "=", left.pop(0)
        for part, option in taken[name].items():
            if not equals and option.annotation is not bool:
                raise UserError(f"{written} needs a value: {option.doc or 'an option of your own'}")
            given[part][name] = value if equals else True
    return given
