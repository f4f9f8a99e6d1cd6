"""Next words and characters by user, of TensorFlow Federated's and LEAF's files, for `task.kind = "tokens"`.

    python -m data_prep next_words:stackoverflow --raw DIR     stackoverflow_train.h5 and stackoverflow_test.h5
    python -m data_prep next_words:tags --raw DIR              the same files: tags of questions, "multilabel"
    python -m data_prep next_words:fed_shakespeare --raw DIR   shakespeare_train.h5 and shakespeare_test.h5
    python -m data_prep next_words:reddit --raw DIR            LEAF's train/*.json and test/*.json

S. Reddi et al., Adaptive federated optimization, 2021; S. Caldas et al., LEAF, 2018. Everything that is read is in
memory: read some of the users of Stack Overflow (`--readers N`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.formats.leaf import leaf_files, leaf_users, tff_clients
from data_prep.raw import RawDataset

Row = tuple[str, list[str], list[str | None]]
"""A user, tokens, and what follows each; None counts nowhere."""
BEGIN, END = "<bos>", "<eos>"


def stackoverflow(raw: Path, *, words: int = 20, known: int = 10_000, readers: int = 0) -> RawDataset:
    """The next word: of every sentence the first words behind <bos>, with <eos> where it is shorter.

    Parameters
    ----------
    words : int
        Positions of a row.
    known : int
        Words of the vocabulary.
    readers : int
        Authors read of each part, 0 for all.
    """

    def rows(part: str) -> Iterator[Row]:
        for author, arrays in _clients(raw / f"stackoverflow_{part}.h5", ("tokens",), readers):
            for sentence in _texts(arrays["tokens"]):
                whole = [BEGIN, *sentence.split(), END][: words + 1]
                yield author, whole[:-1], list(whole[1:])

    return _sequences("stackoverflow", list(rows("train")), list(rows("test")), words, known)


def fed_shakespeare(raw: Path, *, characters: int = 80, readers: int = 0) -> RawDataset:
    """The next character: every speech between <bos> and <eos>, cut into pieces.

    Parameters
    ----------
    characters : int
        Positions of a row.
    readers : int
        Roles read of each part, 0 for all.
    """

    def rows(part: str) -> Iterator[Row]:
        for role, arrays in _clients(raw / f"shakespeare_{part}.h5", ("snippets",), readers):
            for speech in _texts(arrays["snippets"]):
                whole = [BEGIN, *(repr(letter)[1:-1] if letter < " " else letter for letter in speech), END]
                for start in range(0, len(whole) - 1, characters + 1):
                    piece = whole[start : start + characters + 1]
                    yield role, piece[:-1], list(piece[1:])

    return _sequences("fed-shakespeare", list(rows("train")), list(rows("test")), characters, 20_000)


def reddit(raw: Path, *, known: int = 10_000, readers: int = 0) -> RawDataset:
    """The next word: LEAF's sequences of ten tokens, its `count_tokens` saying what counts.

    Parameters
    ----------
    known : int
        Words of the vocabulary.
    readers : int
        Authors read of each file, 0 for all.
    """

    def rows(files: list[Path]) -> Iterator[Row]:
        for path in files:
            for author, comments, targets in islice(leaf_users(path, "author"), readers or None):
                for comment, target in zip(comments, targets, strict=True):
                    counted = zip(target["target_tokens"], target["count_tokens"], strict=True)
                    for words, (following, counts) in zip(comment, counted, strict=True):
                        after = [w if c and w != "<PAD>" else None for w, c in zip(following, counts, strict=True)]
                        yield author, [word for word in words if word != "<PAD>"], after

    train, test = leaf_files(raw, "LEAF's train/*.json and test/*.json")
    return _sequences("reddit", list(rows(train)), list(rows(test)), 10, known)


def tags(raw: Path, *, words: int = 100, known: int = 10_000, tagged: int = 500, readers: int = 0) -> RawDataset:
    """The tags of a question from a sentence and the title, for `task.kind = "multilabel"`.

    Parameters
    ----------
    words : int
        Positions of a row.
    known : int
        Words of the vocabulary.
    tagged : int
        Tags kept, the most frequent of the training rows.
    readers : int
        Authors read of each part, 0 for all.
    """
    rows: dict[str, list[tuple[str, list[str], list[str]]]] = {"train": [], "test": []}
    for part, found in rows.items():
        for author, arrays in _clients(raw / f"stackoverflow_{part}.h5", ("tokens", "title", "tags"), readers):
            columns = (_texts(arrays[name]) for name in ("tokens", "title", "tags"))
            for sentence, title, tag in zip(*columns, strict=True):
                found.append((author, f"{sentence} {title}".split()[:words], tag.split("|")))
    counts = Counter(tag for _, _, named in rows["train"] for tag in set(named))
    kept = sorted(counts, key=lambda tag: (-counts[tag], tag))[:tagged]
    train, test = ([(author, text, [None] * 0) for author, text, _ in rows[part]] for part in rows)
    data = _sequences("stackoverflow-tags", train, test, words, known)
    flags = np.array([[tag in named for tag in kept] for _, _, named in (*rows["train"], *rows["test"])], np.uint8)
    return replace(data, y=flags, classes=len(kept), class_names=tuple(kept), targets="multilabel")


def _clients(path: Path, fields: tuple[str, ...], readers: int) -> Iterator[tuple[str, dict[str, Any]]]:
    return islice(tff_clients(path, fields), readers or None)


def _texts(values: Any) -> list[str]:
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value) for value in values.tolist()]


def _sequences(name: str, train: list[Row], test: list[Row], length: int, known: int) -> RawDataset:
    """Rows of token ids whose target is the id that follows each: 0 pads, 1 is unknown, -1 counts nowhere."""
    counts = Counter(word for _, x, y in train for word in (*x, *y) if word is not None)
    kept = sorted(counts, key=lambda word: (-counts[word], word))[:known]
    vocabulary = ("<pad>", "<unk>", *kept)
    code = {word: number for number, word in enumerate(vocabulary)}
    ids = np.zeros((len(train) + len(test), 2, length), np.int32)
    ids[:, 1] = -1
    for row, (_, x, y) in enumerate((*train, *test)):
        ids[row, 0, : len(x)] = [code.get(word, 1) for word in x]
        ids[row, 1, : len(y)] = [-1 if word is None else code.get(word, 1) for word in y]
    names, users = np.unique([user for user, _, _ in (*train, *test)], return_inverse=True)
    rows = np.arange(len(ids))
    return RawDataset(
        name=name,
        task="text",
        classes=len(vocabulary),
        class_names=(),
        feature_shape=(length,),
        dtype="int32",
        read=lambda index: ids[index, 0],
        y=ids[:, 1],
        train=rows[: len(train)],
        test=rows[len(train) :],
        users=users,
        user_names=tuple(names.tolist()),
        licence="Stack Overflow: CC BY-SA 3.0; Shakespeare: public domain; Reddit: its terms",
        citation="S. Reddi et al., Adaptive federated optimization, 2021; S. Caldas et al., LEAF, 2018",
        vocabulary=vocabulary,
        targets="tokens",
    )
