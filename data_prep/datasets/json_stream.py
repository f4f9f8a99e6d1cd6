"""A large JSON object read member by member: memory holds one member, not the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TextIO

BLOCK = 1 << 18
LARGEST = 1 << 28
"""Characters of one value: what is unzipped may be much longer than the file."""
FOLLOWS = frozenset(",:]} \t\r\n")  # what may stand behind a value or a key
_DECODER = json.JSONDecoder()


def members(stream: TextIO, opened: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The members of the object that a stream holds, in its order."""
    text = _Text(stream)
    for key in _keys(text):
        if key == opened:
            for inner in _keys(text):
                yield (key, inner), text.value()
        else:
            yield (key,), text.value()
    if text.next_character():
        raise ValueError("more text behind the JSON object")


def _keys(text: _Text) -> Iterator[str]:
    """The keys of an object; whoever asks for the next one has read the value."""
    text.take("{")
    if text.next_character() != "}":
        while True:
            key = text.value()
            if not isinstance(key, str):
                raise ValueError(f"{key!r} stands where a key of an object belongs")
            text.take(":")
            yield key
            if text.next_character() != ",":
                break
            text.take(",")
    text.take("}")


class _Text:
    """A stream with a buffer of what was read of it and not yet used."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._buffer = ""
        self._ended = False

    def next_character(self) -> str:
        """The next character that is no white space, not used up; "" at the end."""
        self._buffer = self._buffer.lstrip()
        while not self._buffer and not self._ended:
            self._read(BLOCK)
            self._buffer = self._buffer.lstrip()
        return self._buffer[:1]

    def take(self, character: str) -> None:
        """Use up the next character, which must be this one."""
        found = self.next_character()
        if found != character:
            raise ValueError(f"{found!r} stands where {character!r} belongs" if found else "the file ends too early")
        self._buffer = self._buffer[1:]

    def value(self) -> Any:
        """Use up the next value; the buffer is doubled until it holds the whole of it."""
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer)
            except ValueError:
                if self._ended:
                    raise
            else:
                if self._ended or self._buffer[end : end + 1] in FOLLOWS:  # a number cut short (2 of 2.5) is one too
                    self._buffer = self._buffer[end:]
                    return value
            if len(self._buffer) > LARGEST:
                raise ValueError(f"a value of more than {LARGEST:,} characters")
            self._read(max(BLOCK, len(self._buffer)))

    def _read(self, characters: int) -> None:
        block = self._stream.read(characters)
        self._ended = not block
        self._buffer += block
