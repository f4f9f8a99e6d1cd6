"""TensorFlow Federated's texts: Shakespeare by role, character by character; Stack Overflow by author, word by word."""

from __future__ import annotations

from pathlib import Path

from data_prep.datasets.base import SEQUENCE_OPTIONS, DataSet, ReadOptions, Tally
from data_prep.datasets.raw_files import require
from data_prep.datasets.sequences import BEGIN, END, Sequences, sequence_data_set
from data_prep.datasets.shakespeare import WRITTEN
from data_prep.datasets.tff import texts, tff_clients
from data_prep.raw import RawDataset

SHAKESPEARE_FILES = ("shakespeare_train.h5", "shakespeare_test.h5")
STACK_OVERFLOW_FILES = ("stackoverflow_train.h5", "stackoverflow_test.h5")


def read_shakespeare(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Next characters: every speech ("snippet") between a begin and an end token, cut into pieces of L + 1 characters.

    As the character models of Reddi et al. (2021) read it, with L = 80 by default.
    """
    sequences, boundary = Sequences(options.length), 0
    for number, file in enumerate(SHAKESPEARE_FILES):
        path = require(raw, (file,), SHAKESPEARE.files)
        for name, arrays in tff_clients(path, ("snippets",), options.users, options.per_user):
            for speech in texts(arrays["snippets"], f"{path}, client {name}"):
                sequences.add_text([WRITTEN.get(character, character) for character in speech], name)
        boundary = boundary if number else len(sequences)
    return sequence_data_set(SHAKESPEARE, sequences, boundary, options, tally)


def read_stack_overflow(raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Next words: of every sentence the first L words behind a begin token, with an end token where it is shorter.

    As the word models of Reddi et al. (2021) read it, with L = 20 and the 10,000 most frequent words by default.
    """
    sequences, boundary = Sequences(options.length), 0
    for number, file in enumerate(STACK_OVERFLOW_FILES):
        path = require(raw, (file,), STACK_OVERFLOW.files)
        for name, arrays in tff_clients(path, ("tokens",), options.users, options.per_user):
            for row, sentence in enumerate(texts(arrays["tokens"], f"{path}, client {name}")):
                words = sentence.split()
                if not words:
                    tally.bad(f"{path}, client {name}, record {row}", "a sentence without a word")
                    continue
                whole = [BEGIN, *words, END][: options.length + 1]
                sequences.add(whole[:-1], whole[1:], name)
        boundary = boundary if number else len(sequences)
    return sequence_data_set(STACK_OVERFLOW, sequences, boundary, options, tally)


REDDI = "S. Reddi et al., Adaptive federated optimization, 2021"
PAGE = "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets"
SHAKESPEARE = DataSet(
    name="fed-shakespeare",
    samples="16,068 speeches of 715 roles + 2,356",
    classes="the next character",
    licence="public domain",
    citation=f"B. McMahan et al., Communication-efficient learning of deep networks, 2017; {REDDI}",
    page=PAGE,
    files=" and ".join(SHAKESPEARE_FILES) + " of TFF",
    read=read_shakespeare,
    options=SEQUENCE_OPTIONS,
    defaults={"length": 80},
)
STACK_OVERFLOW = DataSet(
    name="stackoverflow",
    samples="135,818,730 sentences of 342,477 authors + 16,586,035",
    classes="the next word",
    licence="CC BY-SA 3.0",
    citation=f"The TensorFlow Federated Authors, TensorFlow Federated Stack Overflow dataset, 2019; {REDDI}",
    page=PAGE,
    files=" and ".join(STACK_OVERFLOW_FILES) + " of TFF",
    read=read_stack_overflow,
    options=SEQUENCE_OPTIONS,
    defaults={"length": 20, "vocabulary": 10_000},
)
