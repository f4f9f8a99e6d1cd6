"""MIND news (Wu et al. 2020): title -> category, split 80/20 in row order as FedSampling's authors do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import Names, lines, require, sort_classes
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError

COLUMNS = 8
CATEGORY, TITLE = 1, 3
HINT = "news.tsv of one part of MIND (plain or .gz)"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """MIND from news.tsv: the first 80 % of the rows train, the last 20 % test; the set names no users of news."""
    path = require(raw, ("news.tsv", "news.tsv.gz"), HINT)
    texts, categories = LabelledTexts(options.length), Names()
    for number, line in enumerate(lines(path), 1):
        fields = line.rstrip("\r\n").split("\t")
        where = f"{path}, line {number}"
        if len(fields) != COLUMNS:
            tally.bad(where, f"{len(fields)} columns instead of {COLUMNS}")
        elif not fields[CATEGORY] or not fields[TITLE].strip():
            tally.bad(where, "the category or the title is empty")
        else:
            texts.add(fields[TITLE], categories.code(fields[CATEGORY]))
    if not len(texts):
        raise UserError(f"{path} holds no readable row{': ' + tally.first if tally.first else ''}; fetch it again")
    labels, names = sort_classes(np.array(texts.labels, np.int64), categories.names)
    rows, boundary = np.arange(len(texts)), len(texts) * 4 // 5
    return text_data_set(MIND, texts, labels, names, (rows[:boundary], rows[boundary:]), options, tally)


MIND = DataSet(
    name="mind",
    samples="51,282 (MIND-small, train)",
    classes="17",
    licence="Microsoft Research Licence Terms, non-commercial research only",
    citation="F. Wu et al., MIND: a large-scale dataset for news recommendation, ACL 2020",
    page="https://msnews.github.io",
    files=HINT,
    read=read,
    options=TEXT_OPTIONS,
)
