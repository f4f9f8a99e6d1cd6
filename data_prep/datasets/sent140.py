"""Sent140: Sentiment140's tweets as LEAF splits them by author (Caldas et al. 2018)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.leaf import CITATION, HINT, PAGE, leaf_users, pairs, require_leaf
from data_prep.datasets.raw_files import folder_of
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.raw import RawDataset

TEXT, COLUMNS = 4, 5  # a sample is id, date, query, user, text


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Tweets of LEAF's files: label 0 negative, 1 positive; the author is the natural client."""
    texts, ends = LabelledTexts(options.length), []
    for files in require_leaf(folder_of(raw)):
        for path in files:
            for name, samples in leaf_users(path, pairs):
                for row, (sample, label) in enumerate(samples):
                    if (why := _wrong(sample, label)) is not None:
                        tally.bad(f"{path}, user {name}, record {row}", why)
                    else:
                        texts.add(sample[TEXT], int(label), name)
        ends.append(len(texts))
    rows = np.arange(len(texts))
    parts = rows[: ends[0]], rows[ends[0] :]
    return text_data_set(
        SENT140, texts, np.array(texts.labels, np.int64), ("negative", "positive"), parts, options, tally
    )


def _wrong(sample: Any, label: Any) -> str | None:
    if type(sample) is not list or len(sample) < COLUMNS or type(sample[TEXT]) is not str or not sample[TEXT].strip():
        return "no list of id, date, query, user and text"
    if type(label) is not int or label not in (0, 1):
        return f"the label is {label!r} instead of 0 or 1"
    return None


SENT140 = DataSet(
    name="sent140",
    samples="1,600,498 of 660,120 authors",
    classes="2",
    licence="no formal licence; LEAF: BSD 2-clause",
    citation=f"{CITATION}; A. Go, R. Bhayani, L. Huang, Twitter sentiment classification, 2009",
    page=PAGE,
    files=HINT,
    read=read,
    options=TEXT_OPTIONS,
)
