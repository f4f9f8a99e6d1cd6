"""Sequences of tokens with the token that follows at every position: what next-word and next-character sets share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import Names, RowByRow, compact
from data_prep.raw import RawDataset
from data_prep.text import BUFFER_ROWS, PADDING, read_vectors, renumbered
from fedmpi.common.errors import UserError
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import Ints

BEGIN, END = "<bos>", "<eos>"


class Sequences:
    """Sequences collected row by row, training and test rows together, and encoded when the training part is known.

    Tokens are kept under provisional ids in a temporary file, so memory holds the distinct ones and a block of rows.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.users: list[int] = []
        self.names = Names()
        self._words: dict[str, int] = {}
        self._rows = RowByRow((2, length), np.int32, BUFFER_ROWS)

    def __len__(self) -> int:
        return len(self.users)

    def add(self, tokens: Sequence[str], following: Sequence[str | None], user: str) -> None:
        """Append a row: at most L tokens, and what follows each; None counts nowhere, as do positions beyond."""
        words = self._words
        x = [words.setdefault(word, len(words) + 2) for word in tokens]
        y = [IGNORED if word is None else words.setdefault(word, len(words) + 2) for word in following]
        self._rows.add((x + [PADDING] * (self.length - len(x)), y + [IGNORED] * (self.length - len(y))))
        self.users.append(self.names.code(user))

    def add_text(self, tokens: Sequence[str], user: str) -> None:
        """Append the rows of a text: each token from the one before, from a begin to an end token.

        The text with both is cut into pieces of L + 1 tokens; the first L of each are the row, the last L what follows.
        """
        whole = [BEGIN, *tokens, END]
        for start in range(0, len(whole), self.length + 1):
            piece = whole[start : start + self.length + 1]
            if len(piece) > 1:
                self.add(piece[:-1], piece[1:], user)

    def encode(self, train: Ints, vocabulary: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Token ids and targets of all rows, int32 (n, 2, L), and words by id: see `renumbered`.

        Words are counted among tokens and targets; -1 is a target where nothing counts.
        """
        return renumbered(self._rows.rows(), tuple(self._words), train, vocabulary)


def sequence_data_set(
    data_set: DataSet, sequences: Sequences, boundary: int, options: ReadOptions, tally: Tally
) -> RawDataset:
    """The data set of sequences; features and targets (L,), the classes of a position are the token ids."""
    train, test = np.arange(boundary), np.arange(boundary, len(sequences))
    for part, rows in (("training", train), ("test", test)):
        if not len(rows):
            first = f": the first that is none: {tally.first}" if tally.first else ""
            raise UserError(f"{data_set.name}: no readable {part} row; --raw must hold {data_set.files}{first}")
    users, user_names = compact(np.array(sequences.users, np.int64)[train], sequences.names.names)
    notes = (*(f"left out: {count:,} {rule}" for rule, count in tally.dropped.items()), *tally.notes)
    skipped = tally.unreadable

    def encoded(known: Ints, tally: Tally) -> RawDataset:
        """The data set with the vocabulary of these rows."""
        rows, vocabulary = sequences.encode(known, options.vocabulary)
        return RawDataset(
            name=data_set.name,
            task="text",
            classes=len(vocabulary),
            class_names=(),
            feature_shape=(sequences.length,),
            dtype="int32",
            mean=(),
            std=(),
            labels=np.zeros(boundary, np.int64),
            users=users,
            user_names=user_names,
            read=lambda index: rows[index, 0],
            test_x=rows[boundary:, 0],
            test_y=rows[boundary:, 1],
            skipped=skipped,
            licence=data_set.licence,
            citation=data_set.citation,
            vocabulary=vocabulary,
            vectors=None if options.vectors is None else read_vectors(options.vectors, vocabulary, tally),
            notes=notes,
            refit=lambda rows: encoded(rows, Tally()),
            targets="tokens",
            target_shape=(sequences.length,),
            read_targets=lambda index: rows[index, 1],
        )

    return encoded(train, tally)
