"""Data sets by user from LEAF's JSON and TensorFlow Federated's HDF5 files, including FEMNIST and Shakespeare.

LEAF's files (Caldas et al. 2018) contain users, each with a list x of samples and a list y of targets. Each file is
read into memory as a whole. TFF's files have a group examples/CLIENT per client, with one array per field.
"""

from __future__ import annotations

import io
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from gzip import GzipFile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from data_prep.formats.files import files_below, folder_of, open_bytes
from data_prep.formats.texts import SPECIAL, UNKNOWN
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, measure
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

LEAF = ("{}/*.json", "{}/*.json.gz")
"""File patterns of a part, train or test."""
DAMAGED = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError, MemoryError)
"""Errors raised when content has another form."""
EXAMPLES = "examples"
SIGNATURE = b"\x89HDF\r\n\x1a\n"
FEMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
IMAGE = (1, 28, 28)
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""Characters of LEAF's models of Shakespeare, in the order of their classes."""
LENGTH = 80
WRITTEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""Escapes of characters in the vocabulary, which has one line per character."""
_CLASS_OF = np.full(256, -1, np.int64)
_CLASS_OF[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))


def part_files(folder: Path, patterns: tuple[str, ...], name: str, hint: str) -> tuple[list[Path], list[Path]]:
    """Return the training and test files below a folder, by the first pattern that matches both."""
    for pattern in patterns:
        train, test = (files_below(folder_of(folder), pattern.format(part)) for part in ("train", "test"))
        if train and test:
            return train, test
    raise UserError(f"no {name} files in {folder}; --raw must hold {hint}")


def leaf_files(folder: Path, hint: str) -> tuple[list[Path], list[Path]]:
    """LEAF's training and test files below a folder."""
    return part_files(folder, LEAF, "LEAF", hint)


def leaf_users(path: Path, person: str = "user") -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the users of a LEAF file in its order: name, samples, targets, of equal length."""
    name = "none yet"
    try:
        with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig") as text:
            content = json.load(text)
        users, data = set(content["users"]), content["user_data"]
        for name, samples in data.items():
            x, y = list(samples["x"]), list(samples["y"])
            if len(x) != len(y):
                raise ValueError("x and y differ in length")
            yield name, x, y
        if users != data.keys():
            raise ValueError(f"users names {len(users)} {person}s, user_data holds {len(data)}, not the same")
    except DAMAGED as error:
        raise UserError(
            f"{path}, {person} {name}: not LEAF's format (users, user_data with x and y each): {error!r}. Fetch it "
            "again"
        ) from error


def tff_clients(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[str, dict[str, AnyArray]]]:
    """Yield the clients of a TFF file in the order of their names, each with the arrays of these fields."""
    with open_bytes(path) as stream:
        if isinstance(stream, GzipFile) or stream.read(len(SIGNATURE)) != SIGNATURE:
            raise UserError(f"{path} is not an HDF5 file; unpack it if it is compressed, or fetch it again")
    name = "none yet"
    try:
        with h5py.File(path, "r", locking=False) as file:  # not every file system has locks, and nothing is written
            for name, group in file[EXAMPLES].items():
                yield name, {field: group[field][:] for field in fields}
    except (*DAMAGED, AttributeError, RuntimeError) as error:
        raise UserError(
            f"{path}, client {name}: not a TFF file ({EXAMPLES}/CLIENT with {', '.join(fields)}): {error}. Fetch it "
            "again"
        ) from error


@dataclass
class UserRows:
    """Rows collected user by user, first those for training, then those for testing."""

    rows: list[AnyArray] = field(default_factory=list)
    labels: list[Ints] = field(default_factory=list)
    users: list[Ints] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.labels))

    def add(self, x: AnyArray, y: AnyArray, user: str) -> None:
        """Append some rows of a user."""
        if len(y):
            self.rows.append(x)
            self.labels.append(y.astype(np.int64))
            self.users.append(np.full(len(y), self.names.setdefault(user, len(self.names))))

    def data_set(self, data_set: DataSet, boundary: int, **facts: Any) -> RawDataset:
        """Return the data set with the users as natural clients; rows from `boundary` on are for testing."""
        x, y = np.concatenate(self.rows), np.concatenate(self.labels)
        facts |= {"users": np.concatenate(self.users), "user_names": tuple(self.names)}
        facts |= {"feature_shape": x.shape[1:], "dtype": str(x.dtype), "read": lambda index: x[index]}
        return data_set.of(y[:boundary], y[boundary:], **facts)


def read_femnist(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read FEMNIST from either format; features (1, 28, 28) uint8 as published (1.0 = white paper is 255), by writer.

    Writers without images are left out.
    """
    patterns = ("fed_emnist_{}.h5", "fed_emnist_digitsonly_{}.h5", *LEAF)
    found = part_files(raw, patterns, "FEMNIST", data_set.files)
    held, ends = UserRows(), [0]
    for files, which in zip(found, ("training", "test"), strict=True):
        for path in files:
            for name, pixels, labels in _writers(path):
                held.add(np.rint(pixels * 255).astype(np.uint8).reshape(-1, *IMAGE), labels, name)
        if len(held) == ends[-1]:
            raise UserError(f"no image of {which} writers in {raw}. Fetch it again")
        ends.append(len(held))
    names = FEMNIST_CLASSES
    return held.data_set(data_set, ends[1], task="image", classes=len(names), class_names=names, fit=measure)


def _writers(path: Path) -> Iterator[tuple[str, AnyArray, Ints]]:
    """Yield the writers of a file: name, pixels in [0, 1] (n, 784), labels (n,)."""
    held: Iterator[tuple[str, Any, Any]] = leaf_users(path, "writer")
    if path.suffix == ".h5":
        held = ((name, found["pixels"], found["label"]) for name, found in tff_clients(path, ("pixels", "label")))
    for name, x, y in held:
        try:
            pixels, labels = np.asarray(x, np.float64).reshape(len(y), math.prod(IMAGE)), np.asarray(y)
            good = ((pixels >= 0) & (pixels <= 1)).all() and set(labels.tolist()) <= set(range(len(FEMNIST_CLASSES)))
        except (ValueError, TypeError):
            good = False
        if not good:
            raise UserError(
                f"{path}, writer {name}: not images of {math.prod(IMAGE)} numbers in [0, 1] with labels from 0 to "
                f"{len(FEMNIST_CLASSES) - 1}. Fetch it again"
            )
        yield name, pixels, labels


def read_shakespeare(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read characters as token ids (80,) int32, the next character as class; the role is the natural client.

    The id of a character is 2 + its class; 1 is any other character. Samples of another length are skipped, and so are
    those whose next character is none of the 80.
    """
    held, ends = UserRows(), [0]
    for files, which in zip(leaf_files(raw, data_set.files), ("training", "test"), strict=True):
        for path in files:
            for name, x, y in leaf_users(path, "role"):
                ids, classes = _encoded(x, y)
                good = classes >= 0
                for row in np.flatnonzero(~good):
                    where = f"{path}, role {name}, record {row}"
                    tally.bad(where, f"not {LENGTH} characters and one of {len(LETTERS)}")
                held.add(ids[good], classes[good], name)
        if len(held) == ends[-1]:
            raise UserError(f"{raw} holds no readable {which} sample.{tally.first_bad or ' Its users have none.'}")
        ends.append(len(held))
    written = tuple(WRITTEN.get(letter, letter) for letter in LETTERS)
    about = {"task": "text", "classes": len(LETTERS), "class_names": written}
    return held.data_set(data_set, ends[1], **about, vocabulary=(*SPECIAL, *written))


def _encoded(x: list[Any], y: list[Any]) -> tuple[AnyArray, Ints]:
    """Return token ids (n, 80) and classes (n,) of a role's samples, with -1 for invalid ones."""
    ids, classes = np.full((len(x), LENGTH), UNKNOWN, np.int32), np.full(len(x), -1, np.int64)
    for row, (before, after) in enumerate(zip(x, y, strict=True)):
        if type(before) is str and type(after) is str and len(before) == LENGTH and len(after) == 1:
            codes = np.frombuffer((before + after).encode("utf-32-le", "surrogatepass"), np.uint32)
            known = _CLASS_OF[np.minimum(codes, len(_CLASS_OF) - 1)]
            ids[row] = np.where(known[:-1] >= 0, known[:-1] + len(SPECIAL), UNKNOWN)
            classes[row] = known[-1]
    return ids, classes
