"""Tokens, vocabulary, encoding and word vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep import text as encoding
from data_prep.raw import Tally
from data_prep.text import SPECIAL, Texts, read_vectors, tokens
from fedmpi import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't PANIC: it\u2019s 2 o'clock!", ["don't", "panic", "it's", "2", "o'clock"]),
        ("snake_case, e-mail @user http://x.yz", ["snake", "case", "e", "mail", "user", "http", "x", "yz"]),
        ("Äpfel für Zoë 東京", ["äpfel", "für", "zoë", "東京"]),
        ("'quoted' ...", ["quoted"]),
        ("!!! :-)", []),
    ],
)
def test_tokens_are_lower_cased_words(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


def test_the_vocabulary_is_by_frequency_then_alphabet_and_from_the_training_part_only() -> None:
    texts = ["b a c", "b a", "b d", "zebra zebra zebra zebra b", "...", "b b b b a d d d d"]
    ids, words = _rows(texts, length=5).encode(np.array([0, 1, 2, 5]), vocabulary=3)
    assert words == (*SPECIAL, "b", "a", "c") and ids.dtype == np.int32
    expected = [[2, 3, 4, 0, 0], [2, 3, 0, 0, 0], [2, 1, 0, 0, 0], [1, 1, 1, 1, 2], [1, 0, 0, 0, 0], [2, 2, 2, 2, 3]]
    assert ids.tolist() == expected


def test_the_words_of_all_blocks_of_training_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BUFFER_ROWS", 2)
    rows = _rows(["a b", "a", "out out", "b c", "b", "c c d"], length=3)
    _, words = rows.encode(np.array([0, 1, 3, 4, 5]), vocabulary=10)
    assert words == (*SPECIAL, "b", "c", "a", "d")


def test_vectors_are_those_of_the_vocabulary_and_missing_words_are_zero(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("3 3\nthe 1 2 3\n. . . 9 9 9\ncat 0.5 -1 2e-1\ndog 7 7 7\n")
    tally = Tally()
    vectors = read_vectors(path, (*SPECIAL, "cat", "unseen", "the"), tally)
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, [[0, 0, 0], [0, 0, 0], [0.5, -1, 0.2], [0, 0, 0], [1, 2, 3]])
    assert "2 of 3 words found" in tally.notes[0]


def test_a_broken_vector_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("a 1 2\nb 3 x\n")
    tally = Tally()
    read_vectors(path, (*SPECIAL, "b"), tally)
    assert tally.unreadable == 1 and "vectors.txt, line 2" in tally.first
    with pytest.raises(UserError, match="line 2"):
        read_vectors(path, (*SPECIAL, "b"), Tally(strict=True))


def test_a_file_without_vectors_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(UserError, match="no word vectors"):
        read_vectors(path, (*SPECIAL, "a"), Tally())


def _rows(texts: list[str], length: int) -> Texts:
    rows = Texts(length)
    for text in texts:
        rows.add(text)
    return rows
