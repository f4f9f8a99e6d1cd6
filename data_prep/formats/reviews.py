"""Labeled texts: MIND's news (tab-separated), Sentiment140's tweets (CSV) and Amazon's reviews (JSON lines)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from data_prep.formats.files import csv_rows, files_below, lines, require
from data_prep.holdout import in_both, train_test_groups, train_test_rows
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally
from data_prep.text import Texts, text_data_set
from fedmpi.common.errors import UserError

NEWS_COLUMNS, CATEGORY, TITLE = 8, 1, 3
TWEET_COLUMNS = 6
MOODS, NEUTRAL = {"0": 0, "4": 1}, "2"
REVIEWS = ("*.json.gz", "*.json", "*.jsonl.gz", "*.jsonl")
# Key names of 2014 and 2018, then of 2023.
STARS, TEXT, REVIEWER = ("overall", "rating"), ("reviewText", "text"), ("reviewerID", "user_id")
ITEM = ("asin",)


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
    """Read tweets by mood from two CSV files: label 0 negative, 1 positive; neutral test rows are dropped."""
    texts, ends = Texts(options.tokens), []
    for name in ("training", "testdata"):
        path = require(raw, (f"{name}*.csv", f"{name}*.csv.gz"), data_set.files)
        for line, row in csv_rows(path, lines(path, fallback="latin-1"), tally):  # official files mix encodings
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
    return text_data_set(data_set, texts, labels, ("negative", "positive"), parts, options, tally)


def read_amazon(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read reviews of a file: label = stars - 1; a fifth of them, the same for any seed, is the test part.

    The reviewer is the natural client. Rows without text are skipped. Of reviews that repeat one of the same reviewer,
    product and text, the first one is kept.
    """
    if options.split not in ("rows", "users"):
        raise UserError(f"--split {options.split} is unknown for {data_set.name}; choose rows or users")
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
    if options.split == "rows" and users.min(initial=0) >= 0 and (note := in_both("users", users, *parts)):
        tally.note(note)
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
