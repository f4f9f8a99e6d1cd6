"""Text on the user's terminal: its width, line breaks between words, colors unless NO_COLOR is set."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


def console() -> Console:
    """Return a console on standard output, without any escape codes if NO_COLOR is set (no-color.org)."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(highlight=False, markup=False, emoji=False, color_system=None if plain else "auto")


def on_terminal() -> bool:
    """Check whether standard output is a terminal on which a line can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def show_table(
    screen: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    caption: str = "",
    left: int = 1,
) -> None:
    """Print a table, left-aligned in the first columns and right-aligned in the others, or one line per cell."""
    headings, *cells = [[" ".join(cell.split()) for cell in row] for row in (headings, *rows)]
    texts = [[row[number] for row in (headings, *cells)] for number in range(len(headings))]
    least = [max((cell_len(word) for text in column for word in text.split()), default=1) for column in texts]
    whole = [max(1, *map(cell_len, column)) for column in texts]
    room = screen.width - 3 * len(headings) - 1  # lines and margins
    if sum(least) > room:
        for line in filter(None, (title, *(line for row in cells for line in _in_lines(headings, row)), caption)):
            screen.print(Text(paragraph(line, "" if line in (title, caption) else "  ")), soft_wrap=True)
        return
    table = Table(*headings, title=title or None, caption=caption or None)
    for number, (column, width) in enumerate(zip(table.columns, _widths(least, whole, room), strict=True)):
        column.justify = "right" if number >= left else "left"
        column.width = width  # no word is cut, and no column vanishes
        column.overflow = "fold"  # else rich counts the blank after a wide character twice, and cuts
    for row in cells:
        table.add_row(*row)
    screen.print(table)


def _widths(least: Sequence[int], whole: Sequence[int], room: int) -> list[int]:
    """Return column widths between the minimum and the full width; the rest is shared by columns that need more."""
    widths, left = list(least), room - sum(least)
    lacks = [most - fewest for most, fewest in zip(whole, least, strict=True)]
    for place, number in enumerate(sorted(range(len(least)), key=lacks.__getitem__)):
        more = min(lacks[number], left // (len(least) - place))
        widths[number] += more
        left -= more
    return widths


def _in_lines(headings: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    yield f"{headings[0]} {row[0]}"
    for heading, cell in zip(headings[1:], row[1:], strict=True):
        yield f"  {heading}: {cell}"


def paragraph(text: str, first: str = "", further: str | None = None) -> str:
    """Wrap a text between words at the width of the terminal; one line if standard output is no terminal."""
    further = " " * len(first) if further is None else further
    if not sys.stdout.isatty():
        return first + text
    return textwrap.fill(
        text,
        max(20, shutil.get_terminal_size().columns),
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def readable_duration(seconds: float) -> str:
    """Return a time in a suitable unit: "4 s", "3 min", "2.5 h", "12 days", "30 years"."""
    for unit, length, limit in (("s", 1.0, 100.0), ("min", 60.0, 100 * 60), ("h", 3600.0, 48 * 3600)):
        if seconds < limit:
            return f"{seconds / length:.{int(unit == 'h')}f} {unit}"
    days = seconds / 86_400
    return f"{days:.1f} days" if days < 10 else f"{days:.0f} days" if days < 1000 else f"{days / 365.25:,.0f} years"
