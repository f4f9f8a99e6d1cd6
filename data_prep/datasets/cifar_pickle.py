"""CIFAR's Python pickles read as data: a pickle is a program, of which only a few instructions are carried out here.

The official files hold dictionaries, lists, texts, integers and one uint8 matrix of n images in 3072 columns. Whatever
builds anything else is refused before it is built: other names, other types, other shapes, objects of any kind.
"""

from __future__ import annotations

import pickletools
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = 3072
CONSTANTS = {"NONE": None, "NEWFALSE": False, "NEWTRUE": True}
VALUES = frozenset(
    ("BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE")
    + ("BINBYTES", "SHORT_BINBYTES")
)
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
ARRAY, DTYPE, ENCODE = ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
NEW_ARRAY = (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"))
BYTE_STATE = (3, "|", None, None, None, -1, -1, 0)
"""How numpy describes the state of the type uint8."""


class Refused(ValueError):
    """The pickle holds what the official files do not."""


class _Name(tuple[str, str]):
    """A global by module and name; nothing is imported."""

    __slots__ = ()


class _Byte:
    """The type uint8."""


class _Matrix:
    """A uint8 matrix, its values still to come."""

    values: NDArray[np.uint8] | None = None


def read_pickle(stream: IO[bytes]) -> Any:
    """What a pickle of plain data holds."""
    machine = _Machine()
    try:
        for opcode, argument, place in pickletools.genops(stream):
            machine.step(opcode.name, argument, place or 0)
        return _finished(machine.pop())
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged: {error!r}") from None


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def pop(self) -> Any:
        return self._stack.pop()

    def step(self, name: str, argument: Any, place: int) -> None:
        """Carry out one instruction, which stands at this byte of the file."""
        stack = self._stack
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in TUPLES:
            stack.append(tuple(self._take(TUPLES[name])))
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            self._append(self._take(1) if name == "APPEND" else self._since_mark())
        elif name in ("SETITEM", "SETITEMS"):
            self._set(self._take(2) if name == "SETITEM" else self._since_mark())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_named(*(argument.split(" ", 1) if name == "GLOBAL" else self._take(2))))
        elif name == "REDUCE":
            maker, arguments = self._take(2)
            self._encode(arguments, place)
            stack.append(_made(maker, arguments))
        elif name == "BUILD":
            made, state = stack[-2], stack.pop()
            self._encode(state, place)
            _fill(made, state)
        else:
            raise Refused(f"it uses the instruction {name}, which the official files do not")

    def _take(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("too little on the stack")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return taken

    def _since_mark(self) -> list[Any]:
        return self._take(len(self._stack) - self._marks.pop())

    def _encode(self, parts: Any, place: int) -> None:
        """Refuse texts that are turned into bytes again and again: all of them together stand in the file."""
        if type(parts) is tuple:
            self._encoded += sum(len(part) for part in parts if type(part) is str)
        if self._encoded > place:
            raise Refused("it makes more bytes than it holds")

    def _append(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise Refused("it appends to what is no list")
        self._stack[-1].extend(_finished(value) for value in values)

    def _set(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise Refused("it sets items of what is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, (str, bytes)):
                raise Refused(f"a key is {type(key).__name__}")
            self._stack[-1][key] = _finished(value)


def _named(module: Any, name: Any) -> _Name:
    named = _Name((str(module), str(name)))
    if named not in (ARRAY, DTYPE, ENCODE, *NEW_ARRAY):
        raise Refused(f"it names {module}.{name}, which is not an array")
    return named


def _made(maker: Any, arguments: Any) -> Any:
    """What a call gives: an empty matrix, the type uint8, or the bytes that Python 3 writes as text in protocol 2."""
    if isinstance(maker, _Name) and type(arguments) is tuple:
        if maker in NEW_ARRAY and arguments in ((ARRAY, (0,), "b"), (ARRAY, (0,), b"b")):
            return _Matrix()
        if maker == DTYPE and arguments == ("u1", 0, 1):
            return _Byte()
        if maker == ENCODE and len(arguments) == 2 and arguments[1] == "latin1" and type(arguments[0]) is str:
            return arguments[0].encode("latin-1")
    raise Refused(f"it makes something else than a matrix of bytes: {_shown(maker)}{_shown(arguments)}")


def _fill(made: Any, state: Any) -> None:
    """Give an empty matrix its shape and values, checked against each other; or the type its state."""
    if isinstance(made, _Byte):
        if state != BYTE_STATE:
            raise Refused(f"the type of its values is not uint8: {_shown(state)}")
        return
    if not isinstance(made, _Matrix) or type(state) is not tuple or len(state) != 5:
        raise Refused("it changes something else than a matrix of bytes")
    version, shape, kind, fortran, values = state
    if version != 1 or not isinstance(kind, _Byte) or fortran is not False:
        raise Refused("its array is not a matrix of bytes, row by row")
    if type(shape) is not tuple or len(shape) != 2 or any(type(length) is not int for length in shape):
        raise Refused(f"its array has the shape {_shown(shape)}")
    raw = values.encode("latin-1") if type(values) is str else values
    if type(raw) is not bytes or shape[0] < 0 or shape[1] != COLUMNS or shape[0] * COLUMNS != len(raw):
        raise Refused(f"its array of shape {shape} holds {_shown(values)}: n rows of {COLUMNS} bytes are needed")
    made.values = np.frombuffer(raw, np.uint8).reshape(shape)


def _finished(value: Any) -> Any:
    """The value as callers see it: a matrix as its array; half-made things are refused."""
    if isinstance(value, _Matrix):
        if value.values is None:
            raise Refused("it holds an array without values")
        return value.values
    if isinstance(value, (_Name, _Byte)):
        raise Refused("it holds a type where data are due")
    return value


def _shown(value: Any) -> str:
    """Few words on a value, however deep it is nested."""
    if isinstance(value, (str, bytes)):
        return f"{len(value)} bytes"
    if isinstance(value, tuple):
        return (
            f"({', '.join(str(part)[:20] if type(part) in (int, str) else type(part).__name__ for part in value[:5])})"
        )
    return type(value).__name__
