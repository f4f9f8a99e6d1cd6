"""Unions of whole numbers, tables on terminals, texts of exceptions, types of numbers and truth."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

from fedmpi.clients.sampler import View
from fedmpi.common.apportionment import united
from fedmpi.common.errors import raised
from fedmpi.common.options import mistaken
from fedmpi.common.streams import Streams
from fedmpi.common.terminal import show_table
from fedmpi.local.algorithms import Vectors

WHOLE = arrays(np.int64, st.integers(0, 20), elements=st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1))


@given(WHOLE, WHOLE)
def test_a_union_holds_every_number_of_either_once_and_sorted(some: np.ndarray, others: np.ndarray) -> None:
    found = united(some, others)
    assert found.dtype == np.int64 and found.tolist() == sorted({*some.tolist(), *others.tolist()})


@pytest.mark.parametrize("width", [40, 60, 200])
def test_a_table_loses_no_character_and_fits_the_terminal(width: int) -> None:
    rows = [("accuracy, tuned", "0.8273", "学习率"), ("two\nlines", "0.5421", "")]
    screen = Console(file=io.StringIO(), width=width, color_system=None)
    show_table(screen, ("method", "weighted by samples", "rate"), rows)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width and "0.8273" in "".join(lines)
    assert len(lines) == 6 if width == 200 else len(lines) >= 6


NUMBER, TRUTH = "give a number, not true or false", "give true or false, not a number"


@pytest.mark.parametrize(
    ("annotation", "wrong", "message"),
    [
        *((kind, value, NUMBER) for value in (True, np.False_) for kind in (int, float, int | None, int | str)),
        (Annotated[int, "of clients"], True, NUMBER),
        (int | Literal["all"], True, NUMBER),
        *((kind, value, TRUTH) for value in (0, 1.0, np.int64(1)) for kind in (bool, bool | None, Annotated[bool, ""])),
        *((kind, value, "") for value in (True, 1, "yes", None) for kind in (Any, bool | int, str, "int", np.ndarray)),
    ],
)
def test_true_is_no_number_and_no_number_is_true(annotation: Any, wrong: Any, message: str) -> None:
    assert mistaken(annotation, wrong) == message


def test_an_attribute_that_a_view_lacks_is_reported_with_the_others_and_other_errors_as_they_are() -> None:
    view = View(0, 1, np.array([3]), 1, Streams(0), counts=lambda: Path().size)  # type: ignore[attr-defined]
    for asked, end in (
        (lambda: view.clients, "wanted)"),
        (lambda: Path().clients, "object has no attribute 'clients'"),
        (lambda: view.class_counts, "object has no attribute 'size'"),
        (lambda: Vectors("client", {}, {"index": 1}).c, "it has index"),
    ):
        with pytest.raises(AttributeError) as caught:
            asked()  # type: ignore[no-untyped-call]
        assert raised(caught.value).endswith(end)


def test_an_exception_that_cannot_be_written_leaves_its_type() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise OSError("no words")

    assert raised(Silent()) == "Silent, which cannot be written (OSError)"
