"""Sent140, Sentiment140's tweets as LEAF splits them by author: python -m data_prep sent140:read --raw DIR.

S. Caldas et al., LEAF: a benchmark for federated settings, 2018. DIR holds LEAF's train/*.json and test/*.json.
"""

from pathlib import Path

import numpy as np

from data_prep.formats.leaf import leaf_files, leaf_users
from data_prep.formats.texts import Texts, text_data_set
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally

ABOUT = DataSet(
    name="sent140",
    samples="1,600,498 of 660,120 authors",
    classes="2",
    licence="no formal license; LEAF: BSD 2-clause",
    citation="S. Caldas et al., LEAF: a benchmark for federated settings, 2018; A. Go, R. Bhayani, L. Huang, 2009",
    page="https://leaf.cmu.edu",
    files="LEAF's train/*.json and test/*.json",
    reader=lambda data_set, raw, options, tally: read(raw, length=options.tokens, vocabulary=options.vocabulary),
)


def read(raw: Path, *, length: int = 30, vocabulary: int = 20_000) -> RawDataset:
    """Label 0 negative, 1 positive; the author is the natural client.

    Parameters
    ----------
    length : int
        Words kept of a tweet.
    vocabulary : int
        Words known.
    """
    texts, ends = Texts(length), []
    for files in leaf_files(raw, ABOUT.files):
        for path in files:
            for author, samples, labels in leaf_users(path):
                for sample, label in zip(samples, labels, strict=True):
                    texts.add(sample[4], int(label), author)  # a sample is id, date, query, user, text
        ends.append(len(texts))
    labels, rows = np.array(texts.labels, np.int64), np.arange(len(texts))
    parts = rows[: ends[0]], rows[ends[0] :]
    options = ReadOptions(length=length, vocabulary=vocabulary)
    return text_data_set(ABOUT, texts, labels, ("negative", "positive"), parts, options, Tally())
