"""What can be chosen, as `fedmpi parts` lists it: kinds, names, options with their defaults, sources."""

from __future__ import annotations

import inspect
from difflib import get_close_matches

from rich.console import Console

from fedmpi.common.errors import UserError
from fedmpi.common.options import REQUIRED, Option
from fedmpi.common.registry import KINDS, Part, describe, parts, resolve


def list_parts(kind: str | None, console: Console) -> None:
    """Print the built-in parts of a kind, or of all kinds.

    Raises
    ------
    UserError
        When there is no such kind.
    """
    for name in [_known(kind)] if kind is not None else KINDS:
        found = parts(name)
        if found:
            console.print(f"{name}  ({KINDS[name].key})")
        for part in found:
            console.print(f"  {part.name:<20} {part.title}")
            for option in part.options:
                console.print(f"      {_line(option)}")
            console.print(f"      source: {_source(part)}")
        if found:
            console.print()


def show_part(choice: str, kind: str | None, console: Console) -> None:
    """Print one part, built-in or of the user's own.

    Raises
    ------
    UserError
        When there is no such part, or nothing tells its kind.
    """
    part = describe(choice) if kind is None else resolve(_known(kind), choice)
    console.print(f"{part.name}  {part.kind}, chosen by {part.key}")
    console.print(f"  {part.title}")
    for option in part.options:
        console.print(f"  {KINDS[part.kind].table}.{_line(option)}")
    for mark, value in part.marks.items():
        if value not in ((), None):
            console.print(f"  {mark} = {', '.join(value) if isinstance(value, tuple) else value}")
    console.print(f"  source: {_source(part)}")
    if part.foreign:
        console.print(f"  sha256: {part.digest}")


def _line(option: Option) -> str:
    default = "required" if option.default is REQUIRED else f"default: {option.default!r}"
    return f"{option.name} ({option.type}, {default})  {option.doc}".rstrip()


def _source(part: Part) -> str:
    if part.source is not None:
        return str(part.source)
    return str(getattr(inspect.unwrap(part.object), "__module__", "?"))


def _known(kind: str) -> str:
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
        raise UserError(f"there is no kind of part {kind!r}: {hint}")
    return kind
