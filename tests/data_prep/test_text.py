"""Tokens, vocabulary, encoding and word vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.formats.texts import SPECIAL, Texts, read_vectors, tokens
from data_prep.raw import Tally
from fedmpi import UserError

# a text, its words
WORDS = {
    "Hindi": ("हिन्दी में समाचार।", "हिन्दी में समाचार"),
    "Thai": ("ภาษาไทย ที่ดี", "ภาษาไทย ที่ดี"),
    "Hebrew points": ("שָׁלוֹם עולם", "שָׁלוֹם עולם"),
    "Arabic marks": ("السَّلَامُ عَلَيْكُمْ", "السَّلَامُ عَلَيْكُمْ"),
    "decomposed": ("Cafe\u0301 nai\u0308ve A\u030angstro\u0308m", "café naïve ångström"),
    "entities": ("Tom &amp; Jerry &quot;fun&quot; &lt;3", "tom jerry fun 3"),
    "entities twice": ("I&amp;#39;m &amp;quot;in&amp;quot;", "i'm in"),
    "no entities": ("AT&T R&D; a?x=1&copy=2 &nothing; fish&chips", "at t r d a x 1 copy 2 nothing fish chips"),
    "soft hyphen": ("co\u00adoperate \ufeffwell a\u200ebc\u200f d\u2060e", "cooperate well abc de"),
    "apostrophes": ("Don't it\u2019s 'quoted' rock'n'roll l\u2019\u00e9t\u00e9", "don't it's quoted rock'n'roll l'été"),
    "emoji": ("good ❤\ufe0f day", "good day"),
    "underscores": ("snake_case __init__", "snake case init"),
    "no words": ("...", ""),
}


@pytest.mark.parametrize("case", WORDS)
def test_tokens_are_whole_lower_cased_words_of_any_script(case: str) -> None:
    text, expected = WORDS[case]
    assert " ".join(tokens(text)) == expected


def test_the_vocabulary_is_by_frequency_then_alphabet_and_from_the_training_part_only() -> None:
    texts = ["b a c", "b a", "b d", "zebra zebra zebra zebra b", "...", "b b b b a d d d d"]
    rows = _rows(texts, length=5)
    final, words = rows.vocabulary(np.array([0, 1, 2, 5]), 3)
    ids = final[rows.rows()]
    assert words == (*SPECIAL, "b", "a", "c") and ids.dtype == np.int32
    expected = [[2, 3, 4, 0, 0], [2, 3, 0, 0, 0], [2, 1, 0, 0, 0], [1, 1, 1, 1, 2], [1, 0, 0, 0, 0], [2, 2, 2, 2, 3]]
    assert ids.tolist() == expected
    assert _rows(["z y"], length=2).vocabulary(np.array([0]), 5)[1] == (*SPECIAL, "y", "z")


def test_vectors_are_those_of_the_vocabulary_and_missing_words_are_zero(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("3 3\nthe 1 2 3\n. . . 9 9 9\ncat 0.5 -1 2e-1\ndog 7 7 7\n")
    tally = Tally()
    vectors = read_vectors(path, (*SPECIAL, "cat", "unseen", "the"), tally)
    assert vectors.dtype == np.float32
    assert np.allclose(vectors, [[0, 0, 0], [0, 0, 0], [0.5, -1, 0.2], [0, 0, 0], [1, 2, 3]])
    assert "2 of 3 words found" in tally.notes[0]
    path.write_text("a 1 2\nb 3 x\n")
    with pytest.raises(UserError, match="glove.txt, line 2"):
        read_vectors(path, (*SPECIAL, "b"), Tally())


def _rows(texts: list[str], length: int) -> Texts:
    rows = Texts(length)
    for text in texts:
        rows.add(text)
    return rows
