"""Texts as fixed-length rows of token ids: tokens, the vocabulary of the training part, pretrained word vectors.

Id 0 is padding, id 1 an unknown word, then the words by falling frequency.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape
from html.entities import html5
from itertools import groupby
from pathlib import Path
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets.base import Tally
from data_prep.datasets.raw_files import RowByRow, Scratch, lines
from fedmpi.common.errors import UserError
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import Ints

# Marks combine with the letter before them (accents, vowel signs, points); 0xE0100 begins the variation selectors.
_CODES = [code for code in (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)) if category(chr(code))[0] == "M"]
_RUNS = [[code for _, code in run] for _, run in groupby(enumerate(_CODES), lambda pair: pair[1] - pair[0])]
_MARKS = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in _RUNS)
PLAIN = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
"""A word of a text in ASCII."""
_LETTERS = rf"\w[\w{_MARKS}]*"
WORD = re.compile(rf"{_LETTERS}(?:['\u05f3\u05f4\u200c\u200d]{_LETTERS})*")
"""A word of any text without underscores."""
ENTITY = re.compile(r"&(#\d+;|#[xX][\da-fA-F]+;|[a-zA-Z][a-zA-Z\d]*;)")
INVISIBLE = dict.fromkeys((0xAD, 0x200E, 0x200F, 0x2060, 0xFEFF)) | {0x2019: "'"}
PADDING, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unk>")
BUFFER_ROWS = 8192


def tokens(text: str) -> list[str]:
    """Lower-cased words of a text, in NFC, its HTML entities undone.

    A word is a run of letters and digits of any script with their combining marks. Inside a word there may be
    apostrophes (typographic ones count as plain ones), Hebrew geresh and gershayim, and joiners (U+200C, U+200D). Soft
    hyphens and other invisible characters are dropped. All else separates words.

    Examples
    --------
    >>> tokens("Don't panic: it’s 2 o'clock &amp; café time!")
    ["don't", 'panic', "it's", '2', "o'clock", 'café', 'time']
    """
    while "&" in text and (plain := ENTITY.sub(_character, text)) != text:
        text = plain
    text = text.lower()
    if text.isascii():
        return PLAIN.findall(text)
    return WORD.findall(normalize("NFC", text.translate(INVISIBLE)).replace("_", " "))


def _character(entity: re.Match[str]) -> str:
    """What an HTML entity stands for; `unescape` would find one at the beginning of another name, too."""
    return unescape(entity[0]) if entity[1][0] == "#" or entity[1] in html5 else entity[0]


class TextRows:
    """Collects texts in one pass and encodes them when the training part is known, again when it has become smaller.

    The first `length` tokens of every text are kept under provisional ids in a temporary file, so memory holds the
    distinct words and one block of rows, not the texts.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._words: dict[str, int] = {}
        self._rows = RowByRow((length,), np.int32, BUFFER_ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, text: str) -> None:
        """Append one text. One without any word is a single unknown word, so that no row is empty."""
        self.add_words(tokens(text))

    def add_words(self, found: list[str]) -> None:
        """Append a text by its words."""
        words = self._words
        ids = [words.setdefault(word, len(words) + 2) for word in found[: self._length]] or [UNKNOWN]
        self._rows.add(ids + [PADDING] * (self._length - len(ids)))

    def encode(self, train: Ints, vocabulary: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Token ids of all rows, int32 (n, length), and words by id: see `renumbered`."""
        return renumbered(self._rows.rows(), tuple(self._words), train, vocabulary)


def renumbered(
    provisional: NDArray[np.int32], distinct: Sequence[str], train: Ints, vocabulary: int
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Rows of provisional token ids under the ids of a vocabulary, in a temporary file.

    The vocabulary holds the `vocabulary` words that are most frequent in the training rows, ties in alphabetical order;
    every other word becomes unknown. Padding, and -1 where nothing counts, stay.
    """
    counts = np.zeros(len(distinct) + 2, np.int64)
    for start in range(0, len(train), BUFFER_ROWS):
        block = provisional[train[start : start + BUFFER_ROWS]].ravel()
        counts += np.bincount(block[block >= 0], minlength=len(counts))
    words = (*SPECIAL, *distinct)
    seen = (np.flatnonzero(counts[2:]) + 2).tolist()
    kept = sorted(seen, key=lambda word: (-counts[word], words[word]))[:vocabulary]
    final = np.full(len(counts) + 1, UNKNOWN, np.int32)
    final[PADDING], final[IGNORED] = PADDING, IGNORED
    final[kept] = np.arange(2, len(kept) + 2)
    ids = Scratch(provisional.shape[1:], np.int32)
    for start in range(0, len(provisional), BUFFER_ROWS):
        ids.append(final[provisional[start : start + BUFFER_ROWS]])
    return ids.rows(), (*SPECIAL, *(words[word] for word in kept))


def read_vectors(path: Path, vocabulary: tuple[str, ...], tally: Tally) -> NDArray[np.float32]:
    """Pretrained vectors of the vocabulary from a GloVe text file: a word and its values on every line."""
    wanted = {word: code for code, word in enumerate(vocabulary) if code > UNKNOWN}
    vectors: NDArray[np.float32] | None = None
    found = np.zeros(len(vocabulary), bool)
    for number, line in enumerate(lines(path), 1):
        fields = line.rstrip().split(" ")
        if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
            continue
        if vectors is None:
            vectors = np.zeros((len(vocabulary), len(fields) - 1), np.float32)
        dimension = vectors.shape[1]
        # Some words of GloVe contain spaces, so the values are counted from the right.
        code = wanted.get(" ".join(fields[:-dimension]) if dimension else "")
        if code is None or found[code]:
            continue
        try:
            vectors[code] = np.array(fields[-dimension:], np.float32)
            found[code] = True
        except ValueError:
            tally.bad(f"{path}, line {number}", f"not a word and {dimension} numbers")
    if vectors is None or not vectors.shape[1]:
        raise UserError(
            f"{path} holds no word vectors; --vectors takes a GloVe text file: a word and its values on every line"
        )
    tally.note(f"word vectors of {path.name}: {found.sum():,} of {len(wanted):,} words found, the others are zero")
    return vectors
