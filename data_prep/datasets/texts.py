"""From labelled texts to a data set: what sentiment140, mind and amazon have in common."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import Names, compact
from data_prep.raw import RawDataset
from data_prep.text import TextRows, read_vectors
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints


@dataclass
class LabelledTexts:
    """Texts, labels and users collected row by row, training and test rows together."""

    length: int  # Tokens kept of a text
    rows: TextRows = field(init=False)
    labels: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    user_names: Names = field(default_factory=Names)
    hashes: array[int] = field(default_factory=lambda: array("q"))

    def __post_init__(self) -> None:
        self.rows = TextRows(self.length)

    def add(self, text: str, label: int, user: str | None = None) -> None:
        """Append one row; `user` None: nobody known."""
        self.rows.add(text)
        self._beside(text, label, user)

    def add_words(self, words: list[str], label: int, user: str) -> None:
        """Append one row whose words are known."""
        self.rows.add_words(words)
        self._beside(" ".join(words), label, user)

    def _beside(self, text: str, label: int, user: str | None) -> None:
        self.hashes.append(hash(text.strip()))  # 64 bits, enough to count equal texts
        self.labels.append(label)
        self.users.append(-1 if user is None else self.user_names.code(user))

    def __len__(self) -> int:
        return len(self.labels)

    def same(self) -> Ints:
        """Rows with the same text share a number, 0, 1, 2 ... in the order in which texts first appear; int64 (n,)."""
        _, first, inverse = np.unique(np.frombuffer(self.hashes, np.int64), return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[inverse]


def text_data_set(
    data_set: DataSet,
    texts: LabelledTexts,
    labels: Ints,
    class_names: tuple[str, ...],
    parts: tuple[Ints, Ints],
    options: ReadOptions,
    tally: Tally,
) -> RawDataset:
    """The data set of labelled texts; features (length,) int32 token ids.

    Users are kept when every training row has one.
    """
    train, test = parts
    for part, rows in (("training", train), ("test", test)):
        if not len(rows) and (part == "training" or "split" not in data_set.options):
            first = f": the first that is none: {tally.first}" if tally.first else ""
            raise UserError(f"{data_set.name}: no readable {part} row; --raw must hold {data_set.files}{first}")
    users, user_names = natural_clients(texts.users, texts.user_names, train, tally)
    notes = (*(f"left out: {count:,} {rule}" for rule, count in tally.dropped.items()), *tally.notes)

    def encoded(known: Ints, tally: Tally) -> RawDataset:
        """The data set with the vocabulary of these rows of `train`."""
        ids, vocabulary = texts.rows.encode(train[known], options.vocabulary)
        waits = not len(test) and len(known) == len(train)  # for the test part to be held out

        def read(index: Ints) -> NDArray[np.int32]:
            return ids[train[index]]

        return RawDataset(
            name=data_set.name,
            task="text",
            classes=len(class_names),
            class_names=class_names,
            feature_shape=(options.length,),
            dtype="int32",
            mean=(),
            std=(),
            labels=labels[train],
            users=users,
            user_names=user_names,
            read=read,
            test_x=ids[test],
            test_y=labels[test],
            skipped=skipped,
            licence=data_set.licence,
            citation=data_set.citation,
            vocabulary=vocabulary,
            vectors=None if options.vectors is None or waits else read_vectors(options.vectors, vocabulary, tally),
            notes=notes,
            refit=lambda rows: encoded(rows, Tally()),
        )

    skipped = tally.unreadable
    return encoded(np.arange(len(train)), tally)


def natural_clients(
    codes: Sequence[int], names: Names, train: Ints, tally: Tally
) -> tuple[Ints | None, tuple[str, ...] | None]:
    """The users of the training rows as clients: int64 (len(train),), and their names; None where rows name no user."""
    users = np.array(codes, np.int64)[train]
    nobody = int((users < 0).sum())
    if nobody == len(users):
        return None, None
    if nobody:
        tally.note(f"{nobody:,} of {len(users):,} training rows name no user, so the data have no natural clients")
        return None, None
    return compact(users, names.names)
