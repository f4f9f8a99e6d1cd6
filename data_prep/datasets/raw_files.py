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
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.room import temporary_room
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints

BLOCK = 1 << 20
LONGEST_LINE = 1 << 26
"""Bytes of a line of text: what is unzipped may be much longer than the file."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
WIDE = ("utf-16", "utf-32")
"""Encodings of which a line feed is several bytes."""
GZIP = b"\x1f\x8b"
PART_WORDS = {
    "train": ("train", "training", "trainset"),
    "test": ("test", "testing", "testset"),
    "valid": ("validation", "valid", "val", "dev"),
}
"""Words in the names of files and folders, in any case, by the part of the data that they mean."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
TOOLS = {"__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found"}
"""Folders that tools make for themselves, in small letters."""
STORED_AT_ONCE = 256
RAGGED_AT_ONCE = 1024


def part_of(path: Path) -> str | None:
    """The part ("train", "test" or "valid") that the words of a relative path mean, the last folder or file first."""
    words = [word.lower() for name in reversed(path.parts) for word in WORD.findall(name)]
    return next((part for word in words for part, known in PART_WORDS.items() if word in known), None)


def folder_of(raw: Path) -> Path:
    """`raw` itself when it is a folder."""
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
    """The one file below `raw` that matches a pattern; the first pattern that matches anything decides."""
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
    """The content of a file, unzipped on the way where it is gzip, whatever its name."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file; --raw must lead to files")
    try:
        stream = path.open("rb")
        if stream.peek(2)[:2] != GZIP:
            return stream
        stream.close()
        return gzip.open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot open {path}: {error.strerror or error}") from error


def lines(
    path: Path, encoding: str | None = None, fallback: str | None = None, remedy: str = "Save it as UTF-8."
) -> Iterator[str]:
    """Lines of a text file, unzipped where it is gzip."""
    known = _encoding(encoding or "utf-8")
    with open_bytes(path) as stream:
        try:
            if known.startswith(WIDE):
                text = io.TextIOWrapper(stream, known, newline="\n")
                yield from iter(lambda: text.readline(LONGEST_LINE), "")
                return
            for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), 1):
                if len(line) == LONGEST_LINE:
                    raise UserError(
                        f"{path}, line {number} is longer than {LONGEST_LINE:,} bytes; end rows with a line feed"
                    )
                if number == 1:
                    if line.startswith(UTF_16):
                        raise UserError(f"{path} is UTF-16 text. {remedy}")
                    line = line.removeprefix(codecs.BOM_UTF8)
                try:
                    yield line.decode(known)
                except UnicodeDecodeError:
                    if fallback is None:
                        raise UserError(f"{path}, line {number} is not {known.upper()} text. {remedy}") from None
                    yield line.decode(fallback)
        except UnicodeError:
            raise UserError(f"{path} is not {known.upper()} text. {remedy}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} is damaged or cut short ({error}); fetch it again") from error


def _encoding(name: str) -> str:
    try:
        return codecs.lookup(name).name
    except LookupError:
        raise UserError(f"--encoding {name!r} is unknown. Give one such as utf-8, latin-1, cp1252 or utf-16.") from None


class Scratch:
    """Rows kept in an unnamed temporary file: appended in blocks, then read as one memory-mapped array."""

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
        """Add rows, shape (r, *shape)."""
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
    """Rows that come one at a time, written to a `Scratch` file in blocks; memory holds one block."""

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
        """Append one row, an array or nested lists of the given shape, kept as it is until its block is written."""
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


class Ragged:
    """Rows of different lengths, one after another in a temporary file."""

    def __init__(self, dtype: Any, whole: bool = False) -> None:
        self.whole = whole
        self._values = Scratch((), dtype)
        self._ends = array("q", [0])
        self._known = array("b")
        self._block: list[Any] = []
        self._mapped: AnyArray | None = None

    def append(self, row: Any) -> None:
        """Add a row (k,); None where it is missing."""
        self._known.append(row is not None)
        self._block.append(np.asarray([] if row is None else row, self._values.dtype))
        self._ends.append(self._ends[-1] + len(self._block[-1]))
        if len(self._block) == RAGGED_AT_ONCE:
            self._flush()

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which rows are not missing, (n,)."""
        return np.array(self._known, bool)

    @property
    def lengths(self) -> Ints:
        """Values of each row, (n,)."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    @property
    def values(self) -> AnyArray:
        """The values of all rows, one after another."""
        if self._block or self._mapped is None:
            self._flush()
            self._mapped = self._values.rows()
        return self._mapped

    def row(self, number: int) -> AnyArray:
        """One row."""
        return np.asarray(self.values[self._ends[number] : self._ends[number + 1]])

    def padded(self, width: int, filling: float) -> AnyArray:
        """All rows (n, width), cut or filled up."""
        values, starts, lengths = self.values, np.array(self._ends, np.int64)[:-1, None], self.lengths[:, None]
        out = Scratch((width,), self._values.dtype)
        for low in range(0, len(lengths), RAGGED_AT_ONCE):
            first, there = starts[low : low + RAGGED_AT_ONCE], np.arange(width) < lengths[low : low + RAGGED_AT_ONCE]
            block = np.full(there.shape, filling, values.dtype)
            block[there] = values[(first + np.arange(width))[there]]
            out.append(block)
        return out.rows()

    def _flush(self) -> None:
        if self._block:
            self._values.append(np.concatenate(self._block))
            self._block = []


class Names:
    """Codes 0, 1, 2 ... for names in the order in which they first appear."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._codes = {name: code for code, name in enumerate(names)}

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
