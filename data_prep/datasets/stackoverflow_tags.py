"""Stack Overflow as Reddi et al. (2021) predict tags: words of a sentence, tags of its question."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import SEQUENCE_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.fed_texts import PAGE, REDDI, STACK_OVERFLOW_FILES
from data_prep.datasets.labels import Labelled, with_targets
from data_prep.datasets.raw_files import Names, Scratch, require
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.datasets.tff import texts, tff_clients
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError

BLOCK_ROWS = 1024


class _Tags:
    """Tags of every row, as codes one after another."""

    def __init__(self) -> None:
        self._names = Names()
        self._codes, self._ends = array("q"), array("q", [0])

    def add(self, tags: list[str]) -> None:
        """Append a row."""
        self._codes.extend(self._names.code(tag) for tag in dict.fromkeys(tags))
        self._ends.append(len(self._codes))

    def most_frequent(self, rows: int, most: int) -> list[str]:
        """So many tags that most of the first rows have, ties in alphabetical order."""
        counts = Counter(self._codes[: self._ends[rows]])
        names = self._names.names
        kept = sorted(counts, key=lambda code: (-counts[code], names[code]))[:most]
        return [names[code] for code in kept]

    def flags(self, kept: list[str]) -> NDArray[np.uint8]:
        """Which of the tags each row has, uint8 (n, T), in a temporary file."""
        place = {name: number for number, name in enumerate(kept)}
        places = np.array([place.get(name, -1) for name in self._names.names], np.int64)
        codes, ends = np.array(self._codes, np.int64), np.array(self._ends, np.int64)
        out = Scratch((len(kept),), np.uint8)
        for start in range(0, len(ends) - 1, BLOCK_ROWS):
            border = ends[start : start + BLOCK_ROWS + 1]
            row = np.repeat(np.arange(len(border) - 1), np.diff(border))
            tag = places[codes[border[0] : border[-1]]]
            block = np.zeros((len(border) - 1, len(kept)), np.uint8)
            block[row[tag >= 0], tag[tag >= 0]] = 1
            out.append(block)
        return out.rows()


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Words of each sentence and of its question's title, and the tags that most training sentences have.

    As Reddi et al. (2021): words are what spaces separate, 10,000 of them are known and 500 tags; a sentence with none
    of these stays, without a label. Their files of counts are those of all authors' sentences, here the training rows
    read are counted. Words behind the first L are left out (`length`), which is noted.
    """
    found, tags, boundary, cut = LabelledTexts(options.length), _Tags(), 0, 0
    for number, file in enumerate(STACK_OVERFLOW_FILES):
        path = require(raw, (file,), TAGS.files)
        for name, arrays in tff_clients(path, ("tokens", "title", "tags"), options.users, options.per_user):
            where = f"{path}, client {name}"
            columns = (texts(arrays[column], where) for column in ("tokens", "title", "tags"))
            for row, (sentence, title, tagged) in enumerate(zip(*columns, strict=True)):
                words = [*sentence.split(), *title.split()]
                if not words:
                    tally.bad(f"{where}, record {row}", "neither sentence nor title has a word")
                    continue
                cut += len(words) > options.length
                found.add_words(words, 0, name)
                tags.add([tag for tag in tagged.split("|") if tag])
        boundary = boundary if number else len(found)
    kept = tags.most_frequent(boundary, options.tags)
    if not kept:
        raise UserError(f"{raw}: no training sentence has a tag; --raw must hold {TAGS.files}")
    if cut:
        tally.note(
            f"{cut:,} of {len(found):,} sentences have more than {options.length} words with their titles; the words "
            "behind are left out (--length)"
        )
    flags = tags.flags(kept)
    train, test = np.arange(boundary), np.arange(boundary, len(found))
    data = text_data_set(TAGS, found, np.zeros(len(found), np.int64), tuple(kept), (train, test), options, tally)
    return with_targets(data, Labelled("multilabel", flags, tuple(kept), np.ones(len(flags), bool)), train, test)


TAGS = DataSet(
    name="stackoverflow-tags",
    samples="135,818,730 sentences of 342,477 authors + 16,586,035",
    classes="500 tags",
    licence="CC BY-SA 3.0",
    citation=f"The TensorFlow Federated Authors, TensorFlow Federated Stack Overflow dataset, 2019; {REDDI}",
    page=PAGE,
    files=" and ".join(STACK_OVERFLOW_FILES) + " of TFF",
    read=read,
    options=SEQUENCE_OPTIONS | {"tags"},
    defaults={"length": 100, "vocabulary": 10_000},
)
