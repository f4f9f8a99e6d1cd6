"""A table on a terminal keeps its words whole and all of its columns, or is told line by line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedmpi.common.terminal import show_table

HEADINGS = ("system", "weighted by samples", "worst 10 %", "median", "Jain")
ROWS = [("accuracy, tuned", "0.8273", "0.5896", "0.8487", "0.9806"), ("loss", "0.5421", "0.9993", "0.5272", "0.8203")]


def told(width: int) -> str:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    show_table(screen, HEADINGS, ROWS)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [45, 50, 56, 60, 70, 80, 200])
def test_no_word_is_cut_and_no_line_is_too_long(width: int) -> None:
    text = told(width)
    for word in " ".join([*HEADINGS, *(cell for row in ROWS for cell in row)]).split():
        assert word in text
    assert "…" not in text and max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [44, 50, 60, 70])
def test_long_texts_leave_short_columns_their_room(width: int) -> None:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    folder, words = "Prox,lr=0.05,seed=0", "run = Prox, seed = 0, local.lr = 0.05, local.proximal_mu = 0.1"
    show_table(screen, ("#", "folder", "what differs", "state"), [("0", folder, words, "new")], left=4)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    shown = next(line for line in lines if folder in line)
    if width < 55:
        assert f"folder: {folder}" in shown and "    state: new" in lines
    else:
        assert shown.endswith(" new   │") and max(map(len, lines)) <= width


def test_a_table_that_does_not_fit_is_told_line_by_line() -> None:
    assert "┃" in told(80) and "┃" not in told(40) and "worst 10 %: 0.5896" in told(40)
