"""Sentiment140: 1.6 million tweets by mood, the author is the natural client (Go, Bhayani, Huang 2009)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import lines, require
from data_prep.datasets.tables import csv_rows
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.raw import RawDataset
from data_prep.sources import Source

COLUMNS = 6
LABELS = {"0": 0, "4": 1}
NEUTRAL = "2"
HINT = "training*.csv and testdata*.csv of Sentiment140 (plain or .gz)"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Sentiment140 from its two CSV files: label 0 negative, 1 positive; the test part's neutral rows are dropped."""
    texts = LabelledTexts(options.length)
    _add(require(raw, ("training*.csv", "training*.csv.gz"), HINT), texts, tally)
    boundary = len(texts)
    _add(require(raw, ("testdata*.csv", "testdata*.csv.gz"), HINT), texts, tally)
    rows = np.arange(len(texts))
    labels = np.array(texts.labels, np.int64)
    parts = rows[:boundary], rows[boundary:]
    return text_data_set(SENTIMENT140, texts, labels, ("negative", "positive"), parts, options, tally)


def _add(path: Path, texts: LabelledTexts, tally: Tally) -> None:
    for line, row in csv_rows(path, lines(path, fallback="latin-1"), tally):  # the official files mix both
        _add_row(row, f"{path}, line {line}", texts, tally)


def _add_row(row: list[str], where: str, texts: LabelledTexts, tally: Tally) -> None:
    if len(row) != COLUMNS:
        tally.bad(where, f"{len(row)} columns instead of {COLUMNS} (target, id, date, query, user, text)")
    elif row[0] == NEUTRAL:
        tally.drop("neutral tweets (label 2)")
    elif row[0] not in LABELS:
        tally.bad(where, f"the target is {row[0]!r} instead of 0, 2 or 4")
    elif not row[5].strip():
        tally.bad(where, "the text is empty")
    else:
        texts.add(row[5], LABELS[row[0]], row[4])


SENTIMENT140 = DataSet(
    name="sentiment140",
    samples="1,600,000 + 359",
    classes="2",
    licence="no formal licence; research use",
    citation="A. Go, R. Bhayani, L. Huang, Twitter sentiment classification using distant supervision, Stanford, 2009",
    page="http://help.sentiment140.com/for-students",
    files=HINT,
    read=read,
    sources=(
        Source(
            "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
            "sha256:004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57",
        ),
    ),
    options=TEXT_OPTIONS,
)
