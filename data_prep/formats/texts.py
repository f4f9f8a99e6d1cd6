"""Labeled texts: their token ids and vocabulary, and MIND's news, Sentiment140's tweets and Amazon's reviews.

Id 0 is padding, id 1 an unknown word, then the words by falling frequency.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from dataclasses import replace
from html import unescape
from html.entities import html5
from itertools import groupby
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.files import csv_rows, files_below, folder_of, lines, require
from data_prep.holdout import hold_out_test, note_users_in_both, train_test_groups, train_test_rows
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally
from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints

# Marks combine with the letter before them (accents, vowel signs, points); 0xE0100 is the first variation selector.
_CODES = [code for code in (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)) if category(chr(code))[0] == "M"]
_RUNS = [[code for _, code in run] for _, run in groupby(enumerate(_CODES), lambda pair: pair[1] - pair[0])]
_MARKS = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in _RUNS)
PLAIN = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
"""Words of an ASCII text."""
_LETTERS = rf"\w[\w{_MARKS}]*"
WORD = re.compile(rf"{_LETTERS}(?:['\u05f3\u05f4\u200c\u200d]{_LETTERS})*")
"""Words of any text, without underscores."""
ENTITY = re.compile(r"&(#\d+;|#[xX][\da-fA-F]+;|[a-zA-Z][a-zA-Z\d]*;)")
INVISIBLE = dict.fromkeys((0xAD, 0x200E, 0x200F, 0x2060, 0xFEFF)) | {0x2019: "'"}
PADDING, UNKNOWN = 0, 1
SPECIAL = ("<pad>", "<unk>")
NEWS_COLUMNS, CATEGORY, TITLE = 8, 1, 3
TWEET_COLUMNS = 6
MOODS, NEUTRAL = {"0": 0, "4": 1}, "2"
REVIEWS = ("*.json.gz", "*.json", "*.jsonl.gz", "*.jsonl")
# Key names of 2014 and 2018, then of 2023.
STARS, TEXT, REVIEWER = ("overall", "rating"), ("reviewText", "text"), ("reviewerID", "user_id")
ITEM = ("asin",)


def tokens(text: str) -> list[str]:
    """Split a text into lower-cased words, in NFC, with HTML entities decoded.

    A word is a run of letters and digits of any script with their combining marks. A word may contain apostrophes
    (typographic ones count as plain ones), Hebrew geresh and gershayim, and joiners (U+200C, U+200D). Soft hyphens and
    other invisible characters are dropped. All other characters separate words.

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
    """Return the character of an HTML entity; `unescape` would also match one at the beginning of another name."""
    return unescape(entity[0]) if entity[1][0] == "#" or entity[1] in html5 else entity[0]


class Texts:
    """Texts, labels and users collected row by row, training and test rows together.

    The first `length` tokens of every text are kept under provisional ids, and encoded once the training part is known.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.labels: list[int] = []
        self.users: list[int] = []
        self.user_names: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._ids = array("i")

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, text: str, label: int = 0, user: str | None = None) -> None:
        """Append one row; `user` None means unknown. A text without any word is a single unknown word."""
        words = self._words
        ids = [words.setdefault(word, len(words) + 2) for word in tokens(text)[: self.length]] or [UNKNOWN]
        self._ids.extend(ids + [PADDING] * (self.length - len(ids)))
        self.labels.append(label)
        self.users.append(-1 if user is None else self.user_names.setdefault(user, len(self.user_names)))

    def rows(self) -> NDArray[np.int32]:
        """Return the provisional token ids of all rows, int32 (n, length)."""
        return np.frombuffer(self._ids, np.int32).reshape(-1, self.length)

    def vocabulary(self, train: Ints, size: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
        """Return the final id of each provisional one, and words by id.

        The vocabulary holds the `size` words that are most frequent in the training rows, ties in alphabetical order;
        every other word becomes unknown.
        """
        provisional, words = self.rows(), (*SPECIAL, *self._words)
        counts = np.bincount(provisional[train].ravel(), minlength=len(words))
        seen = (np.flatnonzero(counts[2:]) + 2).tolist()
        kept = sorted(seen, key=lambda word: (-counts[word], words[word]))[:size]
        final = np.full(len(counts), UNKNOWN, np.int32)
        final[PADDING] = PADDING
        final[kept] = np.arange(2, len(kept) + 2)
        return final, (*SPECIAL, *(words[word] for word in kept))

    def facts(self, options: ReadOptions) -> dict[str, Any]:
        """Return the fields of `RawDataset` that the texts determine; features (length,) int32 token ids.

        They are provisional ids until `fit` has seen the rows for training.
        """

        def fit(data: RawDataset, rows: Ints) -> RawDataset:
            final, words = self.vocabulary(rows, options.vocabulary)
            provisional, tally = self.rows(), Tally()
            vectors = None if options.vectors is None else read_vectors(options.vectors, words, tally)
            return replace(
                data,
                read=lambda index: final[provisional[index]],
                vocabulary=words,
                vectors=vectors,
                notes=(*data.notes, *tally.notes),
            )

        about = {"task": "text", "dtype": "int32", "feature_shape": (self.length,)}
        return {**about, "read": lambda index: self.rows()[index], "fit": fit}


def text_data_set(
    data_set: DataSet,
    texts: Texts,
    labels: Ints,
    class_names: tuple[str, ...],
    parts: tuple[Ints, Ints],
    options: ReadOptions,
    tally: Tally,
    tested: bool = True,
) -> RawDataset:
    """Return the data set of texts with classes, and with their users if any are known."""
    for which, rows in zip(("training", "test"), parts, strict=True):
        if not len(rows) and (tested or which == "training"):
            raise UserError(
                f"{data_set.name}: no {which} row can be read. Give {data_set.files} as --raw.{tally.first_bad}"
            )
    facts = texts.facts(options) | {"classes": len(class_names), "class_names": class_names}
    if texts.user_names:
        facts |= {"users": np.array(texts.users, np.int64), "user_names": tuple(texts.user_names)}
    return data_set.of(labels, labels[:0], **facts | {"train": parts[0], "test": parts[1]})


def read_vectors(path: Path, vocabulary: tuple[str, ...], tally: Tally) -> NDArray[np.float32]:
    """Read pretrained vectors of the vocabulary from a GloVe text file: a word and its values on every line."""
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
            raise UserError(f"{path}, line {number} is not a word and {dimension} numbers. Fetch it again") from None
    if vectors is None or not vectors.shape[1]:
        raise UserError(
            f"{path} holds no word vectors. Give --vectors a GloVe text file, with a word and its values on every line"
        )
    tally.note(f"word vectors of {path.name}: {found.sum():,} of {len(wanted):,} words found, the others are zero")
    return vectors


def read_mind(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read MIND from news.tsv: title -> category. The first 80 % of the rows train, as FedSampling's authors do.

    The set names no users of the news.
    """
    path = require(raw, ("news.tsv", "news.tsv.gz"), data_set.files)
    texts = Texts(options.tokens)
    categories: dict[str, int] = {}
    for number, line in enumerate(lines(path), 1):
        fields = line.rstrip("\r\n").split("\t")
        where = f"{path}, line {number}"
        if len(fields) != NEWS_COLUMNS:
            tally.bad(where, f"{len(fields)} columns instead of {NEWS_COLUMNS}")
        elif not fields[CATEGORY] or not fields[TITLE].strip():
            tally.bad(where, "the category or the title is empty")
        else:
            texts.add(fields[TITLE], categories.setdefault(fields[CATEGORY], len(categories)))
    if not len(texts):
        raise UserError(f"{path} holds no readable row.{tally.first_bad} Fetch it again")
    names = sorted(categories)
    place = np.empty(len(names), np.int64)
    place[[categories[name] for name in names]] = np.arange(len(names))
    rows, boundary = np.arange(len(texts)), len(texts) * 4 // 5
    parts = rows[:boundary], rows[boundary:]
    return text_data_set(data_set, texts, place[np.array(texts.labels)], tuple(names), parts, options, tally)


def read_sentiment140(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read tweets by mood from two CSV files: label 0 negative, 1 positive; neutral test rows are dropped.

    Without the file of the test part, a part of the training tweets is held out.
    """
    texts, ends = Texts(options.tokens), []
    tested = bool(files_below(folder_of(raw), "testdata*.csv", "testdata*.csv.gz"))
    for name in ("training", *(["testdata"] if tested else [])):
        path = require(raw, (f"{name}*.csv", f"{name}*.csv.gz"), data_set.files)
        for line, row in csv_rows(path, lines(path, fallback="latin-1")):  # official files mix encodings
            where = f"{path}, line {line}"
            if len(row) != TWEET_COLUMNS:
                tally.bad(where, f"{len(row)} columns instead of {TWEET_COLUMNS} (target, id, date, query, user, text)")
            elif row[0] == NEUTRAL:
                tally.drop("neutral tweets (label 2)")
            elif row[0] not in MOODS:
                tally.bad(where, f"the target is {row[0]!r} instead of 0, 2 or 4")
            elif not row[5].strip():
                tally.bad(where, "the text is empty")
            else:
                texts.add(row[5], MOODS[row[0]], row[4])
        ends.append(len(texts))
    rows, labels = np.arange(len(texts)), np.array(texts.labels, np.int64)
    parts = rows[: ends[0]], rows[ends[0] :]
    data = text_data_set(data_set, texts, labels, ("negative", "positive"), parts, options, tally, tested)
    return hold_out_test(data, options.split, tally)


def read_amazon(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read reviews of a file: label = stars - 1; a fifth of them, the same for any seed, is the test part.

    The reviewer is the natural client. Rows without text are skipped. Of reviews that repeat one of the same reviewer,
    product and text, the first one is kept.
    """
    if options.split not in ("rows", "users"):
        raise UserError(f"--split {options.split} is unknown for {data_set.name}. Choose rows or users")
    files = files_below(raw, *REVIEWS) if raw.is_dir() else [raw]
    if len(files) != 1:
        listed = ", ".join(str(path.relative_to(raw)) for path in files[:8])
        raise UserError(f"{raw} holds {len(files)} review files ({listed}); --raw must name one file")
    texts, seen = Texts(options.tokens), set[bytes]()
    for number, line in enumerate(lines(files[0]), 1):
        if line.strip():
            _add_review(line, f"{files[0]}, line {number}", texts, tally, seen)
    labels, users = np.array(texts.labels, np.int64), np.array(texts.users, np.int64)
    parts = train_test_rows(len(texts)) if options.split == "rows" else train_test_groups(users)
    if options.split == "rows" and users.min(initial=0) >= 0:
        note_users_in_both(users, *parts, tally)
    names = tuple(f"{stars} star{'s' if stars > 1 else ''}" for stars in range(1, 6))
    return text_data_set(data_set, texts, labels, names, parts, options, tally)


def _add_review(line: str, where: str, texts: Texts, tally: Tally, seen: set[bytes]) -> None:
    """Add one review; `seen` contains the hashes of earlier ones."""
    try:
        review = json.loads(line)
    except (ValueError, RecursionError) as error:
        tally.bad(where, f"not JSON ({error})")
        return
    if not isinstance(review, dict):
        tally.bad(where, "not a JSON object")
        return
    stars, text, reviewer, item = (
        next((review[key] for key in keys if key in review), None) for keys in (STARS, TEXT, REVIEWER, ITEM)
    )
    if isinstance(stars, bool) or stars not in (1, 2, 3, 4, 5):
        tally.bad(where, f"{STARS[0]!r} is {stars!r} instead of 1 to 5 stars")
        return
    if not isinstance(text, str) or not text.strip():
        tally.bad(where, f"no {TEXT[0]!r}")
        return
    if reviewer is not None and item is not None:
        named = json.dumps([str(reviewer), str(item), text.strip()])
        key = hashlib.blake2b(named.encode(), digest_size=16).digest()
        if key in seen:
            tally.drop("reviews that repeat one of the same reviewer, product and text")
            return
        seen.add(key)
    texts.add(text, int(stars) - 1, None if reviewer is None else str(reviewer))
