"""LEAF's sets and TFF's CIFAR-100, from small files in the layouts in which they are published."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.raw_files import chosen_users
from data_prep.datasets.registry import DATASETS
from data_prep.datasets.shakespeare import LETTERS
from data_prep.raw import RawDataset
from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main

RNG = np.random.default_rng(3)


def leaf(folder: Path, part: str, users: dict[str, tuple[list[Any], list[Any]]], packed: bool = False) -> None:
    """A file as LEAF's scripts write it."""
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path = folder / "data" / part / f"all_data_niid_0_keep_0_{part}_9.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)


def read(name: str, folder: Path, options: ReadOptions | None = None, tally: Tally | None = None) -> RawDataset:
    return DATASETS[name].read(folder, options or ReadOptions(**DATASETS[name].defaults), tally or Tally())


def test_synthetic_vectors_are_read_with_their_users(tmp_path: Path) -> None:
    x = RNG.normal(size=(7, 5))
    leaf(tmp_path, "train", {"0": (x[:4].tolist(), [0, 2, 1, 1]), "9": (x[4:].tolist(), [0, 0, 2])}, packed=True)
    leaf(tmp_path, "test", {"3": (x[:2].tolist(), [3, 0])}, packed=True)
    raw = read("synthetic", tmp_path)
    assert raw.classes == 4 and raw.labels.tolist() == [0, 2, 1, 1, 0, 0, 2] and raw.test_y.tolist() == [3, 0]
    assert raw.users is not None and raw.users.tolist() == [0] * 4 + [1] * 3 and raw.user_names == ("0", "9")
    np.testing.assert_array_equal(raw.read(np.array([6, 0])), x[[6, 0]].astype(np.float32))
    assert raw.mean[0] == pytest.approx(x.mean(), abs=1e-6)


def test_a_user_who_is_in_a_file_twice_is_not_read_twice(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {"a": ([[1.0, 2.0]], [0]), "b": ([[3.0, 4.0]], [1])})
    leaf(tmp_path, "test", {"c": ([[1.0, 2.0]], [0])})
    path = next((tmp_path / "data" / "train").iterdir())
    path.write_text(path.read_text().replace('"b": {', '"a": {').replace('["a", "b"]', '["a"]'))
    with pytest.raises(UserError, match="user a: .*two entries in user_data"):
        read("synthetic", tmp_path)


def test_rows_of_synthetic_that_are_no_vectors_are_counted(tmp_path: Path) -> None:
    leaf(tmp_path, "train", {"a": ([[1.0, 2.0], [1.0, 1e39]], [0, 1]), "b": ([[1.0], [2.0]], [0, 1])})
    leaf(tmp_path, "test", {"c": ([[1.0, 2.0], [3.0, 4.0]], [0, -1])})
    raw = read("synthetic", tmp_path, tally=(tally := Tally()))
    assert raw.labels.tolist() == [0] and raw.test_y.tolist() == [0] and tally.unreadable == 4
    assert "user a, record 1: a number that is not finite" in tally.first


def test_sent140_has_the_tweets_of_its_authors(tmp_path: Path) -> None:
    tweet = lambda text: ["1467", "Mon Apr 06", "NO_QUERY", "ann", text]  # noqa: E731
    leaf(tmp_path, "train", {"ann": ([tweet("Good day"), tweet("  ")], [1, 0]), "bob": ([tweet("bad day")], [0])})
    leaf(tmp_path, "test", {"cid": ([tweet("a good one"), ["short"]], [1, 1])})
    raw = read("sent140", tmp_path, ReadOptions(length=3), tally := Tally())
    assert raw.labels.tolist() == [1, 0] and raw.user_names == ("ann", "bob") and tally.unreadable == 2
    words = [raw.vocabulary[token] for token in raw.read(np.array([0]))[0]]
    assert words == ["good", "day", "<pad>"] and raw.test_x.shape == (1, 3)
    assert "user ann, record 1" in tally.first


def test_shakespeares_characters_predict_the_next(tmp_path: Path) -> None:
    line = "                         To be, or not to be? that is the question:\nWhether 'tis nobler"
    windows = [line[start : start + 80] for start in range(len(line) - 80)]
    nexts = [line[start + 80] for start in range(len(line) - 80)]
    count = len(windows)
    odd = ["—" + windows[0][1:], windows[0][:79], windows[0]]
    leaf(tmp_path, "train", {"HAMLET": (windows, nexts), "GHOST": (odd, ["a", "a", "é"])})
    leaf(tmp_path, "test", {"HAMLET": (windows[:1], nexts[:1])})
    raw = read("shakespeare", tmp_path, tally=(tally := Tally()))
    ids = raw.read(np.arange(count + 1))
    assert [LETTERS[label] for label in raw.labels] == [*nexts, "a"] and tally.unreadable == 2
    assert ["".join(LETTERS[token - 2] for token in row) for row in ids[:count]] == windows
    assert ids[count, 0] == 1 and (ids[count, 1:] == ids[0, 1:]).all()
    assert raw.classes == 80 and len(raw.vocabulary) == 82 and raw.vocabulary[2] == "\\n"
    assert raw.user_names == ("HAMLET", "GHOST") and "record 1: not 80 characters" in tally.first


def faces(folder: Path, sizes: list[tuple[int, int]]) -> list[str]:
    (folder / "raw" / "img_align_celeba").mkdir(parents=True)
    names = [f"{number + 1:06}.png" for number in range(len(sizes))]
    for name, (width, height) in zip(names, sizes, strict=True):
        pixels = RNG.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "raw" / "img_align_celeba" / name)
    return names


def test_celebas_faces_are_resized_and_belong_to_celebrities(tmp_path: Path) -> None:
    names = faces(tmp_path, [(178, 218), (20, 20), (178, 218), (12, 9)])
    (tmp_path / "raw" / "img_align_celeba" / "000009.png").write_bytes(b"no image")
    leaf(
        tmp_path,
        "train",
        {"7": (names[:2], [1.0, 0.0]), "8": ([names[2], "absent.jpg", "000009.png"], [0.0, 1.0, 1.0])},
    )
    leaf(tmp_path, "test", {"9": ([names[3]], [1])})
    raw = read("celeba", tmp_path, tally=(tally := Tally()))
    assert raw.feature_shape == (3, 84, 84) and raw.labels.tolist() == [1, 0, 0] and raw.user_names == ("7", "8")
    with Image.open(tmp_path / "raw" / "img_align_celeba" / names[0]) as image:
        expected = np.asarray(image.resize((84, 84), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(raw.read(np.array([0]))[0], expected)
    assert tally.unreadable == 2 and "no picture 'absent.jpg'" in tally.first and raw.test_x.shape == (1, 3, 84, 84)
    assert read("celeba", tmp_path, ReadOptions(image_size=(6, 5))).feature_shape == (3, 5, 6)


@pytest.mark.parametrize("name", ["synthetic", "sent140", "shakespeare", "celeba"])
def test_leaf_files_that_are_missing_or_cut_are_reported_in_a_sentence(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [name, "--raw", str(tmp_path), "--partition", "user", "--out", str(tmp_path / "out")]
    assert main(words) == 2 and f"no LEAF files in {tmp_path}" in capsys.readouterr().err
    leaf(tmp_path, "train", {"a": ([], [])})
    leaf(tmp_path, "test", {"a": ([], [])})
    assert main(words) == 2 and "error: " in capsys.readouterr().err
    path = next((tmp_path / "data" / "train").iterdir())
    path.write_text(path.read_text()[:-5])
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "not LEAF's format" in said and said.count("\n") == 1


def cifar(path: Path, clients: dict[str, tuple[np.ndarray, list[int], list[int]]]) -> None:
    with h5py.File(path, "w") as file:
        for name, (images, fine, coarse) in clients.items():
            file[f"examples/{name}/image"] = images
            file[f"examples/{name}/label"] = np.array(fine, np.int64)
            file[f"examples/{name}/coarse_label"] = np.array(coarse, np.int64)


def test_cifar_100_of_tff_has_natural_clients_and_superclasses(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (6, 32, 32, 3), np.uint8)
    train = {"0": (images[:4], [11, 11, 35, 98], [14, 14, 14, 3]), "1": (images[4:], [2, 11], [14, 14])}
    cifar(tmp_path / "fed_cifar100_train.h5", train)
    cifar(tmp_path / "fed_cifar100_test.h5", {"0": (images[:2], [35, 0], [14, 4])})
    raw = read("fed-cifar100", tmp_path)
    assert raw.labels.tolist() == [11, 11, 35, 98, 2, 11] and raw.users is not None
    assert raw.users.tolist() == [0, 0, 0, 0, 1, 1] and raw.test_y.tolist() == [35, 0]
    np.testing.assert_array_equal(raw.read(np.array([5, 1])), images[[5, 1]].transpose(0, 3, 1, 2))
    assert raw.superclasses is not None
    assert raw.superclasses[[11, 35, 98, 2]].tolist() == [14, 14, 3, 14] and raw.superclasses[0] not in (3, 14)
    words = ["fed-cifar100", "--raw", str(tmp_path), "--out", str(tmp_path / "out"), "--partition"]
    assert main([*words, "user"]) == 0 and open_store(tmp_path / "out").sizes.tolist() == [4, 2]
    assert main([*words, "pachinko", "--clients", "3", "--overwrite"]) == 0
    assert open_store(tmp_path / "out").sizes.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({"0": (np.zeros((2, 32, 32, 3), np.uint8), [1, 1], [3, 4])}, "several coarse labels"),
        ({str(k): (np.zeros((1, 32, 32, 3), np.uint8), [1], [k]) for k in (3, 4)}, "client 4: images of one class"),
        ({"0": (np.zeros((1, 32, 32, 3), np.uint8), [100], [4])}, "not 0 to 99"),
        ({"0": (np.zeros((1, 32, 32, 3), np.float32), [1], [4])}, "images float32"),
        ({}, "holds no image|not a TFF file"),
    ],
)
def test_damaged_files_of_tff_are_refused(tmp_path: Path, clients: Any, message: str) -> None:
    cifar(tmp_path / "fed_cifar100_train.h5", clients)
    cifar(tmp_path / "fed_cifar100_test.h5", {"0": (np.zeros((1, 32, 32, 3), np.uint8), [1], [4])})
    with pytest.raises(UserError, match=message):
        read("fed-cifar100", tmp_path)


def beside(path: Path, **arrays: Any) -> None:
    with h5py.File(path.with_name("other.h5"), "w") as other:
        for name, values in arrays.items():
            other[name] = values


def to_another_file(client: h5py.Group) -> None:
    del client["image"]
    client["image"] = h5py.ExternalLink("other.h5", "image")


def of_another_files_bytes(client: h5py.Group) -> None:
    del client["image"]
    whole = [("other.h5", 0, h5py.h5f.UNLIMITED)]
    client.create_dataset("image", (1, 32, 32, 3), np.uint8, external=whole)


def of_another_files_datasets(client: h5py.Group) -> None:
    del client["image"]
    layout = h5py.VirtualLayout((1, 32, 32, 3), np.uint8)
    layout[:] = h5py.VirtualSource("other.h5", "image", (1, 32, 32, 3))
    client.create_virtual_dataset("image", layout)


def of_billions(client: h5py.Group) -> None:
    del client["image"]
    client.create_dataset("image", (10**9, 32, 32, 3), np.uint8, chunks=(1, 32, 32, 3))


def in_a_huge_piece(client: h5py.Group) -> None:
    del client["image"]
    client.create_dataset("image", (1, 32, 32, 3), np.uint8, chunks=(10**6, 32, 32, 3), maxshape=(None, 32, 32, 3))


def a_group_itself(client: h5py.Group) -> None:
    del client["image"]
    client.create_group("image")


def a_client_elsewhere(client: h5py.Group) -> None:
    clients = client.parent
    del clients["0"]
    clients["0"] = h5py.SoftLink("/examples/1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (to_another_file, "'image' is no dataset of this file"),
        (of_another_files_bytes, "'image' is kept in another file"),
        (of_another_files_datasets, "'image' is kept in another file"),
        (of_billions, "more than a client has"),
        (in_a_huge_piece, "more than a client has"),
        (a_group_itself, "'image' is no dataset"),
        (a_client_elsewhere, "'0' is no group of this file"),
    ],
)
def test_a_file_of_tff_leads_to_no_other_file_and_to_no_endless_memory(
    tmp_path: Path, change: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = (np.zeros((1, 32, 32, 3), np.uint8), [1], [4])
    train = tmp_path / "fed_cifar100_train.h5"
    cifar(train, {"0": one, "1": one})
    cifar(tmp_path / "fed_cifar100_test.h5", {"0": one})
    beside(train, image=one[0])
    assert len(read("fed-cifar100", tmp_path).labels) == 2
    with h5py.File(train, "a") as file:
        change(file["examples/0"])
    with pytest.raises(UserError, match=message):
        read("fed-cifar100", tmp_path)


def test_some_users_are_chosen_once_and_in_order() -> None:
    names = [f"u{number:02}" for number in range(50)]
    chosen = chosen_users(names, 10)
    assert chosen == sorted(chosen) == chosen_users(names, 10) and len(set(chosen)) == 10 and chosen != names[:10]
    assert chosen_users(names, None) == names == chosen_users(names, 50)


def test_the_official_files_of_cifar_100_tell_superclasses(tmp_path: Path) -> None:
    rows = {
        "data": RNG.integers(0, 256, (4, 3072), np.uint8),
        "fine_labels": [7, 7, 9, 2],
        "coarse_labels": [3, 3, 0, 3],
    }
    for part in ("train", "test"):
        (tmp_path / part).write_bytes(pickle.dumps(rows, 2))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"c{label}" for label in range(100)]}, 2))
    found = read("cifar100", tmp_path).superclasses
    assert found is not None and found[[7, 9, 2]].tolist() == [3, 0, 3]
    assert len({*found[:2].tolist(), 0, 3}) == 4  # classes without an image stand alone
    for coarse in ([3, 4, 0, 3], [3, 3, 0]):
        (tmp_path / "train").write_bytes(pickle.dumps(rows | {"coarse_labels": coarse}, 2))
        with pytest.raises(UserError, match="coarse"):
            read("cifar100", tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps({key: rows[key] for key in ("data", "fine_labels")}, 2))
    assert read("cifar100", tmp_path).superclasses is None
