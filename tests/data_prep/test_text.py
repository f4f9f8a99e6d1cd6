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
    rows = _rows(["b a c", "b a", "b d", "zebra zebra zebra zebra b"], length=5)
    ids, words = rows.encode(np.array([0, 1, 2]), vocabulary=10)
    assert words == (*SPECIAL, "b", "a", "c", "d")
    assert ids.dtype == np.int32
    assert ids.tolist() == [[2, 3, 4, 0, 0], [2, 3, 0, 0, 0], [2, 5, 0, 0, 0], [1, 1, 1, 1, 2]]


def test_the_vocabulary_is_cut_at_its_size() -> None:
    ids, words = _rows(["b a c", "b d"], length=3).encode(np.arange(2), vocabulary=1)
    assert words == (*SPECIAL, "b")
    assert ids.tolist() == [[2, 1, 1], [2, 1, 0]]


def test_texts_are_cut_to_length_and_words_beyond_it_are_not_counted() -> None:
    ids, words = _rows(["a b c d"], length=2).encode(np.arange(1), vocabulary=10)
    assert ids.tolist() == [[2, 3]] and words == (*SPECIAL, "a", "b")


def test_a_text_without_words_is_one_unknown_word() -> None:
    ids, _ = _rows(["...", "a"], length=2).encode(np.arange(2), vocabulary=10)
    assert ids.tolist() == [[1, 0], [2, 0]]


def test_many_rows_are_encoded_as_few_are() -> None:
    texts = [f"w{row % 97} common w{row % 5}" for row in range(20_000)]
    ids, words = _rows(texts, length=4).encode(np.arange(20_000), vocabulary=1000)
    assert words[2] == "common"
    for row in (0, 8191, 8192, 19_999):
        assert [words[code] for code in ids[row]] == [f"w{row % 97}", "common", f"w{row % 5}", "<pad>"]


def test_the_words_of_all_blocks_of_training_rows_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BUFFER_ROWS", 2)
    rows = _rows(["a b", "a", "out out", "b c", "b", "c c d"], length=3)
    _, words = rows.encode(np.array([0, 1, 3, 4, 5]), vocabulary=10)
    assert words == (*SPECIAL, "b", "c", "a", "d")


def test_vectors_are_those_of_the_vocabulary_and_missing_words_are_zero(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2 3\n. . . 9 9 9\ncat 0.5 -1 2e-1\ndog 7 7 7\n")
    tally = Tally()
    vectors = read_vectors(path, (*SPECIAL, "cat", "unseen", "the"), tally)
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, [[0, 0, 0], [0, 0, 0], [0.5, -1, 0.2], [0, 0, 0], [1, 2, 3]])
    assert "2 of 3 words found" in tally.notes[0]


def test_a_word2vec_header_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("2 2\na 1 2\nb 3 4\n")
    assert read_vectors(path, (*SPECIAL, "b"), Tally()).tolist() == [[0, 0], [0, 0], [3, 4]]


def test_a_broken_vector_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("a 1 2\nb 3 x\n")
    tally = Tally()
    read_vectors(path, (*SPECIAL, "b"), tally)
    assert tally.unreadable == 1 and "vectors.txt, line 2" in tally.first
    with pytest.raises(UserError, match="line 2"):
        read_vectors(path, (*SPECIAL, "b"), Tally(strict=True))


def test_a_file_without_vectors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(UserError, match="no word vectors"):
        read_vectors(path, (*SPECIAL, "a"), Tally())


def _rows(texts: list[str], length: int) -> Texts:
    rows = Texts(length)
    for text in texts:
        rows.add(text)
    return rows
