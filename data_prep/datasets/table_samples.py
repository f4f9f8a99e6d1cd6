"""Samples of tables, collected block by block into temporary files: numbers, token ids, images, texts."""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import Tally
from data_prep.datasets.columns import LARGEST, LISTS, Facts, shape_of
from data_prep.datasets.folders import Found, ImageFacts, ImageForm, decode, image_facts
from data_prep.datasets.labels import as_floats, is_missing
from data_prep.datasets.raw_files import Ragged, Scratch
from data_prep.datasets.tables import ColumnBlock
from data_prep.datasets.texts import LabelledTexts
from fedmpi.common.errors import UserError, raised, shown
from fedmpi.common.types import AnyArray, Bools, Ints

LARGEST_TOKEN = 10_000_000


class Numbers:
    """Vectors of some columns of numbers or of lists of them, or samples (T, C) of one column of lists of lists."""

    def __init__(self, names: tuple[str, ...], facts: dict[str, Facts], decimal: str) -> None:
        self._facts, self._decimal, self.columns = {name: facts[name] for name in names}, decimal, names
        shapes = [found.shape for found in self._facts.values()]
        self.shape: tuple[int, ...] = shapes[0] if len(shapes) == 1 else (sum(sum(shape) for shape in shapes),)
        self._rows = Scratch(self.shape, np.float32)

    def add(self, block: ColumnBlock, tally: Tally) -> Bools:
        """Append the rows of a block that are numbers; True for these, the others are counted."""
        rows, good, parts = len(block.places), np.ones(len(block.places), bool), []
        for name, found in self._facts.items():
            values, nested, lists = block.columns[name], found.kind == "nested", found.kind in LISTS
            if lists:
                part = np.full((rows, *found.shape), np.nan)
                for row, value in enumerate(values.tolist()):
                    if value is not None and shape_of(value, nested) == found.shape:
                        part[row] = np.stack(value) if nested else value
            else:
                part = as_floats(values, self._decimal)[:, None]
            bad = ~(np.abs(part) <= LARGEST).reshape(rows, -1).all(axis=1)
            for row in np.flatnonzero(bad & good).tolist():
                value = values[row]
                if lists and value is not None and shape_of(value, nested) != found.shape:
                    shapes = [" x ".join(map(str, shape)) for shape in (shape_of(value, nested), found.shape)]
                    tally.bad(
                        block.where(row), f"{shapes[0]} numbers in column {name!r} where most rows have {shapes[1]}"
                    )
                else:
                    said = "" if isinstance(value, np.ndarray | list) else f" ({shown(value, repr)})"
                    tally.bad(block.where(row), f"no finite number in column {name!r}{said}")
            good &= ~bad
            parts.append(part)
        x = parts[0] if len(self.shape) == 2 else np.concatenate(parts, axis=1)
        self._rows.append(x[good])
        return good

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the numbers, if each is a column."""
        return self.columns if (len(self.columns),) == self.shape else ()

    def reader(self) -> Callable[[Ints], AnyArray]:
        """A function from rows to their samples, float32 (r, …)."""
        rows = self._rows.rows()
        return lambda index: rows[index]


class Tokens:
    """Lists of token ids, cut and padded with 0 to one length."""

    def __init__(self, name: str, length: int) -> None:
        self._name, self._length = name, length
        self._rows = Ragged(np.int32)

    def add(self, block: ColumnBlock, tally: Tally) -> Bools:
        """Append the rows of a block that are token ids; True for these, the others are counted."""
        good = np.ones(len(block.places), bool)
        for row, value in enumerate(block.columns[self._name].tolist()):
            ids = np.array([] if value is None else value, np.float64)
            if not len(ids) or not (ids.min() >= 0 and ids.max() <= LARGEST_TOKEN):
                tally.bad(block.where(row), f"no token ids, whole numbers from 0 to {LARGEST_TOKEN:,}")
                good[row] = False
            else:
                self._rows.append(ids[: self._length])
        return good

    @property
    def shape(self) -> tuple[int, ...]:
        """(L,)."""
        return (int(self._rows.lengths.max(initial=0)),)

    def ids(self) -> AnyArray:
        """All ids, one after another."""
        return self._rows.values

    def reader(self) -> Callable[[Ints], AnyArray]:
        """A function from rows to their token ids, int32 (r, L)."""
        rows = self._rows.padded(self.shape[0], 0)
        return lambda index: rows[index]


class Images:
    """Encoded images one after another in a temporary file, decoded when they are asked for.

    Where a row names an image's file instead, the path is kept in its place.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._content = Ragged(np.uint8)
        self._is_path = array("b")
        self._facts: list[ImageFacts] = []

    def add(self, block: ColumnBlock, tally: Tally) -> Bools:
        """Append the images of a block; True for these, those that cannot be read are counted."""
        values = block.columns[self._name].tolist()
        return np.array([self._add(value, block, row, tally) for row, value in enumerate(values)], bool)

    def _add(self, given: Any, block: ColumnBlock, row: int, tally: Tally) -> bool:
        content: Any = (given.get("bytes") or given.get("path")) if isinstance(given, dict) else given
        path = self._path(content, block.path.parent) if isinstance(content, str) and content else None
        where = block.where(row)
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
        self._facts.append(facts)
        return True

    def _path(self, named: str, beside: Path) -> Path:
        """The file of a name; the folder, which is no file, where the name leads out of it or no file can have it."""
        folder = os.path.abspath(self._folder)
        try:
            for start in (beside, self._folder):
                path = Path(os.path.abspath(start / named))
                if path.is_relative_to(folder) and path.is_file():
                    return path
        except (OSError, ValueError):
            pass
        return self._folder

    def found(self) -> Found:
        """Return the facts found about the images."""
        return Found((), np.empty(0, np.int64), tuple(self._facts))

    def fits(self, form: ImageForm) -> Bools:
        """Which have the size of a form, or are resized to it."""
        return np.array([form.resize or facts.size == (form.width, form.height) for facts in self._facts], bool)

    def reader(self, form: ImageForm, where: Callable[[int], str]) -> Callable[[Ints], AnyArray]:
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

    def __init__(self, names: tuple[str, ...], length: int) -> None:
        self._names = names
        self.texts = LabelledTexts(length)

    def add(self, block: ColumnBlock, tally: Tally) -> Bools:
        """Append the texts of a block; True for these, empty ones are counted."""
        columns = [block.columns[name] for name in self._names]
        there = [~is_missing(column) for column in columns]
        good = np.asarray(np.any(there, axis=0))
        for row in range(len(good)):
            if good[row]:
                held = zip(columns, there, strict=True)
                self.texts.add(" ".join(column[row] for column, known in held if known[row]), 0)
            else:
                tally.bad(block.where(row), "the text is empty")
        return good
