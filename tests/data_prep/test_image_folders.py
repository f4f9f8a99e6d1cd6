"""Image folders as users have them: customary parts, stray folders and files, EXIF, 16 bits, transparency."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from tests.data_prep.command import main

Output = pytest.CaptureFixture[str]
EACH = 10


def image(path: Path, value: int | np.ndarray = 0, **saved: object) -> None:
    """Write an image of 4 x 4 pixels of one value, or of the given ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((4, 4), value, np.uint8) if isinstance(value, int) else value
    Image.fromarray(pixels).save(path, **saved)  # type: ignore[arg-type]


def classes(folder: Path, names: tuple[str, ...] = ("cats", "dogs"), each: int = EACH, first: int = 0) -> None:
    """Class folders of images of different values each."""
    for label, name in enumerate(names):
        for number in range(each):
            image(folder / name / f"{number}.png", first + 2 * EACH * label + number)


def prepared(raw: Path, out: Path, *words: str) -> ShardStore:
    """The shards of an image folder."""
    command = ["imagefolder", "--raw", str(raw), "--partition", "iid", "--clients", "2", "--out", str(out), *words]
    assert main(command) == 0
    return open_store(out)


def values(store: ShardStore) -> list[int]:
    """The value of the first pixel of all samples of both parts, sorted."""
    parts = [*(store.client(client)[0] for client in range(store.clients)), store.test()[0]]
    return sorted(int(x[0, 0, 0]) for part in parts for x in np.asarray(part))


def shown(capsys: Output) -> str:
    """Return the printed words without the lines of tables and the ends of lines."""
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def refused(raw: Path, out: Path, capsys: Output, *more: str) -> str:
    """The sentence with which an image folder is rejected."""
    words = ["imagefolder", "--raw", str(raw), "--partition", "iid", "--clients", "2", "--out", str(out), *more]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not out.exists()
    return said


PARTS = {
    "Train Test": "",
    "training testing": "",
    "train val": "(val) is the test part",
    "Train Validation": "(Validation) is the test part",
    "train test val": "(val) is left alone",
    "seg_train seg_test seg_pred": "",
    "train2017 val2017": "(val2017) is the test part",
    "TrainSet TestSet": "",
    "images/train images/test": "images",
    "archive/data/Train archive/data/Val": "(Val) is the test part",
    "seg_train/seg_train seg_test/seg_test": "seg_train/seg_train",
    "train test __MACOSX .cache": "",
    "train-1 train-2 test": "several folders are one part (train)",
    "MRITrain MRITest": "",
}


@pytest.mark.parametrize("layout", PARTS)
def test_customary_parts_are_known_in_any_case(layout: str, tmp_path: Path, capsys: Output) -> None:
    folders = layout.split()
    for number, folder in enumerate(folders):
        classes(tmp_path / "raw" / folder, each=EACH if number < 1 else 3, first=100 * min(number, 1))
    if layout.startswith(("images/", "archive/")):
        image(tmp_path / "raw" / "preview.png", 255)
    store = prepared(tmp_path / "raw", tmp_path / "s")
    said = shown(capsys)
    assert store.manifest.class_names == ("cats", "dogs")
    assert (store.samples, len(store.test()[1])) == (2 * EACH + 6 * ("train-2" in layout), 6)
    assert PARTS[layout] in said and "16 bits" not in said
    assert ("several folders" in said) == ("train-2" in layout) and "frames" not in said


def test_a_class_may_have_the_name_of_a_component(tmp_path: Path) -> None:
    classes(tmp_path / "raw", ("bus", "car", "train"))
    (tmp_path / "raw" / "train" / "old").mkdir()
    (tmp_path / "raw" / "train" / "0.png").rename(tmp_path / "raw" / "train" / "old" / "0.png")
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert store.manifest.class_names == ("bus", "car", "train") and len(values(store)) == 3 * EACH


def test_images_of_classes_may_be_in_one_sub_folder_each(tmp_path: Path) -> None:
    classes(tmp_path / "raw", ("cats/images", "dogs/images"))
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert store.manifest.class_names == ("cats", "dogs") and len(values(store)) == 2 * EACH


REJECTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "parts in classes": (("cats/train", "cats/test", "dogs/train", "dogs/test"), ("Point --raw at", "train/cats")),
    "one part in classes": (("cats/train", "dogs/train"), ("train/cats", "ambiguous")),
    "domains": (("photo/cat", "photo/dog", "sketch/cat", "sketch/dog"), ("ambiguous", "Point --raw at")),
    "one set of several": (("faces/train/a", "faces/test/a", "notes/b"), ("Point --raw at", "faces")),
    "no training part": (("val/cats", "test/cats"), ("no training part", "Name a folder train")),
    "classes with part words": (("test_positive", "test_negative"), ("classes names",)),
    "classes with words for training": (("freight train", "passenger train"), ("classes names",)),
    "patients": (("p1/benign", "p1/malignant", "p2/benign", "p2/malignant"), ("put the images of each class",)),
    "another class": (
        ("train/cats", "train/dogs", "test/cats", "test/Dogs"),
        ("'Dogs'", "(cats, dogs)", "or remove it"),
    ),
    "no classes": (("train", "test1"), ("(train, test1) without class folders", "Put the images of each class")),
    "root too low": ((".",), ("in class folders", "Put the images of each class")),
    "test without classes": (("train/cats", "train/dogs", "test"), ("point --raw at",)),
    "no other part": (("train/cats", "train/dogs", "extra/x"), ("extra",)),
}


@pytest.mark.parametrize("case", REJECTED)
def test_folders_that_may_mean_something_else_are_rejected_with_the_remedy(
    case: str, tmp_path: Path, capsys: Output
) -> None:
    folders, words = REJECTED[case]
    for number, folder in enumerate(folders):
        image(tmp_path / "raw" / folder / "0.png", number)
    said = refused(tmp_path / "raw", tmp_path / "s", capsys)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("bare", ["test", "validation"])
def test_a_test_part_without_labels_is_left_out_beside_one_that_has_them(
    bare: str, tmp_path: Path, capsys: Output
) -> None:
    classes(tmp_path / "train")
    classes(tmp_path / "val", each=3, first=100)
    for number in range(3):
        image(tmp_path / bare / f"{number}.png", 200 + number)
    image(tmp_path / "figures" / "0.png", 255)
    store = prepared(tmp_path, tmp_path / "s")
    said = shown(capsys)
    assert (store.samples, len(store.test()[1])) == (2 * EACH, 6) and max(values(store)) < 200
    assert "the validation part (val) is the test part" in said and f"{bare} (no class folders in it)" in said


def test_patients_in_folders_of_their_class_are_held_out_whole(tmp_path: Path, capsys: Output) -> None:
    patients = [f"{name}/{name[0]}{number}" for name in ("benign", "malignant") for number in range(5)]
    for number, patient in enumerate(patients):
        classes(tmp_path / "raw", (patient,), each=4, first=4 * number)
    prepared(tmp_path / "raw", tmp_path / "rows")
    said = shown(capsys)
    tested = {int(value) // 4 for value in np.asarray(open_store(tmp_path / "rows").test()[0])[:, 0, 0, 0]}
    assert f"{len(tested)} of its {len(tested)} folders also have training samples; --split folders keeps" in said
    for words in (("--split", "folders"), ("--split", "folders", "--val", "0.3")):
        store = prepared(tmp_path / "raw", tmp_path / "-".join(words), *words)
        tested = np.asarray(store.test()[0])[:, 0, 0, 0]
        assert "also have training samples" not in shown(capsys)
        assert np.bincount(store.test()[1]).tolist() == [4, 4] and len(np.unique(tested // 4)) == 2


@pytest.mark.parametrize(
    ("folders", "split", "words"),
    [
        (("cats", "dogs"), "folders", "needs every image in one of several folders below its class"),
        (("cats/a", "dogs/b", "dogs"), "folders", "Choose rows"),
        (("cats/images", "dogs/images"), "folders", "Choose rows"),
        (("cats/a", "dogs/b"), "users", "Choose rows, or folders"),
        (("cats/a", "dogs/b"), "patient", "--split patient is unknown for image folders"),
        (("train/cats/a", "train/cats/b", "test/cats/a"), "folders", "has a test part"),
    ],
)
def test_splits_that_folders_do_not_have_are_rejected(
    folders: tuple[str, ...], split: str, words: str, tmp_path: Path, capsys: Output
) -> None:
    classes(tmp_path / "raw", folders, each=2)
    assert words in refused(tmp_path / "raw", tmp_path / "s", capsys, "--split", split)


def test_one_class_alone_and_classes_without_a_readable_image_are_said(tmp_path: Path, capsys: Output) -> None:
    classes(tmp_path / "raw", ("images",))
    (tmp_path / "raw" / "scans").mkdir()
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "raw" / "scans" / "0.tif")
    store = prepared(tmp_path / "raw", tmp_path / "s")
    said = shown(capsys)
    assert store.manifest.class_names == ("images",) and "all images are of one class (images)" in said
    assert "scans (no readable image in it)" in said and "pixels of 32 bits" in said


def test_the_reason_is_said_where_no_image_can_be_read(tmp_path: Path, capsys: Output) -> None:
    for name in ("a", "b"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tmp_path / "raw" / name / "0.heic").write_bytes(b"ftypheic")
    assert "2 .heic" in refused(tmp_path / "raw", tmp_path / "s", capsys)
    (tmp_path / "raw" / "a" / "1.png").write_bytes(b"cut short")
    assert "a/1.png: not a readable image" in refused(tmp_path / "raw", tmp_path / "s", capsys)


STRAY = [
    "cats/.ipynb_checkpoints/0-checkpoint.png",
    "cats/__MACOSX/a.png",
    "cats/.thumbnails/large/a.png",
    "dogs/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg",
    "dogs/._0.png",
    ".ipynb_checkpoints/a.png",
    "__MACOSX/cats/._0.png",
    ".thumbnails/a.png",
    "@eaDir/a.png",
    "#recycle/a.png",
    "$RECYCLE.BIN/a.png",
]


@pytest.mark.parametrize("parts", [(), ("train", "test")])
def test_folders_of_tools_contain_no_samples_and_are_no_classes(parts: tuple[str, ...], tmp_path: Path) -> None:
    for number, part in enumerate(parts or ("",)):
        classes(tmp_path / "raw" / part, first=100 * number)
        for path in STRAY:
            image(tmp_path / "raw" / part / path, 255)
        (tmp_path / "raw" / part / "cats" / "._1.png").write_bytes(b"\0\5\26\7Mac OS X")
    store = prepared(tmp_path / "raw", tmp_path / "s", "--strict")
    assert store.manifest.class_names == ("cats", "dogs") and store.manifest.skipped == 0
    assert len(values(store)) == 2 * EACH * max(1, len(parts)) and 255 not in values(store)


def test_linked_folders_are_followed_once_and_never_up(tmp_path: Path) -> None:
    classes(tmp_path / "raw", ("cats",))
    classes(tmp_path / "elsewhere", ("dogs",), first=100)
    (tmp_path / "raw" / "dogs").mkdir()
    os.symlink(tmp_path / "elsewhere" / "dogs", tmp_path / "raw" / "dogs" / "first")
    os.symlink(tmp_path / "elsewhere" / "dogs", tmp_path / "raw" / "dogs" / "again")
    os.symlink(tmp_path / "raw" / "cats", tmp_path / "raw" / "cats" / "self")
    os.symlink(tmp_path / "raw", tmp_path / "raw" / "cats" / "up")
    os.symlink(tmp_path / "elsewhere" / "dogs", tmp_path / "raw" / "wolves")
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert store.manifest.class_names == ("cats", "dogs", "wolves")
    assert values(store) == sorted([*range(EACH), *range(100, 100 + EACH), *range(100, 100 + EACH)])


def test_images_are_known_by_content_and_other_files_are_counted(tmp_path: Path, capsys: Output) -> None:
    classes(tmp_path / "raw")
    for number, name in enumerate(("a.jfif", "b.PGM", "c", "d.png.1", "e.jp2")):
        kind = {"a.jfif": "JPEG", "b.PGM": "PPM", "e.jp2": "JPEG2000"}.get(name, "PNG")
        image(tmp_path / "raw" / "cats" / name, 101 + number, format=kind)
    for name in ("notes.txt", "more.TXT", "x.npy", "LICENSE"):
        (tmp_path / "raw" / "dogs" / name).write_text("P5 is no image here")
    (tmp_path / "raw" / "models").mkdir()
    (tmp_path / "raw" / "models" / "net.pt").write_bytes(b"weights")
    image(tmp_path / "raw" / "sample.png", 200)
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert store.manifest.class_names == ("cats", "dogs")
    assert [value for value in values(store) if value > 100] == [101, 102, 103, 104, 105]
    said = shown(capsys)
    assert "1 .npy, 1 .pt, 2 .txt, 1 without an ending" in said
    assert "1 image(s) directly in raw" in said and "models" in said


TURNED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).T,
    8: np.rot90,
}


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
def test_images_are_turned_upright(ending: str, tmp_path: Path, capsys: Output) -> None:
    stored = np.arange(9, dtype=np.uint8).reshape(3, 3) * 25
    for orientation in TURNED:
        exif = Image.Exif()
        exif[0x0112] = orientation
        lossless = {"lossless": True} if ending == "webp" else {}
        for part in ("train", "test"):
            image(tmp_path / "raw" / part / str(orientation) / f"0.{ending}", stored, exif=exif, **lossless)
    x, labels = prepared(tmp_path / "raw", tmp_path / "s").test()
    for pixels, orientation in zip(np.asarray(x)[:, 0], np.asarray(labels) + 1, strict=True):
        assert pixels.tolist() == TURNED[orientation](stored).tolist(), orientation
    assert ("14 images were turned upright" in shown(capsys)) == (ending != "tif")


@pytest.mark.parametrize(
    ("bits", "ending"),
    [(8, "png"), (12, "png"), (12, "tif"), (12, "pgm"), (16, "png")],
)
def test_grey_of_16_bits_is_scaled_by_the_bits_that_are_used(
    bits: int, ending: str, tmp_path: Path, capsys: Output
) -> None:
    ramp = np.linspace(0, 2**bits - 1, 256).round().astype(np.uint16).reshape(16, 16)
    for part in ("train", "test"):
        image(tmp_path / "raw" / part / "a" / f"1.{ending}", ramp)
        image(tmp_path / "raw" / part / "b" / f"2.{ending}", np.minimum(ramp, 2**bits // 2))
    store = prepared(tmp_path / "raw", tmp_path / "s", "--clients", "1")
    scaled = np.rint(ramp / ((2**bits - 1) / 255)).astype(int)
    assert np.asarray(store.test()[0])[0, 0].tolist() == scaled.tolist() and len(np.unique(scaled)) == 256
    said = capsys.readouterr().out
    assert (f"use {bits} bits" in said) == (bits < 16) and "larger values" not in said


def test_values_of_the_test_part_beyond_the_bits_of_training_are_said(tmp_path: Path, capsys: Output) -> None:
    for part, white in (("train", 4095), ("test", 4096)):
        for name in ("a", "b"):
            image(tmp_path / "raw" / part / name / "0.png", np.full((4, 4), white - (name == "b"), np.uint16))
    assert np.asarray(prepared(tmp_path / "raw", tmp_path / "s").test()[0]).min() == 255
    assert "1 images of the test part have larger values, which become 255" in shown(capsys)


def test_pixels_that_are_dropped_are_said(tmp_path: Path, capsys: Output) -> None:
    classes(tmp_path / "raw", ("cats",))
    frames = [Image.new("L", (4, 4), value) for value in (101, 102)]
    for name in ("1.gif", "2.tif", "3.png"):
        frames[0].save(tmp_path / "raw" / "cats" / name, save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "raw" / "cats" / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    deep = struct.pack(">2I5B", 4, 4, 16, 2, 0, 0, 0)
    data = zlib.compress((b"\0" + b"\x80\x01" * 12) * 4)
    chunks = ((b"IHDR", deep), (b"IDAT", data), (b"IEND", b""))
    parts = (struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks)
    (tmp_path / "raw" / "cats" / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert [value for value in values(store) if value > 100] == [101, 101, 101, 101, 128]
    said = shown(capsys)
    assert "3 images have several frames or pages" in said and "1 images have 16 bits and colors" in said


def _rgba(alpha: int, color: int) -> np.ndarray:
    return np.full((4, 4, 4), (color, color, color, alpha), np.uint8)


TRANSPARENT: dict[str, tuple[Image.Image, dict[str, object], int]] = {
    "clear black": (Image.fromarray(_rgba(0, 0)), {}, 255),
    "half": (Image.fromarray(_rgba(51, 0)), {}, 204),
    "color key": (Image.new("RGB", (4, 4), (1, 2, 3)), {"transparency": (1, 2, 3)}, 255),
    "palette": (Image.new("P", (4, 4), 3), {"transparency": 3}, 255),
    "opaque palette": (Image.new("P", (4, 4), 3), {}, 3),
}


@pytest.mark.parametrize("case", TRANSPARENT)
def test_transparent_pixels_are_white(case: str, tmp_path: Path, capsys: Output) -> None:
    picture, saved, white = TRANSPARENT[case]
    if picture.mode == "P":
        picture.putpalette([level for level in range(256) for _ in range(3)])
    for number in range(5):
        path = tmp_path / "raw" / "a" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, **saved)  # type: ignore[arg-type]
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert set(np.asarray(store.test()[0]).ravel().tolist()) == {white}
    assert ("transparent pixels are white" in capsys.readouterr().out) == (case != "opaque palette")
    grey = case in ("palette", "opaque palette")
    assert store.description.feature_shape == (1 if grey else 3, 4, 4)
