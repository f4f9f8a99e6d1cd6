"""Next-word and next-character sets: TFF's texts and LEAF's Reddit, from small files in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import fedmpi
from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.registry import DATASETS
from data_prep.raw import RawDataset
from fedmpi.data.opening import open_store
from tests.data_prep.command import main


def hdf5(path: Path, field: str, clients: dict[str, list[str]]) -> None:
    """A file as TFF publishes it: strings of any length, a group a client."""
    with h5py.File(path, "w") as file:
        for name, texts in clients.items():
            file.create_dataset(f"examples/{name}/{field}", data=texts, dtype=h5py.string_dtype())


def read(name: str, folder: Path, tally: Tally | None = None, **options: Any) -> RawDataset:
    data = DATASETS[name]
    return data.read(folder, ReadOptions(**{**data.defaults, **options}), tally or Tally())


def written(raw: RawDataset, row: int, test: bool = False) -> tuple[list[str], list[str | None]]:
    """Tokens and targets of a row in words, padding left out; None where nothing counts."""
    x = raw.test_x[row] if test else raw.read(np.array([row]))[0]
    y = raw.test_y[row] if test else raw.targets_of(np.array([row]))[0]
    words = [raw.vocabulary[token] for token in x if token]
    return words, [None if target < 0 else raw.vocabulary[target] for target in y[: len(words)]]


def shakespeare(folder: Path) -> None:
    clients = {"HAMLET": ["To be\nor", "Ay"], "GHOST": ["Mark me."]}
    hdf5(folder / "shakespeare_train.h5", "snippets", clients)
    hdf5(folder / "shakespeare_test.h5", "snippets", {"GHOST": ["Oz"]})


def test_speeches_are_cut_into_pieces_that_predict_the_next_character(tmp_path: Path) -> None:
    """ "To be\\nor" with begin and end has 10 characters: pieces of 5 and 5, each with four to be predicted."""
    shakespeare(tmp_path)
    raw = read("fed-shakespeare", tmp_path, length=4)
    assert raw.users is not None and [raw.user_names[user] for user in raw.users] == ["GHOST"] * 2 + ["HAMLET"] * 3  # type: ignore[index]
    assert written(raw, 2) == (["<bos>", "T", "o", " "], ["T", "o", " ", "b"])
    assert written(raw, 3) == (["e", "\\n", "o", "r"], ["\\n", "o", "r", "<eos>"])
    assert written(raw, 4) == (["<bos>", "A", "y"], ["A", "y", "<eos>"])
    assert raw.targets_of(np.array([4]))[0].tolist()[3] == -1 and raw.read(np.array([4]))[0, 3] == 0
    assert written(raw, 0, test=True) == (["<bos>", "<unk>", "<unk>"], ["<unk>", "<unk>", "<eos>"])
    assert raw.classes == len(raw.vocabulary) and raw.targets == "tokens" and raw.target_shape == (4,)
    assert read("fed-shakespeare", tmp_path).feature_shape == (80,)


def stack_overflow(folder: Path) -> None:
    train = {f"{number:04}": [f"how do i sort {number} lists", "use a key", "so it is"] for number in range(8)}
    train["0003"].append("   ")
    hdf5(folder / "stackoverflow_train.h5", "tokens", train)
    hdf5(folder / "stackoverflow_test.h5", "tokens", {"0001": ["how do you use it"]})


def test_sentences_predict_their_next_word(tmp_path: Path) -> None:
    stack_overflow(tmp_path)
    raw = read("stackoverflow", tmp_path, tally := Tally(), length=5)
    assert len(raw.labels) == 24 and tally.unreadable == 1 and "client 0003, record 3" in tally.first
    assert written(raw, 0) == (["<bos>", "how", "do", "i", "sort"], ["how", "do", "i", "sort", "0"])
    assert written(raw, 1) == (["<bos>", "use", "a", "key"], ["use", "a", "key", "<eos>"])
    assert written(raw, 0, test=True)[1] == ["how", "do", "<unk>", "use", "it"]
    small = read("stackoverflow", tmp_path, length=5, vocabulary=3)
    assert small.vocabulary == ("<pad>", "<unk>", "<bos>", "<eos>", "a") and small.classes == 5
    assert read("stackoverflow", tmp_path).feature_shape == (20,)


def test_some_users_and_some_of_their_samples_are_read(tmp_path: Path) -> None:
    stack_overflow(tmp_path)
    raw = read("stackoverflow", tmp_path, users=3, per_user=2)
    assert raw.user_names is not None and len(raw.user_names) == 3 and len(raw.labels) == 6
    assert read("stackoverflow", tmp_path, users=3).user_names == raw.user_names == tuple(sorted(raw.user_names))


def reddit(folder: Path, part: str, users: dict[str, tuple[list[Any], list[Any]]]) -> None:
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / part / f"reddit_0_{part}.json").write_text(json.dumps(content))


def comment(words: list[str]) -> tuple[list[list[str]], dict[str, Any]]:
    """A comment as LEAF's preprocess.py gives it: sequences of ten, padded, with targets and what counts."""
    pad = lambda row, value: [*row, *[value] * (-len(row) % 10)]  # noqa: E731
    tokens, targets = ["<BOS>", *words, "<EOS>"], [*words, "<EOS>", "<PAD>"]
    cut = lambda row: [row[start : start + 10] for start in range(0, len(row), 10)]  # noqa: E731
    counts = cut(pad([1.0] * len(tokens), 0.0))
    y = {
        "subreddit": "x",
        "created_utc": 1,
        "score": 2,
        "target_tokens": cut(pad(targets, "<PAD>")),
        "count_tokens": counts,
    }
    return cut(pad(tokens, "<PAD>")), y


def test_comments_of_reddit_are_rows_of_ten(tmp_path: Path) -> None:
    long = [f"w{number}" for number in range(12)]
    one, two, some = comment(["hello", "there"]), comment(long), comment(["hello", "there"])
    some[1]["count_tokens"][0][0] = 0.0
    reddit(tmp_path, "train", {"7": ([one[0], two[0], [["short"]]], [one[1], two[1], one[1]])})
    reddit(tmp_path, "test", {"7": ([some[0]], [some[1]])})
    raw = read("reddit", tmp_path, tally := Tally())
    assert len(raw.labels) == 3 and tally.unreadable == 1 and "author 7, record 2" in tally.first
    assert written(raw, 0) == (["<BOS>", "hello", "there", "<EOS>"], ["hello", "there", "<EOS>", None])
    assert written(raw, 0, test=True)[1] == [None, "there", "<EOS>", None]
    assert written(raw, 1)[1] == long[:10]
    assert written(raw, 2) == (["w9", "w10", "w11", "<EOS>"], ["w10", "w11", "<EOS>", None])
    assert len(read("reddit", tmp_path, per_user=1).labels) == 1


def test_a_half_character_in_a_word_is_written_as_its_code(tmp_path: Path) -> None:
    words, y = comment(["hello", "\ud83d"])
    for part in ("train", "test"):
        reddit(tmp_path, part, {"7": ([words], [y])})
    assert main(["reddit", "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.description.vocabulary == len(store.vocabulary) and "\\ud83d" in store.vocabulary


def test_sequences_are_prepared_with_validation_and_read_again(tmp_path: Path) -> None:
    stack_overflow(tmp_path)
    words = ["stackoverflow", "--raw", str(tmp_path), "--length", "5", "--out", str(tmp_path / "out"), "--partition"]
    assert main([*words, "user", "--val", "0.34"]) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.clients == 8 and store.description.targets == "tokens" and store.description.target_shape == (5,)
    assert store.description.vocabulary == store.description.classes == len(store.vocabulary)
    assert store.samples + store.part_samples("val") == 24 and store.sizes.min() >= 1
    known = set(store.vocabulary) - {"<pad>"}
    kept = {store.vocabulary[token] for client in range(8) for token in np.unique(store.client(client)[0]) if token}
    assert kept <= known and "<unk>" not in kept  # the vocabulary is that of the rows that are trained on
    assert main([*words, "pathological", "--clients", "2", "--overwrite"]) == 2
    assert main([*words, "iid", "--clients", "2", "--label-noise", "pair", "--overwrite"]) == 2


@pytest.mark.parametrize("name", ["fed-shakespeare", "stackoverflow"])
def test_files_of_tff_that_are_missing_or_damaged_are_reported(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 2 and "_train.h5 in" in capsys.readouterr().err
    file = name.removeprefix("fed-")
    for part in ("train", "test"):
        hdf5(tmp_path / f"{file}_{part}.h5", "other", {"a": ["b"]})
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "client a: not a TFF file" in said and said.count("\n") == 1
    (tmp_path / f"{file}_train.h5").write_bytes(b"no HDF5")
    assert main(words) == 2 and "not an HDF5 file" in capsys.readouterr().err


def test_a_model_learns_what_follows_in_speeches(tmp_path: Path) -> None:
    """Roles who say a line again and again: after a few rounds the model is surer of the next than one who knows only
    how many characters there are."""
    lines = ["the quality of mercy", "is not strained", "it droppeth as rain"]
    speeches = {f"ROLE{number}": [lines[number % 3]] * 8 for number in range(6)}
    hdf5(tmp_path / "shakespeare_train.h5", "snippets", speeches)
    hdf5(tmp_path / "shakespeare_test.h5", "snippets", {"ROLE0": lines})
    words = ["fed-shakespeare", "--raw", str(tmp_path), "--length", "22", "--partition", "user"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    settings = {"rounds": 15, "participation.count": 3, "task.kind": "tokens", "model.name": "char-lstm"}
    settings |= {"model.units": 32, "local.lr": 2.0, "local.batch_size": 4, "evaluation.every": 1}
    perplexity = [record["test_perplexity"] for record in fedmpi.run("fedavg", settings, data=tmp_path / "out").records]
    characters = len(set("".join(lines))) + 1
    assert perplexity[-1] < 0.85 * perplexity[0] and perplexity[-1] < characters


def tagged(path: Path, clients: dict[str, list[tuple[str, str, str]]]) -> None:
    """A file of TFF's Stack Overflow: sentence, title and tags of each record."""
    with h5py.File(path, "w") as file:
        for name, records in clients.items():
            for place, field in enumerate(("tokens", "title", "tags")):
                values = [record[place] for record in records]
                file.create_dataset(f"examples/{name}/{field}", data=values, dtype=h5py.string_dtype())


def stack_overflow_tags(folder: Path) -> None:
    records = [("how do i sort", "Sort lists", "python|list"), ("use a key .", "Sort lists", "python|python")]
    tagged(folder / "stackoverflow_train.h5", {"7": records, "8": [("why", "in c", "c"), (" ", "", "python")]})
    tagged(folder / "stackoverflow_test.h5", {"9": [("sort in c", "", "rust|c|python"), ("use it", "", "rust")]})


def test_sentences_have_the_tags_of_their_questions(tmp_path: Path) -> None:
    stack_overflow_tags(tmp_path)
    raw = read("stackoverflow-tags", tmp_path, tally := Tally(), length=6, tags=2)
    assert (raw.targets, raw.class_names, raw.target_shape) == ("multilabel", ("python", "c"), (2,))
    assert raw.targets_of(np.arange(3)).tolist() == [[1, 0], [1, 0], [0, 1]] and raw.test_y.tolist() == [[1, 1], [0, 0]]
    words = [[raw.vocabulary[token] for token in row if token] for row in raw.read(np.arange(3))]
    assert words == [
        ["how", "do", "i", "sort", "Sort", "lists"],
        ["use", "a", "key", ".", "Sort", "lists"],
        ["why", "in", "c"],
    ]
    assert tally.unreadable == 1 and "client 8, record 1" in tally.first and not tally.notes
    assert raw.user_names == ("7", "8")
    read("stackoverflow-tags", tmp_path, tally := Tally(), length=5)
    assert "2 of 5 sentences have more than 5 words" in tally.notes[0]
    assert read("stackoverflow-tags", tmp_path).class_names == ("python", "c", "list")  # ties by the alphabet


def test_tags_are_prepared_with_validation_and_learned(tmp_path: Path) -> None:
    kinds = [("sort a list", "python|list"), ("borrow a box", "rust"), ("malloc and free", "c")]
    for part, authors in (("train", 9), ("test", 3)):
        clients = {f"{part}{a}": [(kinds[a % 3][0], "how to", kinds[a % 3][1])] * 6 for a in range(authors)}
        tagged(tmp_path / f"stackoverflow_{part}.h5", clients)
    words = ["stackoverflow-tags", "--raw", str(tmp_path), "--length", "9", "--partition", "user", "--val", "0.34"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    store = open_store(tmp_path / "out", verify=True)
    assert store.description.targets == "multilabel" and store.description.classes == 4
    settings = {"rounds": 10, "participation.count": 9, "task.kind": "multilabel", "model.name": "bag-of-words"}
    run = fedmpi.run("fedavg", settings | {"local.lr": 40.0}, data=tmp_path / "out")
    assert run.records[-1]["test_accuracy"] == 1.0 and run.records[0]["test_accuracy"] < 1.0


def test_sentences_without_a_tag_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "test"):
        tagged(tmp_path / f"stackoverflow_{part}.h5", {"7": [("how", "", "")]})
    words = ["stackoverflow-tags", "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 2 and "no training sentence has a tag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("tags", ["c"], "a field has more samples than another"),
        ("title", [1.0, 2.0], "stackoverflow_train.h5, client 7 holds float64 (2,) where texts belong"),
        ("tokens", [[b"a"], [b"b"]], "client 7 holds object (2, 1) where texts belong"),
    ],
)
def test_fields_that_are_no_texts_of_each_sentence_are_refused(
    tmp_path: Path, field: str, values: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "test"):
        tagged(tmp_path / f"stackoverflow_{part}.h5", {"7": [("a", "b", "c"), ("d", "e", "f")]})
    with h5py.File(tmp_path / "stackoverflow_train.h5", "a") as file:
        kind = None if isinstance(values[0], float) else h5py.string_dtype()
        del file["examples/7"][field]
        file["examples/7"].create_dataset(field, data=values, dtype=kind)
    words = ["stackoverflow-tags", "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_tag_that_a_sentence_names_twice_counts_once(tmp_path: Path) -> None:
    for part in ("train", "test"):
        tagged(tmp_path / f"stackoverflow_{part}.h5", {"7": [("a", "", "x|x|x"), ("b", "", "y"), ("c", "", "y")]})
    assert read("stackoverflow-tags", tmp_path, tags=1).class_names == ("y",)
