"""Reddit's comments of December 2017 by author, as LEAF gives them: sequences of ten tokens (Caldas et al. 2018)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.datasets.base import SEQUENCE_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.leaf import CITATION, HINT, PAGE, leaf_users, pairs, require_leaf
from data_prep.datasets.raw_files import folder_of
from data_prep.datasets.sequences import Sequences, sequence_data_set
from data_prep.raw import RawDataset

LENGTH = 10
PADDING = "<PAD>"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Next words: every sequence of a comment is a row; positions that LEAF's `count_tokens` leaves out count nowhere.

    `per_user` are comments, the first ones of each author.
    """
    sequences, boundary = Sequences(LENGTH), 0
    for number, files in enumerate(require_leaf(folder_of(raw))):
        for path in files:
            for name, comments in leaf_users(path, pairs, "author"):
                for row, (tokens, target) in enumerate(comments[: options.per_user]):
                    rows = _rows(tokens, target)
                    if rows is None:
                        where = f"{path}, author {name}, record {row}"
                        tally.bad(where, f"no sequences of {LENGTH} tokens with target_tokens and count_tokens")
                    for words, following in rows or ():
                        sequences.add(words, following, name)
        boundary = boundary if number else len(sequences)
    return sequence_data_set(REDDIT, sequences, boundary, options, tally)


def _rows(tokens: Any, target: Any) -> list[tuple[list[str], list[str | None]]] | None:
    """The sequences of a comment, each with what follows; None where it is not as published."""
    try:
        following, counts = target["target_tokens"], target["count_tokens"]
        rows = []
        for words, after, count in zip(tokens, following, counts, strict=True):
            if not len(words) == len(after) == len(count) == LENGTH or not all(
                type(w) is str for w in (*words, *after)
            ):
                return None
            used = [word for word in words if word != PADDING]  # padding stands at the end
            after = [a if c and a != PADDING else None for a, c in zip(after, count, strict=True)]
            if used and any(after):
                rows.append((used, after))
        return rows
    except (KeyError, TypeError, ValueError):
        return None


REDDIT = DataSet(
    name="reddit",
    samples="56,587,343 comments of 1,660,820 authors",
    classes="the next word",
    licence="Reddit's terms; LEAF: BSD 2-clause",
    citation=CITATION,
    page=PAGE,
    files=HINT,
    read=read,
    options=SEQUENCE_OPTIONS - {"users", "length"},
    defaults={"vocabulary": 10_000},
)
