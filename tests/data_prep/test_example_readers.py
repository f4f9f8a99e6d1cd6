"""The readers of docs/examples/readers: data sets that few use, from small files in their published layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from fedmpi.data.opening import open_store
from tests.data_prep.command import main
from tests.data_prep.layouts import leaf

READERS = Path(__file__).parents[2] / "docs" / "examples" / "readers"
RNG = np.random.default_rng(3)


def tff(path: Path, clients: dict[str, dict[str, Any]]) -> None:
    """A file as TensorFlow Federated publishes it: a group for each client, strings of any length."""
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                texts = isinstance(values, list) and isinstance(values[0], str)
                kind = h5py.string_dtype() if texts else None
                file.create_dataset(f"examples/{name}/{field}", data=values, dtype=kind)


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(READERS), *sys.path])

    def prepared(reader: str, *words: str) -> Any:
        command = [reader, "--raw", str(tmp_path), "--partition", "user", *words, "--out", str(tmp_path / "out")]
        assert main([*command, "--overwrite"]) == 0
        return open_store(tmp_path / "out")

    return prepared


def in_words(store: Any, client: int, row: int) -> tuple[str, str]:
    """Tokens and targets of a row, padding and what counts nowhere as -."""
    (x, y), words = store.client(client), store.vocabulary
    return " ".join(words[token] if token else "-" for token in x[row]), " ".join(
        words[target] if target >= 0 else "-" for target in y[row]
    )


def test_sent140(tmp_path: Path, prepare: Any) -> None:
    tweet = lambda text: ["1467", "Mon Apr 06", "NO_QUERY", "ann", text]  # noqa: E731
    leaf(tmp_path, "train", {"ann": ([tweet("Good day")], [1]), "bob": ([tweet("bad day"), tweet("no")], [0, 0])})
    leaf(tmp_path, "test", {"cid": ([tweet("a good one")], [1])})
    store = prepare("sent140:read", "--length", "3")
    assert store.client_ids.tolist() == ["ann", "bob"] and store.class_counts().tolist() == [[0, 1], [2, 0]]
    assert [store.vocabulary[token] for token in store.client(0)[0][0]] == ["good", "day", "<pad>"]


def test_synthetic(tmp_path: Path, prepare: Any) -> None:
    x = RNG.normal(size=(7, 5))
    leaf(tmp_path, "train", {"0": (x[:4].tolist(), [0, 2, 1, 1]), "9": (x[4:].tolist(), [0, 0, 2])}, packed=True)
    leaf(tmp_path, "test", {"3": (x[:2].tolist(), [2, 0])}, packed=True)
    store = prepare("synthetic:read")
    assert store.sizes.tolist() == [4, 3] and store.test()[1].tolist() == [2, 0]
    found = np.concatenate([store.client(k)[0] for k in range(2)])
    np.testing.assert_array_equal(np.sort(found, axis=0), np.sort(x.astype(np.float32), axis=0))


def test_celeba(tmp_path: Path, prepare: Any) -> None:
    (tmp_path / "raw" / "img_align_celeba").mkdir(parents=True)
    for number in range(4):
        pixels = RNG.integers(0, 256, (21, 17, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "raw" / "img_align_celeba" / f"{number}.png")
    leaf(tmp_path, "train", {"7": (["0.png", "1.png"], [1.0, 0.0]), "8": (["2.png"], [0.0])})
    leaf(tmp_path, "test", {"9": (["3.png"], [1])})
    store = prepare("celeba:read", "--size", "6")
    assert store.description.feature_shape == (3, 6, 6) and store.class_counts().tolist() == [[1, 1], [1, 0]]
    with Image.open(tmp_path / "raw" / "img_align_celeba" / "2.png") as image:
        expected = np.asarray(image.resize((6, 6), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(store.client(1)[0][0], expected)


def test_fed_cifar100(tmp_path: Path, prepare: Any) -> None:
    for part, names in (("train", "01"), ("test", "0")):
        fields = {"image": RNG.integers(0, 256, (3, 32, 32, 3), np.uint8), "label": np.array([11, 35, 98])}
        tff(tmp_path / f"fed_cifar100_{part}.h5", dict.fromkeys(names, fields))
    assert prepare("fed_cifar100:read").sizes.tolist() == [3, 3]


def test_stackoverflow_and_its_tags(tmp_path: Path, prepare: Any) -> None:
    for part in ("train", "test"):
        rows = {"tokens": ["how do i sort lists", "use a key"], "title": ["sort", "it"], "tags": ["c|list", "list"]}
        tff(tmp_path / f"stackoverflow_{part}.h5", {"0001": rows, "0002": rows})
    store = prepare("next_words:stackoverflow", "--words", "5")
    rows = {in_words(store, 0, row) for row in range(2)}
    assert rows == {("<bos> how do i sort", "how do i sort lists"), ("<bos> use a key -", "use a key <eos> -")}
    assert prepare("next_words:stackoverflow", "--readers", "1").clients == 1
    store = prepare("next_words:tags", "--words", "5", "--tagged", "1")
    assert store.manifest.class_names == ("list",) and store.client(0)[1].tolist() == [[1], [1]]


def test_fed_shakespeare(tmp_path: Path, prepare: Any) -> None:
    tff(tmp_path / "shakespeare_train.h5", {"HAMLET": {"snippets": ["To\nbe"]}})
    tff(tmp_path / "shakespeare_test.h5", {"HAMLET": {"snippets": ["be"]}})
    store = prepare("next_words:fed_shakespeare", "--characters", "3")
    rows = {in_words(store, 0, row) for row in range(2)}
    assert rows == {("<bos> T o", "T o \\n"), ("b e -", "e <eos> -")}


def test_reddit(tmp_path: Path, prepare: Any) -> None:
    words, pad = ["<BOS>", "hello", "there"], ["<PAD>"] * 7
    target = {"target_tokens": [["hello", "there", "<EOS>", *pad]], "count_tokens": [[1.0, 0.0, 1.0] + [0.0] * 7]}
    for part in ("train", "test"):
        leaf(tmp_path, part, {"7": ([[[*words, *pad]]], [target])})
    store = prepare("next_words:reddit")
    assert in_words(store, 0, 0) == ("<BOS> hello there" + " -" * 7, "hello - <EOS>" + " -" * 7)
