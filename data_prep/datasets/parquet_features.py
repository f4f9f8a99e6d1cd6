"""What samples of Parquet and Arrow files are made of: numbers, token ids, images, texts, kept in temporary files."""

from __future__ import annotations

import io
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.arrays import LARGEST_TOKEN
from data_prep.datasets.base import Tally
from data_prep.datasets.folders import Found, ImageForm, decode, image_facts
from data_prep.datasets.raw_files import Names, RowByRow, Scratch
from data_prep.datasets.texts import LabelledTexts
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Ints

LARGEST = float(np.finfo(np.float32).max)
BLOCK_ROWS = 1024
Kind = Literal["image", "text", "tokens", "vector"]


def flat(values: list[Any]) -> list[Any]:
    """Numbers of some columns in a row: scalars, and those of lists."""
    found: list[Any] = []
    for value in values:
        found.extend(value if isinstance(value, list) else [value])
    return [float(value) if isinstance(value, Decimal) else value for value in found]


class Places:
    """In which row of which file every row is that is kept."""

    def __init__(self) -> None:
        self._files: list[Path] = []
        self._starts: list[int] = []
        self._rows = array("q")

    def begin(self, path: Path) -> None:
        """The next rows are those of another file."""
        self._files.append(path)
        self._starts.append(len(self._rows))

    def add(self, row: int) -> None:
        """Append a row by its number in the file."""
        self._rows.append(row)

    def __call__(self, row: int) -> str:
        """Where it is, in words."""
        return f"{self._files[bisect_right(self._starts, row) - 1]}, row {self._rows[row]}"


class Ragged:
    """Rows of unlike lengths, one behind another in a temporary file.

    Parameters
    ----------
    dtype : dtype
        Of the values.
    """

    def __init__(self, dtype: Any) -> None:
        self._values = Scratch((), dtype)
        self._ends = array("q", [0])
        self._block: list[Any] = []
        self._mapped: AnyArray | None = None

    def append(self, row: Any) -> None:
        """Add a row (k,)."""
        self._block.append(np.asarray(row, self._values.dtype))
        self._ends.append(self._ends[-1] + len(row))
        if len(self._block) == BLOCK_ROWS:
            self._flush()

    @property
    def lengths(self) -> Ints:
        """Values of each row, (n,)."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    @property
    def longest(self) -> int:
        """Values of the longest row."""
        return int(self.lengths.max(initial=0))

    def values(self) -> AnyArray:
        """The values of all rows, one behind another."""
        return self._all()

    def row(self, number: int) -> AnyArray:
        """One row."""
        return np.asarray(self._all()[self._ends[number] : self._ends[number + 1]])

    def padded(self, width: int, filling: float) -> AnyArray:
        """All rows (n, width), cut or filled up."""
        values, ends = self._all(), np.array(self._ends, np.int64)
        out = Scratch((width,), self._values.dtype)
        for start in range(0, len(ends) - 1, BLOCK_ROWS):
            first, last = ends[start : start + BLOCK_ROWS], ends[start + 1 : start + 1 + BLOCK_ROWS]
            first = first[: len(last)]
            place = np.arange(width)
            there = place < (last - first)[:, None]
            block = np.full(there.shape, filling, values.dtype)
            block[there] = values[(first[:, None] + place)[there]]
            out.append(block)
        return out.rows()

    def _all(self) -> AnyArray:
        if self._block or self._mapped is None:
            self._flush()
            self._mapped = self._values.rows()
        return self._mapped

    def _flush(self) -> None:
        if self._block:
            self._values.append(np.concatenate(self._block))
            self._block = []


class Numbers:
    """Vectors of some columns: numbers, or lists of them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.columns = names
        self._rows: RowByRow | None = None

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append a row; False, and counted, where it is none."""
        numbers = flat(values)
        if any(not isinstance(value, int | float) or not abs(value) <= LARGEST for value in numbers):
            tally.bad(where, "a value that is no finite number")
            return False
        if self._rows is None and numbers:
            self._rows = RowByRow((len(numbers),), np.float32, BLOCK_ROWS)
        if self._rows is None:
            tally.bad(where, "no number")
            return False
        if len(numbers) != self.shape[0]:
            tally.bad(where, f"{len(numbers)} numbers where the first row has {self.shape[0]}")
            return False
        self._rows.add(numbers)
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """(d,), and () before the first row."""
        return () if self._rows is None else self._rows.shape

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers, where each is a column."""
        return self.columns if len(self.columns) == self.shape[0] else ()

    def reader(self) -> Any:
        """A function from rows to their vectors, float32 (r, d)."""
        assert self._rows is not None
        rows = self._rows.rows()
        return lambda index: rows[index]


class Tokens:
    """Lists of token ids, cut and padded with 0 to one length.

    Parameters
    ----------
    length : int
        Ids kept of a list; where all are shorter, those of the longest.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows = Ragged(np.int32)

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append a row; False, and counted, where it is none."""
        ids = flat(values)
        if not ids or any(not isinstance(value, int) or not 0 <= value <= LARGEST_TOKEN for value in ids):
            tally.bad(where, f"no token ids, whole numbers from 0 to {LARGEST_TOKEN:,}")
            return False
        self._rows.append(ids[: self._length])
        return True

    @property
    def shape(self) -> tuple[int, ...]:
        """(L,)."""
        return (self._rows.longest,)

    def ids(self) -> NDArray[np.int32]:
        """All ids, one after another."""
        return self._rows.values()

    def reader(self) -> Any:
        """A function from rows to their token ids, int32 (r, L)."""
        rows = self._rows.padded(self._rows.longest, 0)
        return lambda index: rows[index]


class Images:
    """Encoded images one behind another in a temporary file, decoded when they are asked for.

    Where a row names an image's file instead, the path is kept in its place.

    Parameters
    ----------
    folder : Path
        Where relative paths begin, if not beside the file that names them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._content = Ragged(np.uint8)
        self._is_path = array("b")
        self._sizes: list[tuple[int, int]] = []
        self._grey = True
        self._deepest = 0

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append an image; False, and counted, where it cannot be read."""
        given = values[0]
        content: Any = (given.get("bytes") or given.get("path")) if isinstance(given, dict) else given
        path = self._path(content, where) if isinstance(content, str) and content else None
        if path is not None and not path.is_file():
            tally.bad(where, f"there is no image {shown(content, repr)} in {self._folder} or beside the file")
            return False
        if path is None and (not isinstance(content, bytes) or not content):
            tally.bad(where, "neither the bytes nor the path of an image")
            return False
        facts = image_facts(io.BytesIO(content) if path is None else path, tally, where)
        if facts is None:
            return False
        self._content.append(np.frombuffer(content if path is None else os.fsencode(path), np.uint8))
        self._is_path.append(path is not None)
        self._sizes.append(facts.size)
        self._grey = self._grey and facts.grey
        self._deepest = max(self._deepest, facts.deepest)
        return True

    def _path(self, named: str, where: str) -> Path:
        """The file of a name; the folder, which is no file, where the name leads out of it or no file can have it."""
        folder, beside = os.path.abspath(self._folder), Path(where.rpartition(", row ")[0]).parent
        try:
            for start in (beside, self._folder):
                path = Path(os.path.abspath(start / named))
                if path.is_relative_to(folder) and path.is_file():
                    return path
        except (OSError, ValueError):
            pass
        return self._folder

    def found(self) -> Found:
        """Their sizes, and whether all are grey."""
        return Found((), np.empty(0, np.int64), tuple(self._sizes), self._grey, self._deepest)

    def fits(self, form: ImageForm) -> NDArray[np.bool_]:
        """Which have the size of a form, or are resized to it."""
        return np.array([form.resize or size == (form.width, form.height) for size in self._sizes], bool)

    def reader(self, form: ImageForm, where: Callable[[int], str]) -> Any:
        """A function from rows to their images of a form, uint8 (r, C, H, W); `where` says where a row is."""

        def read(rows: Ints) -> NDArray[np.uint8]:
            out = np.empty((len(rows), *form.shape), np.uint8)
            for place, row in enumerate(rows.tolist()):
                content = self._content.row(row).tobytes()
                source = Path(os.fsdecode(content)) if self._is_path[row] else io.BytesIO(content)
                try:
                    out[place] = decode(source, form)
                except Exception as error:  # decoders raise errors of many kinds
                    raise UserError(
                        f"{where(row)}: the image cannot be decoded ({raised(error)}); remove it and run again"
                    ) from error
            return out

        return read


class Texts:
    """Texts of some columns, joined by spaces."""

    def __init__(self, length: int) -> None:
        self._texts = LabelledTexts(length)

    def add(self, values: list[Any], where: str, tally: Tally) -> bool:
        """Append a text; False, and counted, where it is empty."""
        text = " ".join(value for value in values if isinstance(value, str))
        if not text.strip():
            tally.bad(where, "the text is empty")
            return False
        self._texts.add(text, 0)
        return True

    def collected(self, users: list[int], names: Names) -> LabelledTexts:
        """The texts with the user of each row, a code among names."""
        self._texts.users, self._texts.user_names = users, names
        return self._texts
