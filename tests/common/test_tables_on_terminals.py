"""A table on a terminal keeps its words whole and all of its columns, or is printed line by line."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from fedmpi.common.terminal import show_table

HEADINGS = ("system", "weighted by samples", "worst 10 %", "median", "Jain")
ROWS = [("accuracy, tuned", "0.8273", "0.5896", "0.8487", "0.9806"), ("loss", "0.5421", "0.9993", "0.5272", "0.8203")]


def table_text(width: int) -> str:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    show_table(screen, HEADINGS, ROWS)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [45, 50, 56, 60, 70, 80, 200])
def test_no_word_is_cut_and_no_line_is_too_long(width: int) -> None:
    text = table_text(width)
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


def test_a_table_that_does_not_fit_is_printed_line_by_line() -> None:
    assert "┃" in table_text(80) and "┃" not in table_text(40) and "worst 10 %: 0.5896" in table_text(40)


def shown(width: int, headings: tuple[str, ...], row: tuple[str, ...]) -> list[str]:
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    show_table(screen, headings, [row], left=len(headings))
    return screen.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("headings", "row", "least"),
    [
        (("run", "mean"), ("fedavg", "0.5"), 6 + 4),
        (("run", ""), ("fedavg", ""), 6 + 1),
        (("run", "rate"), ("\u5b66\u4e60\u7387", "0.5"), 6 + 4),
        (("a run",), ("of fedavg",), 6),
    ],
)
def test_a_table_is_drawn_from_the_width_on_that_its_words_need(
    headings: tuple[str, ...], row: tuple[str, ...], least: int
) -> None:
    """Lines and margins are 3 for each column, and 1; a column without a word has room for one character."""
    needed = least + 3 * len(headings) + 1
    assert "┃" not in "".join(shown(needed - 1, headings, row))
    lines = shown(needed, headings, row)
    assert {cell_len(line) for line in lines if line} == {needed}
    assert all(word in "".join(lines) for word in " ".join((*headings, *row)).split())
    assert all("" not in line.split("│")[1:-1] for line in lines if "│" in line), "no column vanishes"


@pytest.mark.parametrize("width", [40, 47, 60, 81])
def test_what_is_left_is_used_up_and_shared_by_the_columns_that_lack_it(width: int) -> None:
    words = "of a text " * 12
    lines = shown(width, ("one", "another", "short"), (words, words, "it is new"))
    first, second, short = (len(part) for part in lines[0].strip("┏┓").split("┳"))
    assert len(lines[0]) == width and short == len(" it is new ") and abs(first - second) <= 5
    assert any(" it is new " in line for line in lines)


@pytest.mark.parametrize("width", range(30, 50))
def test_no_blank_of_a_name_cuts_a_word(width: int) -> None:
    row = ("  of-the-user", "a\tproximal\t\u5b66\u4e60\u7387-rate term", "two\nlines", "more\u00a0  blanks")
    text = "\n".join(shown(width, ("run", "\tname", "words", "told"), row))
    assert "…" not in text and all(word in text for word in " ".join(row).split())
