"""Finding and holding raw files: look-up in a folder, lines of (un)zipped text, rows kept outside memory, users."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.room import temporary_room
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints

BLOCK = 1 << 20
LONGEST_LINE = 1 << 26
"""Bytes of a line of text: what is unzipped may be much longer than the file."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
PART_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "valid": ("validation", "valid", "val", "dev"),
}
"""Words in the names of files and folders, in any case, by the part of the data that they mean."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
TOOLS = {"__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found"}
"""Folders that tools make for themselves, in small letters."""
GZIP = b"\x1f\x8b"
STORED_AT_ONCE = 256


def part_of(path: Path) -> str | None:
    """The part ("train", "test" or "valid") that the words of a relative path mean, the last folder or file first."""
    words = [word.lower() for name in reversed(path.parts) for word in WORD.findall(name)]
    return next((part for word in words for part, known in PART_WORDS.items() if word in known), None)


def folder_of(raw: Path) -> Path:
    """`raw` itself when it is a folder.

    Raises
    ------
    UserError
        When it is missing or a file.
    """
    if not raw.is_dir():
        raise UserError(f"{raw} is not a folder; --raw takes the folder that holds the data set's files")
    return raw


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden or belongs to a tool, and so holds no samples."""
    return name.startswith(".") or name.lower() in TOOLS


def files_below(folder: Path, *patterns: str) -> list[Path]:
    """Files of a folder at any depth that match a pattern (without any: all files), in path order.

    Hidden files and folders of tools are left out. Linked folders are followed, but no folder is read twice, and none
    that contains `folder`.

    Raises
    ------
    OSError
        A folder cannot be read.
    """
    found, seen = [], {_identity(parent) for parent in folder.absolute().parents}
    for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        identity = _identity(root)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        found += [Path(root, name) for name in names if not is_hidden(name)]
    matching = (path for path in found if any(path.match(pattern) for pattern in patterns or ("*",)))
    return sorted(path for path in matching if path.is_file())


def _identity(folder: str | Path) -> tuple[int, int]:
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def _raise(error: OSError) -> None:
    raise error


def find(raw: Path, patterns: tuple[str, ...]) -> Path | None:
    """The one file below `raw` that matches a pattern; the first pattern that matches anything decides.

    Raises
    ------
    UserError
        When the files of one pattern lie in several folders, or `raw` is no folder.
    """
    folder = folder_of(raw)
    for pattern in patterns:
        found = files_below(folder, pattern)
        if len(found) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in found[:4])
            raise UserError(f"{folder} holds {len(found)} files named {pattern} ({names}); point --raw at one folder")
        if found:
            return found[0]
    return None


def require(raw: Path, patterns: tuple[str, ...], hint: str) -> Path:
    """As `find`, but a missing file is an error that says what belongs in the folder."""
    path = find(raw, patterns)
    if path is None:
        raise UserError(f"no {patterns[0]} in {raw}; --raw must hold {hint}")
    return path


def open_bytes(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """The content of a file, unzipped on the way if it is gzipped, whatever its name ends in."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file; --raw must lead to files")
    try:
        with path.open("rb") as stream:
            zipped = stream.read(len(GZIP)) == GZIP
        return gzip.open(path, "rb") if zipped else path.open("rb")
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror or error}") from error


def lines(path: Path) -> Iterator[str]:
    """Lines of a text file, unzipped when named .gz: UTF-8, or latin-1 where a line is not valid UTF-8.

    A byte order mark before the first line is no part of it.
    """
    with open_bytes(path) as stream:
        try:
            for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b"")):
                if len(line) == LONGEST_LINE:
                    raise UserError(
                        f"{path}, line {number + 1} is longer than {LONGEST_LINE:,} bytes; end rows with a line feed"
                    )
                if number == 0:
                    if line.startswith(UTF_16):
                        raise UserError(f"{path} is UTF-16 text; save it as UTF-8")
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError:
                    yield line.decode("latin-1")
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error}); fetch it again") from error


class Scratch:
    """Rows kept in an unnamed temporary file: appended in blocks, then read as one memory-mapped array.

    Parameters
    ----------
    shape : tuple of int
        Shape of one row.
    dtype : dtype
        Of the values.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.length = 0
        self._written = 0
        with temporary_room(os.environ.get("TMPDIR", "/tmp"), 0, 1):
            self._folder = tempfile.gettempdir()
            self._file = tempfile.TemporaryFile(prefix="data_prep-")  # noqa: SIM115  (as long as this object)
        weakref.finalize(self, self._file.close)  # a map outlives it

    def append(self, rows: AnyArray) -> None:
        """Add rows, shape (r, *shape).

        Raises
        ------
        UserError
            The temporary folder is full.
        """
        block = np.ascontiguousarray(rows, self.dtype)
        if block.shape[1:] != self.shape:
            raise ValueError(f"rows of shape {block.shape[1:]} for a scratch file of {self.shape}")
        with temporary_room(self._folder, self._written, block.nbytes):
            self._file.write(block.data if block.size else b"")
        self._written += block.nbytes
        self.length += len(block)

    def rows(self) -> AnyArray:
        """All rows, shape (n, *shape): a private (copy-on-write) map of the file."""
        with temporary_room(self._folder, self._written, 0):
            self._file.flush()
        if not self.length or not all(self.shape):
            return np.empty((self.length, *self.shape), self.dtype)
        return np.memmap(self._file, self.dtype, "c", shape=(self.length, *self.shape))


def stored(read: Callable[[Ints], AnyArray], rows: Ints, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    """What `read` gives for some rows, read in blocks into a temporary file, (r, *shape)."""
    scratch = Scratch(shape, dtype)
    for start in range(0, len(rows), STORED_AT_ONCE):
        scratch.append(read(rows[start : start + STORED_AT_ONCE]))
    return scratch.rows()


class RowByRow:
    """Rows that come one at a time, written to a `Scratch` file in blocks; memory holds one block.

    Parameters
    ----------
    shape : tuple of int
        Shape of one row.
    dtype : dtype
        Of the values; floats beyond its range become infinite, without a warning.
    block : int
        Rows that are written together, at least 1.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, block: int) -> None:
        self._written = Scratch(shape, dtype)
        self._block = block
        self._waiting: list[Any] = []

    def __len__(self) -> int:
        return self._written.length + len(self._waiting)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self._written.shape

    def add(self, row: Any) -> None:
        """Append one row, an array or nested lists of the given shape, kept as it is until its block is written.

        Raises
        ------
        ValueError
            The row completes a block in which one has another shape.
        OverflowError
            The row completes a block in which one has a Python integer that `dtype` cannot hold.
        UserError
            The temporary folder is full.
        """
        self._waiting.append(row)
        if len(self._waiting) == self._block:
            self._write()

    def rows(self) -> AnyArray:
        """All rows, shape (n, *shape), as `Scratch.rows`; raises what `add` does for those not written yet."""
        self._write()
        return self._written.rows()

    def _write(self) -> None:
        if self._waiting:
            with np.errstate(over="ignore"):
                self._written.append(np.array(self._waiting, self._written.dtype))
            self._waiting = []


class Names:
    """Codes 0, 1, 2 ... for names in the order in which they first appear."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, name: str) -> int:
        """The code of a name, a new one when it is new."""
        return self._codes.setdefault(name, len(self._codes))

    @property
    def names(self) -> tuple[str, ...]:
        """The names by code."""
        return tuple(self._codes)


def compact(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber codes so that only the names in use remain, in their old order."""
    used, inverse = np.unique(codes, return_inverse=True)
    return inverse.astype(np.int64), tuple(names[code] for code in used)


def sort_classes(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber labels so that the class names are in alphabetical order."""
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), np.int64)
    rank[order] = np.arange(len(names))
    return rank[codes], tuple(names[code] for code in order)


def chosen_users(names: list[str], users: int | None) -> list[str]:
    """So many of the names at random, the same for every seed, in their order; all where `users` is None or more."""
    if users is None or users >= len(names):
        return names
    generator = Streams(0).generator(Purpose.PARTITION, round=2**32 + 1)
    return [names[index] for index in np.sort(generator.choice(len(names), users, replace=False))]
