"""Unions of whole numbers, and tables on terminals."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

from fedmpi.common.apportionment import united
from fedmpi.common.terminal import show_table

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
