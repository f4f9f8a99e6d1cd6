"""Image sets without real files here: small files in the official formats, whole and broken."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from data_prep.datasets import femnist, json_stream
from data_prep.datasets.base import ReadOptions, Tally
from data_prep.datasets.cinic10 import CLASSES as CINIC_CLASSES
from data_prep.datasets.registry import DATASETS
from data_prep.raw import RawDataset
from fedmpi import UserError

RNG = np.random.default_rng(7)


def test_cinic10_is_read_from_its_folders(tmp_path: Path) -> None:
    pictures = {part: _cinic(tmp_path / "CINIC-10" / part, 3) for part in ("train", "valid", "test")}
    raw = _read("cinic10", tmp_path)
    assert raw.feature_shape == (3, 32, 32) and raw.class_names == CINIC_CLASSES
    assert np.bincount(raw.labels).tolist() == [3] * 10
    assert np.array_equal(raw.read(np.array([4, 29])), pictures["train"][[4, 29]])
    assert np.array_equal(raw.test_x, pictures["test"])


def test_a_broken_image_is_left_out_counted_and_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        _cinic(tmp_path / part, 2)
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n not an image")
    _write_image(tmp_path / "train" / "dog" / "1.png", RNG.integers(0, 256, (16, 32, 3), np.uint8))
    whole = (tmp_path / "test" / "ship" / "0.png").read_bytes()
    (tmp_path / "test" / "ship" / "0.png").write_bytes(whole[:-200])
    tally = Tally()
    raw = _read("cinic10", tmp_path, tally=tally)
    assert raw.skipped == 3 and len(raw.labels) == 18 and len(raw.test_y) == 19
    assert "cat/0.png" in tally.first
    with pytest.raises(UserError, match=r"cat/0.png: not a readable image .*--strict"):
        _read("cinic10", tmp_path, tally=Tally(strict=True))


def test_an_unknown_class_folder_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        _cinic(tmp_path / part, 1)
    _write_image(tmp_path / "train" / "zebra" / "0.png", np.zeros((32, 32, 3), np.uint8))
    with pytest.raises(UserError, match="'zebra'"):
        _read("cinic10", tmp_path)


def test_an_image_that_breaks_after_the_survey_is_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        _cinic(tmp_path / part, 1)
    raw = _read("cinic10", tmp_path)
    (tmp_path / "train" / "bird" / "0.png").write_bytes(b"gone")
    with pytest.raises(UserError, match="bird/0.png cannot be decoded"):
        raw.read(np.arange(10))


def test_an_imagefolder_without_parts_holds_out_a_fifth(tmp_path: Path) -> None:
    for name in ("b", "a"):
        for number in range(10):
            _write_image(tmp_path / name / f"{number}.png", np.full((6, 5), 10 * number, np.uint8))
    raw = _read("imagefolder", tmp_path)
    assert raw.class_names == ("a", "b") and raw.feature_shape == (1, 6, 5)
    assert (len(raw.labels), len(raw.test_y)) == (16, 4)
    values = [*raw.read(np.arange(16))[:, 0, 0, 0], *raw.test_x[:, 0, 0, 0]]
    assert sorted(values) == sorted([10 * number for number in range(10)] * 2)


def test_images_of_an_imagefolder_can_be_resized(tmp_path: Path) -> None:
    for part in ("train", "test"):
        _write_image(tmp_path / part / "a" / "1.png", np.full((6, 5, 3), 100, np.uint8))
        _write_image(tmp_path / part / "a" / "2.jpg", np.full((9, 9, 3), 100, np.uint8))
    raw = _read("imagefolder", tmp_path, ReadOptions(image_size=(8, 7)))
    assert raw.feature_shape == (3, 7, 8) and raw.skipped == 0
    assert np.abs(raw.read(np.arange(2)).astype(int) - 100).max() <= 2


def test_images_of_mixed_sizes_are_refused_with_their_counts_unless_odd_ones_are_to_be_left_out(tmp_path: Path) -> None:
    for part, wide in (("train", 3), ("test", 2)):
        for number in range(wide):
            _write_image(tmp_path / part / "a" / f"{number}.png", np.full((6, 5), 10, np.uint8))
        _write_image(tmp_path / part / "a" / "0-odd.png", np.full((9, 8), 10, np.uint8))
    message = r"images of 2 sizes \(5 of 5 x 6, 2 of 8 x 9\).*--image-size 5x6.*2 that .*--skip-odd-sizes"
    with pytest.raises(UserError, match=message):
        _read("imagefolder", tmp_path)
    tally = Tally(strict=True)
    raw = _read("imagefolder", tmp_path, ReadOptions(skip_odd_sizes=True), tally)
    assert raw.feature_shape == (1, 6, 5) and (len(raw.labels), len(raw.test_y)) == (3, 2)
    assert tally.dropped == {"images of another size than 5 x 6": 2}
    with pytest.raises(UserError, match="leave out --skip-odd-sizes"):
        _read("imagefolder", tmp_path, ReadOptions(skip_odd_sizes=True, image_size=(4, 4)))


def test_one_picture_in_colour_makes_an_imagefolder_colourful(tmp_path: Path) -> None:
    for part in ("train", "test"):
        _write_image(tmp_path / part / "a" / "1.png", np.full((2, 2), 100, np.uint8))
    red = np.zeros((2, 2, 3), np.uint8) + np.array([200, 0, 0], np.uint8)
    _write_image(tmp_path / "train" / "a" / "2.png", red)
    raw = _read("imagefolder", tmp_path)
    assert raw.feature_shape == (3, 2, 2) and raw.read(np.array([1]))[0, :, 0, 0].tolist() == [200, 0, 0]


def test_grey_of_16_bits_keeps_its_shades_and_of_32_bits_is_left_out(tmp_path: Path) -> None:
    grey = np.arange(0, 65536, 257, np.uint16).reshape(16, 16)
    for part in ("train", "test"):
        _write_image(tmp_path / part / "a" / "1.png", grey)
        _write_image(tmp_path / part / "a" / "2.tif", grey.astype(np.float32))
    _write_image(tmp_path / "train" / "a" / "3.tif", grey.astype(np.int32))
    tally = Tally()
    raw = _read("imagefolder", tmp_path, tally=tally)
    assert raw.feature_shape == (1, 16, 16) and raw.read(np.array([0])).ravel().tolist() == list(range(256))
    assert len(raw.labels) == 1 and tally.unreadable == 3 and "convert it to 8 bits" in tally.first
    _write_image(tmp_path / "train" / "a" / "4.png", np.zeros((16, 16, 3), np.uint8))
    coloured = _read("imagefolder", tmp_path).read(np.array([0]))
    assert coloured[0, 2].ravel().tolist() == list(range(256))


def test_femnist_is_read_from_leaf_json(tmp_path: Path) -> None:
    train = {"w1": _writer(3), "w2": _writer(2)}
    content = _leaf(tmp_path / "data" / "train" / "all_data_0.json", train)
    content["user_data"]["w1"]["x"] = np.round(
        content["user_data"]["w1"]["x"], 5
    ).tolist()  # as far as they are printed
    (tmp_path / "data" / "train" / "all_data_0.json").write_text(json.dumps(content))
    _leaf(tmp_path / "data" / "test" / "all_data_0.json", {"w1": _writer(2)})
    raw = _read("femnist", tmp_path)
    assert raw.users is not None and raw.user_names == ("w1", "w2")
    assert raw.users.tolist() == [0, 0, 0, 1, 1]
    assert raw.labels.tolist() == train["w1"][1].tolist() + train["w2"][1].tolist()
    assert np.array_equal(raw.read(np.array([1])).ravel(), train["w1"][0][1])
    assert len(raw.test_y) == 2 and raw.classes == 62


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_leaf_rows_are_counted_with_writer_and_record(tmp_path: Path) -> None:
    _leaf(tmp_path / "test" / "a.json", {"w1": _writer(1)})
    content = _leaf(tmp_path / "train" / "a.json", {"w1": _writer(6)})
    content["user_data"]["w1"]["y"][1] = 99
    content["user_data"]["w1"]["x"][2][5] = 0.5001
    content["user_data"]["w1"]["x"][3][5] = -1 / 255
    content["user_data"]["w1"]["x"][4][5] = 256 / 255
    content["user_data"]["w1"]["x"][5][5] = 1e308
    (tmp_path / "train" / "a.json").write_text(json.dumps(content))
    tally = Tally()
    raw = _read("femnist", tmp_path, tally=tally)
    assert len(raw.labels) == 1 and raw.skipped == 5
    assert "writer w1, record 1: label 99" in tally.first


def test_a_cut_leaf_file_is_named(tmp_path: Path) -> None:
    _leaf(tmp_path / "test" / "a.json", {"w1": _writer(1)})
    _leaf(tmp_path / "train" / "a.json", {"w1": _writer(1)})
    path = tmp_path / "train" / "a.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=r"train/a.json, writer none yet: not LEAF's format"):
        _read("femnist", tmp_path)


def test_a_leaf_file_is_read_writer_by_writer(tmp_path: Path) -> None:
    """40 writers take less memory than half of their file (a quarter as measured), its content twice it."""
    path = tmp_path / "train" / "all.json"
    _leaf(path, {f"w{number}": _writer(12) for number in range(40)})
    size = path.stat().st_size
    tracemalloc.start()
    rows = sum(len(labels) for _, _, labels in femnist._json_writers(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows == 480 and size > 4_000_000 and peak < size / 2


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_json_object_is_read_alike_whatever_the_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {
        "a": [1, 2.5],
        "big": {"x": {"y": [1]}, "é": 12345, "": None, "t": '\\"}'},
        "n": -1234.5e-7,
        "e": {},
        "z": True,
    }
    monkeypatch.setattr(json_stream, "BLOCK", block)
    for text in (json.dumps(content), json.dumps(content, indent=3, ensure_ascii=False) + " \n"):
        found = list(json_stream.members(io.StringIO(text), "big"))
        expected = [(("a",), [1, 2.5])] + [(("big", key), value) for key, value in content["big"].items()]  # type: ignore
        assert found == [*expected, *(((key,), content[key]) for key in ("n", "e", "z"))]
    assert list(json_stream.members(io.StringIO(' {"big": {}}'), "big")) == []


@pytest.mark.parametrize("text", ["", "[1]", '{"a" 1}', '{"a": 1', '{"a": 1} 2', "{1: 2}", '{"big": [1]}', '{"a": 1,}'])
def test_what_is_no_json_object_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        list(json_stream.members(io.StringIO(text), "big"))


def test_a_leaf_file_must_hold_the_writers_it_names(tmp_path: Path) -> None:
    _leaf(tmp_path / "test" / "a.json", {"w1": _writer(1)})
    content = _leaf(tmp_path / "train" / "a.json", {"w1": _writer(1)})
    (tmp_path / "train" / "a.json").write_text(json.dumps(content | {"users": ["w1", "w2"]}))
    with pytest.raises(UserError, match="users names 2 writers, user_data holds 1"):
        _read("femnist", tmp_path)


def test_femnist_is_read_from_tff_hdf5(tmp_path: Path) -> None:
    written = {}
    for part in ("train", "test"):
        with h5py.File(tmp_path / f"fed_emnist_{part}.h5", "w") as file:
            for name in ("f0000_14", "f0001_41"):
                written[part, name] = images, labels = _writer(4)
                pixels = (images / np.float32(255)).astype(np.float32).reshape(-1, 28, 28)
                file[f"examples/{name}/pixels"], file[f"examples/{name}/label"] = pixels, labels.astype(np.int32)
    raw = _read("femnist", tmp_path)
    assert raw.user_names == ("f0000_14", "f0001_41") and len(raw.labels) == 8
    assert np.array_equal(raw.read(np.arange(4)).reshape(4, -1), written["train", "f0000_14"][0])


def test_a_writer_whose_images_and_labels_do_not_fit_is_left_out(tmp_path: Path) -> None:
    for part, labels in (("train", 2), ("test", 4)):
        with h5py.File(tmp_path / f"fed_emnist_{part}.h5", "w") as file:
            for name, count in (("f0_1", 4), ("f1_1", labels)):
                file[f"examples/{name}/pixels"] = np.zeros((4, 28, 28), np.float32)
                file[f"examples/{name}/label"] = np.arange(count, dtype=np.int32)
    raw = _read("femnist", tmp_path, tally=(tally := Tally()))
    assert raw.labels.tolist() == [0, 1, 2, 3] and len(raw.test_y) == 8 and tally.unreadable == 2
    assert "writer f1_1: images (2, 1568) and labels (2,)" in tally.first


def test_emnist_byclass_is_read_and_turned_upright(tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (70, 28, 28), np.uint8)
    labels = (np.arange(70) % 62).astype(np.uint8)
    _emnist(tmp_path, "byclass", images, labels)
    raw = _read("emnist-byclass", tmp_path)
    assert raw.class_names[10] == "A" and raw.class_names[61] == "z"
    assert np.array_equal(raw.read(np.array([3]))[0, 0], images[3].T)
    assert np.array_equal(raw.labels, labels)


def test_a_label_outside_the_classes_names_its_record(tmp_path: Path) -> None:
    _emnist(tmp_path, "byclass", np.zeros((3, 28, 28), np.uint8), np.array([0, 62, 1], np.uint8))
    with pytest.raises(UserError, match="labels-idx1-ubyte.gz, record 1: label 62"):
        _read("emnist-byclass", tmp_path)


def test_a_file_that_is_not_idx_says_so(tmp_path: Path) -> None:
    _emnist(tmp_path, "byclass", np.zeros((3, 28, 28), np.uint8), np.arange(3, dtype=np.uint8))
    (tmp_path / "emnist-byclass-train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"<html>moved</html>"))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz is not an idx file"):
        _read("emnist-byclass", tmp_path)


def test_cifar_pickles_run_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    for name in ("meta", "train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps({"data": Harmful()}))
    with pytest.raises(UserError, match="which is not an array"):
        _read("cifar100", tmp_path)
    assert not (tmp_path / "touched").exists()


def test_cifar_batches_must_hold_images_and_labels(tmp_path: Path) -> None:
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(name) for name in range(100)]}))
    rows = {"data": RNG.integers(0, 256, (4, 3072), np.uint8), "fine_labels": [0, 1, 2, 3]}
    for name in ("train", "test"):
        (tmp_path / name).write_bytes(pickle.dumps(rows, protocol=2))
    assert np.array_equal(_read("cifar100", tmp_path).read(np.arange(4)).reshape(4, -1), rows["data"])
    (tmp_path / "train").write_bytes(pickle.dumps(rows | {"fine_labels": [0, 1, 2]}))
    with pytest.raises(UserError, match="train holds 4 images but 3 labels"):
        _read("cifar100", tmp_path)
    (tmp_path / "train").write_bytes(pickle.dumps(rows | {"fine_labels": [0, 1, 2, 100]}))
    with pytest.raises(UserError, match="train, record 3: label 100"):
        _read("cifar100", tmp_path)


def _read(name: str, raw: Path, options: ReadOptions | None = None, tally: Tally | None = None) -> RawDataset:
    return DATASETS[name].read(raw, options or ReadOptions(), tally or Tally())


def _write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def _cinic(folder: Path, per_class: int) -> np.ndarray:
    """Write random PNGs; returns them in the order of reading, (n, 3, 32, 32)."""
    pixels = RNG.integers(0, 256, (len(CINIC_CLASSES), per_class, 32, 32, 3), np.uint8)
    for name, group in zip(CINIC_CLASSES, pixels, strict=True):
        for number, image in enumerate(group):
            _write_image(folder / name / f"{number}.png", image)
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _writer(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (rows, 784)), RNG.integers(0, 62, rows)


def _leaf(path: Path, writers: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    data = {name: {"x": (x / 255).tolist(), "y": y.tolist()} for name, (x, y) in writers.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return content


def _emnist(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    names = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    for part in ("train", "test"):
        stem = folder / f"emnist-{split}-{part}"
        header = struct.pack(">IIII", 2051, *images.shape)
        Path(f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">II", 2049, len(labels))
        Path(f"{stem}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))
    mapping = "".join(f"{label} {ord(name)}\n" for label, name in enumerate(names))
    (folder / f"emnist-{split}-mapping.txt").write_text(mapping)
