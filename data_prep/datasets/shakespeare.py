"""Shakespeare's plays by role, as LEAF gives them: 80 characters and the one that follows (McMahan et al. 2017)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.leaf import CITATION, HINT, PAGE, leaf_users, require_leaf
from data_prep.datasets.raw_files import Names, Scratch, compact, folder_of
from data_prep.raw import RawDataset
from data_prep.text import SPECIAL, UNKNOWN
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's models, in the order of their classes."""
LENGTH = 80
WRITTEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""How characters stand in the vocabulary, which has a line for each."""
_CLASS_OF = np.full(256, -1, np.int64)
_CLASS_OF[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Characters as token ids (80,) int32, the next character as class; the role is the natural client.

    Ids are 2 + the class of a character; 1 is any other. Samples of another length, and those whose next character is
    none of the 80, are left out.
    """
    names, parts = Names(), []
    for files in require_leaf(folder_of(raw)):
        rows, labels, users = Scratch((LENGTH,), np.int32), [], []
        for path in files:
            for name, ids, classes, good in leaf_users(path, _encoded, "role"):
                for row in np.flatnonzero(~good):
                    tally.bad(
                        f"{path}, role {name}, record {row}", f"not {LENGTH} characters and one of {len(LETTERS)}"
                    )
                if good.any():
                    rows.append(ids[good])
                    labels.append(classes[good])
                    users.append(np.full(int(good.sum()), names.code(name)))
        parts.append((rows, labels, users))
    for (rows, _, _), which in zip(parts, ("training", "test"), strict=True):
        if not rows.length:
            raise UserError(f"{raw} holds no readable {which} sample: {tally.first or 'its users have none'}")
    (train, labels, users), (test, test_labels, _) = parts
    codes, user_names = compact(np.concatenate(users), names.names)
    ids = train.rows()
    written = tuple(WRITTEN.get(letter, letter) for letter in LETTERS)
    return RawDataset(
        name=SHAKESPEARE.name,
        task="text",
        classes=len(LETTERS),
        class_names=written,
        feature_shape=(LENGTH,),
        dtype="int32",
        mean=(),
        std=(),
        labels=np.concatenate(labels),
        users=codes,
        user_names=user_names,
        read=lambda index: ids[index],
        test_x=test.rows(),
        test_y=np.concatenate(test_labels),
        skipped=tally.unreadable,
        licence=SHAKESPEARE.licence,
        citation=SHAKESPEARE.citation,
        vocabulary=(*SPECIAL, *written),
    )


def _encoded(name: str, x: Any, y: Any) -> tuple[str, NDArray[np.int32], Ints, NDArray[np.bool_]]:
    """Token ids (n, 80), classes (n,) and which rows are as they should be, of a role."""
    ids, classes = np.full((len(x), LENGTH), UNKNOWN, np.int32), np.full(len(x), -1, np.int64)
    for row, (before, after) in enumerate(zip(x, y, strict=True)):
        if type(before) is str and type(after) is str and len(before) == LENGTH and len(after) == 1:
            codes = np.frombuffer((before + after).encode("utf-32-le", "surrogatepass"), np.uint32)
            known = _CLASS_OF[np.minimum(codes, len(_CLASS_OF) - 1)]
            ids[row] = np.where(known[:-1] >= 0, known[:-1] + len(SPECIAL), UNKNOWN)
            classes[row] = known[-1]
    return name, ids, classes, classes >= 0


SHAKESPEARE = DataSet(
    name="shakespeare",
    samples="4,226,150 of 1,129 roles",
    classes=str(len(LETTERS)),
    licence="public domain; LEAF: BSD 2-clause",
    citation=f"B. McMahan et al., Communication-efficient learning of deep networks, 2017; {CITATION}",
    page=PAGE,
    files=HINT,
    read=read,
)
