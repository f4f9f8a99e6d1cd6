"""Tools for raw files: look-up in a folder, lines of (un)zipped text, rows stored in temporary files."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import re
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.output import temporary_room
from data_prep.raw import Tally
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

BLOCK = 1 << 20
LONGEST_LINE = 1 << 26
"""Largest number of bytes of a line of text, since unzipped text may be much longer than the file."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
WIDE = ("utf-16", "utf-32")
"""Encodings in which a line feed takes several bytes."""
GZIP = b"\x1f\x8b"
PART_WORDS = {
    "train": ("train", "training", "trainset"),
    "test": ("test", "testing", "testset"),
    "valid": ("validation", "valid", "val", "dev"),
}
"""Words in names of files and folders (in any case) that denote a part of the data."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
TOOLS = {"__macosx", "__pycache__", "@eadir", "#recycle", "@recycle", "$recycle.bin", "lost+found"}
"""Folders that tools create, in lower case."""
STORED_AT_ONCE = 256


def part_of(path: Path) -> str | None:
    """Return the part ("train", "test" or "valid") denoted by a relative path, searching its last component first."""
    words = [word.lower() for name in reversed(path.parts) for word in WORD.findall(name)]
    return next((part for word in words for part, known in PART_WORDS.items() if word in known), None)


def folder_of(raw: Path) -> Path:
    """Return `raw` if it is a folder; reject anything else."""
    if not raw.is_dir():
        raise UserError(f"{raw} is not a folder; --raw takes the folder that holds the data set's files")
    return raw


def is_hidden(name: str) -> bool:
    """Check whether a file or folder of this name is hidden or belongs to a tool, and so contains no samples."""
    return name.startswith(".") or name.lower() in TOOLS


def files_below(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder at any depth that match a pattern (without any: all files), in path order.

    Hidden files and folders of tools are skipped. Linked folders are followed, but no folder is read twice, and none
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
    """Return the only file below `raw` that matches a pattern; the first pattern with a match decides."""
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
    """Return the file found by `find`; if it is missing, raise an error with the expected content of the folder."""
    path = find(raw, patterns)
    if path is None:
        raise UserError(f"no {patterns[0]} in {raw}; --raw must hold {hint}")
    return path


def open_bytes(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file, unzipping gzip content whatever the file's name."""
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
    """Yield the lines of a text file, unzipped if it is gzip."""
    try:
        known = codecs.lookup(encoding or "utf-8").name
    except LookupError:
        raise UserError(
            f"--encoding {encoding!r} is unknown. Give one such as utf-8, latin-1, cp1252 or utf-16."
        ) from None
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
                if b"\0" in line and encoding is None:
                    raise UserError(f"{path} is a binary file, not text. Give it its own ending, or write text.")
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


def csv_rows(
    path: Path, content: Iterable[str], tally: Tally | None, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield first line and fields of each row; a blank line has no fields, and `tally` counts malformed lines.

    A quotation mark may be part of a text unless it joins lines. Python's csv module gives the line and the number of
    fields of each row, whereas pandas.read_csv silently fills short rows with missing values.
    """
    held: list[str] = []
    form: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True}

    def kept() -> Iterator[str]:
        for line in content:
            held.append(line)
            yield line

    reader = csv.reader(kept(), **form)
    while True:
        held.clear()
        line = reader.line_num + 1
        try:
            row = next(reader)
            if len(held) > 1:
                next(csv.reader(held, **form, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            joined = f"; a quotation mark joins {len(held):,} lines" if len(held) > 1 else ""
            if tally is not None:
                tally.bad(f"{path}, line {line}", f"not a CSV row ({error}{joined})", len(held))
            continue
        yield line, row


class Scratch:
    """Rows in an unnamed temporary file: appended in blocks, then read as one memory-mapped array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.length = 0
        with temporary_room(os.environ.get("TMPDIR", "/tmp")):
            self._folder = tempfile.gettempdir()
            self._file = tempfile.TemporaryFile(prefix="data_prep-")  # noqa: SIM115  (as long as this object)
        weakref.finalize(self, self._file.close)  # a map may remain open after it

    def append(self, rows: AnyArray) -> None:
        """Add rows, shape (r, *shape)."""
        block = np.ascontiguousarray(rows, self.dtype)
        if block.shape[1:] != self.shape:
            raise ValueError(f"rows of shape {block.shape[1:]} for a scratch file of {self.shape}")
        with temporary_room(self._folder):
            self._file.write(block.data if block.size else b"")
        self.length += len(block)

    def rows(self) -> AnyArray:
        """Return all rows, shape (n, *shape), as a private (copy-on-write) map of the file."""
        with temporary_room(self._folder):
            self._file.flush()
        if not self.length or not all(self.shape):
            return np.empty((self.length, *self.shape), self.dtype)
        return np.memmap(self._file, self.dtype, "c", shape=(self.length, *self.shape))


def stored(read: Callable[[Ints], AnyArray], rows: Ints, shape: tuple[int, ...], dtype: Any) -> AnyArray:
    """Read rows with `read` in blocks and return them as a map of a temporary file, (r, *shape)."""
    scratch = Scratch(shape, dtype)
    for start in range(0, len(rows), STORED_AT_ONCE):
        scratch.append(read(rows[start : start + STORED_AT_ONCE]))
    return scratch.rows()
