"""Amazon reviews: text -> stars, the reviewer is the natural client (McAuley et al. 2015; Ni, Li, McAuley 2019).

Reads the 5-core files of 2014 and 2018 and, with its other key names, the 2023 release; JSON lines, plain or .gz.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.datasets.base import TEXT_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import files_below, folder_of, lines
from data_prep.datasets.texts import LabelledTexts, text_data_set
from data_prep.holdout import in_both, train_test_groups, train_test_rows
from data_prep.raw import RawDataset
from fedmpi.common.errors import UserError

PATTERNS = ("*.json.gz", "*.json", "*.jsonl.gz", "*.jsonl")
# Key names of 2014 and 2018, then of 2023.
STARS, TEXT, REVIEWER = ("overall", "rating"), ("reviewText", "text"), ("reviewerID", "user_id")
ITEM = ("asin",)
DUPLICATES = "reviews that repeat one of the same reviewer, product and text (--keep-duplicates keeps them)"
HINT = "a review file such as reviews_Toys_and_Games_5.json.gz or All_Beauty_5.json.gz"


def read(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Reviews of one or more files: label = stars - 1; a fifth of them, the same for any seed, is the test part."""
    if options.split not in ("rows", "texts", "users"):
        raise UserError(f"--split {options.split!r} is unknown; choose rows, texts or users")
    texts = LabelledTexts(options.length)
    seen: set[bytes] | None = None if options.keep_duplicates else set()
    for path in choose(raw, options.files):
        for number, line in enumerate(lines(path), 1):
            if line.strip():
                _add(line, f"{path}, line {number}", texts, tally, seen)
    labels = np.array(texts.labels, np.int64)
    names = tuple(f"{stars} star{'s' if stars > 1 else ''}" for stars in range(1, 6))
    users = np.array(texts.users, np.int64)
    if options.split == "rows":
        parts = train_test_rows(len(texts))
        for what, codes in (("users", users), ("texts", texts.same())):
            if codes.min(initial=0) >= 0 and (note := in_both(what, codes, *parts)):
                tally.note(note)
    else:
        parts = train_test_groups(texts.same() if options.split == "texts" else users)
    return text_data_set(AMAZON, texts, labels, names, parts, options, tally)


def choose(raw: Path, names: tuple[str, ...]) -> list[Path]:
    """The review files to read: the named ones, or the only one there is."""
    folder = folder_of(raw)
    there = files_below(folder, *PATTERNS)
    listed = ", ".join(str(path.relative_to(folder)) for path in there[:8])
    if not there:
        raise UserError(f"no review file in {folder}; --raw must hold {HINT}")
    if not names:
        if len(there) > 1:
            raise UserError(f"{folder} holds {len(there)} review files ({listed}); name those to read with --file")
        return there
    chosen: list[Path] = []
    for name in names:
        found = [path for path in there if str(path.relative_to(folder)) == name]
        found = found or [path for path in there if path.name == name]
        if not found:
            raise UserError(f"no review file {name} in {folder}; --file takes one of: {listed}")
        if len(found) > 1:
            raise UserError(
                f"{folder} holds {len(found)} files named {name}; --file takes one of: "
                f"{', '.join(str(path.relative_to(folder)) for path in found)}"
            )
        if found[0] in chosen:
            raise UserError(f"--file names {name} twice; name each file once")
        chosen += found
    return chosen


def _add(line: str, where: str, texts: LabelledTexts, tally: Tally, seen: set[bytes] | None) -> None:
    """Add one review; `seen` holds those there are already, None where duplicates are kept."""
    try:
        review = json.loads(line)
    except (ValueError, RecursionError) as error:
        tally.bad(where, f"not JSON ({error})")
        return
    if not isinstance(review, dict):
        tally.bad(where, "not a JSON object")
        return
    stars, text, reviewer, item = (_first(review, keys) for keys in (STARS, TEXT, REVIEWER, ITEM))
    if isinstance(stars, bool) or stars not in (1, 2, 3, 4, 5):
        tally.bad(where, f"{STARS[0]!r} is {stars!r} instead of 1 to 5 stars")
    elif not isinstance(text, str) or not text.strip():
        tally.bad(where, f"no {TEXT[0]!r}")
    elif seen is not None and _repeats(reviewer, item, text, seen):
        tally.drop(DUPLICATES)
    else:
        texts.add(text, int(stars) - 1, None if reviewer is None else str(reviewer))


def _repeats(reviewer: Any, item: Any, text: str, seen: set[bytes]) -> bool:
    """Whether the same review was there before; nobody can tell where the reviewer or the product is not named."""
    if reviewer is None or item is None:
        return False
    key = hashlib.blake2b(json.dumps([str(reviewer), str(item), text.strip()]).encode(), digest_size=16).digest()
    if key in seen:
        return True
    seen.add(key)
    return False


def _first(review: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((review[key] for key in keys if key in review), None)


AMAZON = DataSet(
    name="amazon",
    samples="198,502 Beauty, 167,597 Toys (2014)",
    classes="5",
    licence="no formal licence; research use, cite the papers",
    citation="J. McAuley et al., Image-based recommendations on styles and substitutes, SIGIR 2015; "
    "J. Ni, J. Li, J. McAuley, Justifying recommendations using distantly-labeled reviews, EMNLP 2019",
    page="https://jmcauley.ucsd.edu/data/amazon/",
    files=HINT,
    read=read,
    options=TEXT_OPTIONS | {"files", "split", "keep_duplicates"},
)
