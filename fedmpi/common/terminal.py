"""Text on the user's terminal: its width, line breaks between words, colors unless NO_COLOR is set."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


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
    """Print a table, left-aligned in the first columns and right-aligned in the others; long cells are folded."""
    table = Table(title=title or None, caption=caption or None)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number >= left else "left", overflow="fold")
    for row in rows:
        table.add_row(*(" ".join(cell.split()) for cell in row))
    screen.print(table)


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
