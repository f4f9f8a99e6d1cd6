"""True and false are no numbers where a type requires a number, and no number is true or false."""

from __future__ import annotations

import numbers
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, TypeVar, Union

import numpy as np
import pytest

from fedmpi.common.options import Option, mistaken

NUMBER, TRUTH = "give a number, not true or false", "give true or false, not a number"
Whole = NewType("Whole", int)
Level = IntEnum("Level", ["LOW", "HIGH"])
Answer = Enum("Answer", {"YES": True, "NO": False})
Unknown = TypeVar("Unknown")


class Draws(Protocol):
    """Object that cannot be compared with a value."""

    def draw(self) -> int: ...


@pytest.mark.parametrize("value", [True, False, np.True_])
@pytest.mark.parametrize(
    "annotation",
    [
        int,
        float,
        complex,
        int | None,
        Optional[float],  # noqa: UP045
        Union[int, Literal["all"]],  # noqa: UP007
        int | str,
        Annotated[int, "of clients"],
        Annotated[int | None, "of clients"],
        Literal[1, 2],
        list[int] | int,
        Whole,
        Level,
        Level | None,
    ],
)
def test_true_and_false_are_no_numbers(annotation: Any, value: Any) -> None:
    assert mistaken(annotation, value) == NUMBER
    with pytest.raises(ValueError, match=f"^{NUMBER}$"):
        Option("k", annotation=annotation).converted(value)


@pytest.mark.parametrize("value", [0, 1, 1.0, np.int64(1), np.float32(0)])
@pytest.mark.parametrize(
    "annotation", [bool, bool | None, str | bool, Literal[True, "auto"], Annotated[bool, "set"], Answer]
)
def test_numbers_are_not_true_or_false(annotation: Any, value: Any) -> None:
    assert mistaken(annotation, value) == TRUTH


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (tuple[int, ...], [1, True], NUMBER),
        (list[int], (1, True), NUMBER),
        (tuple[int, bool], [1, True], ""),
        (tuple[int, bool], [1, 1], TRUTH),
        (list[tuple[float, str]], [[1.0, "a"], [True, "b"]], NUMBER),
        (dict[str, float], {"a": 1.0, "b": True}, NUMBER),
        (list[int] | list[bool], [True], ""),
        (Optional[list[float]], [False], NUMBER),  # noqa: UP045
        (list, [True], ""),
        (tuple[int, ...], [], ""),
        (Level, Level["LOW"], ""),
        (Answer, Answer["YES"], ""),
        (Answer, True, ""),
    ],
)
def test_contents_of_lists_and_tables_are_checked(annotation: Any, value: Any, expected: str) -> None:
    assert mistaken(annotation, value) == expected


@pytest.mark.parametrize("value", [True, 1, 0.5, "yes", None])
@pytest.mark.parametrize(
    "annotation", [Any, object, bool | int, int | bool, numbers.Number, Unknown, Draws, "int", str, np.ndarray]
)
def test_where_a_type_takes_both_or_is_unknown_there_is_no_error(annotation: Any, value: Any) -> None:
    assert mistaken(annotation, value) == ""
