"""Image folders as users have them: customary parts, stray folders and files, EXIF, transparency."""

from __future__ import annotations

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


PARTS = {
    "Train Test": "",
    "train Validation": "(Validation) is the test part",
    "train test val": "(val) is left alone",
    "seg_train seg_test seg_pred": "",
    "train2017 val2017": "(val2017) is the test part",
    "archive/data/TrainSet archive/data/Val": "(Val) is the test part",
    "seg_train/seg_train seg_test/seg_test": "seg_train/seg_train",
    "train test __MACOSX .cache": "",
    "train-1 train-2 test": "several folders are one part (train)",
    "MRITrain MRITest": "",
}


@pytest.mark.parametrize("layout", PARTS)
def test_customary_parts_are_known_in_any_case(layout: str, tmp_path: Path) -> None:
    folders = layout.split()
    for number, folder in enumerate(folders):
        classes(tmp_path / "raw" / folder, each=EACH if number < 1 else 3, first=100 * min(number, 1))
    if layout.startswith("archive/"):
        image(tmp_path / "raw" / "preview.png", 255)
    store = prepared(tmp_path / "raw", tmp_path / "s")
    said = " ".join(store.manifest.notes)
    assert store.manifest.class_names == ("cats", "dogs")
    assert (store.samples, len(store.test()[1])) == (2 * EACH + 6 * ("train-2" in layout), 6)
    assert PARTS[layout] in said and ("several folders" in said) == ("train-2" in layout)


def test_classes_may_have_the_names_of_parts(tmp_path: Path) -> None:
    for names in (("bus", "car", "train"), ("test_negative", "test_positive")):
        classes(tmp_path / names[0], names)
        store = prepared(tmp_path / names[0], tmp_path / f"{names[0]}-s")
        assert store.manifest.class_names == names and len(values(store)) == len(names) * EACH


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ((".",), ("in class folders", "Put the images of each class")),
        (("train", "test1"), ()),
        (("val/cats", "test/cats"), ("Name one of them train",)),
        (("train/cats", "train/dogs", "test/cats", "test/Dogs"), ("'Dogs'", "(cats, dogs)")),
    ],
)
def test_folders_without_classes_to_train_on_are_rejected(
    folders: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, capsys: Output
) -> None:
    for number, folder in enumerate(folders):
        image(tmp_path / "raw" / folder / "0.png", number)
    command = ["imagefolder", "--raw", str(tmp_path / "raw"), "--partition", "iid", "--clients", "2"]
    code = main([*command, "--out", str(tmp_path / "s")])
    said = capsys.readouterr()
    assert code == 2 and all(word in said.err for word in words) and not (tmp_path / "s").exists()


def test_a_test_part_without_classes_and_other_folders_are_left_out(tmp_path: Path, capsys: Output) -> None:
    classes(tmp_path / "train")
    classes(tmp_path / "val", each=3, first=100)
    for folder in ("test", "figures"):
        image(tmp_path / folder / "0.png", 255)
    store = prepared(tmp_path, tmp_path / "s")
    said = shown(capsys)
    assert (store.samples, len(store.test()[1])) == (2 * EACH, 6) and max(values(store)) < 200
    assert "the validation part (val) is the test part" in said and "test (no class folders in it)" in said
    assert "figures (its name means no part)" in said


def test_one_class_alone_and_unreadable_images_are_reported(tmp_path: Path, capsys: Output) -> None:
    classes(tmp_path / "raw", ("images",))
    image(tmp_path / "raw" / "scans" / "0.tif", np.zeros((4, 4), np.float32))
    image(tmp_path / "raw" / "scans" / "1.png", np.zeros((4, 4), np.uint16))
    (tmp_path / "raw" / "scans" / "2.png").write_bytes(b"cut short")
    store = prepared(tmp_path / "raw", tmp_path / "s")
    said = shown(capsys)
    assert store.manifest.class_names == ("images",) and "all images are of one class (images)" in said
    assert store.manifest.skipped == 3 and "more than 8 bits" in said and "scans (no readable image in it)" in said


STRAY = [
    "cats/.ipynb_checkpoints/0-checkpoint.png",
    "cats/__MACOSX/a.png",
    "dogs/@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg",
    "dogs/._0.png",
    "__MACOSX/cats/._0.png",
    ".thumbnails/a.png",
    "#recycle/a.png",
]


def test_folders_of_tools_contain_no_samples_and_other_files_are_counted(tmp_path: Path, capsys: Output) -> None:
    for number, part in enumerate(("train", "test")):
        classes(tmp_path / "raw" / part, first=100 * number)
        for path in STRAY:
            image(tmp_path / "raw" / part / path, 255)
    for name in ("notes.txt", "more.TXT", "x.npy", "LICENSE"):
        (tmp_path / "raw" / "train" / "dogs" / name).write_text("no image here")
    (tmp_path / "raw" / "train" / "models").mkdir()
    image(tmp_path / "raw" / "train" / "sample.png", 200)
    for name, kind in (("a.jfif", "JPEG"), ("b.PGM", "PPM"), ("e.jp2", "JPEG2000")):
        image(tmp_path / "raw" / "train" / "cats" / name, 255, format=kind)
    image(tmp_path / "raw" / "train" / "0.png", 200)
    store = prepared(tmp_path / "raw", tmp_path / "s", "--strict")
    assert store.manifest.class_names == ("cats", "dogs") and store.manifest.skipped == 0
    assert len(values(store)) == 4 * EACH + 3 and values(store).count(255) == 3
    said = shown(capsys)
    assert "1 .npy, 2 .txt, 1 without an ending" in said and "2 image(s) directly in train" in said


def test_linked_folders_are_followed_once_and_never_up(tmp_path: Path) -> None:
    classes(tmp_path / "raw", ("cats",))
    classes(tmp_path / "elsewhere", ("dogs",), first=100)
    (tmp_path / "raw" / "dogs").mkdir()
    for link in ("first", "again"):
        (tmp_path / "raw" / "dogs" / link).symlink_to(tmp_path / "elsewhere" / "dogs")
    (tmp_path / "raw" / "cats" / "up").symlink_to(tmp_path / "raw")
    store = prepared(tmp_path / "raw", tmp_path / "s")
    assert values(store) == sorted([*range(EACH), *range(100, 100 + EACH)])


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_images_are_turned_upright(ending: str, tmp_path: Path) -> None:
    stored, exif = np.arange(12, dtype=np.uint8).reshape(4, 3) * 20, Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    for part in ("train", "test"):
        image(tmp_path / "raw" / part / "a" / f"0.{ending}", stored, exif=exif)
    store = prepared(tmp_path / "raw", tmp_path / "s", "--clients", "1")
    assert store.test()[0][0, 0].tolist() == np.rot90(stored, -1).tolist()


def test_images_are_gray_if_none_has_colors_white_where_transparent_and_resized_if_asked(
    tmp_path: Path, capsys: Output
) -> None:
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[:2] = 10, 20, 30, 255
    for number in range(6):
        image(tmp_path / "raw" / "ab"[number % 2] / f"{number}.png", clear if number == 0 else 7)
    store = prepared(tmp_path / "raw", tmp_path / "s")
    x = np.concatenate([store.client(0)[0], store.client(1)[0], store.test()[0]])
    assert x.shape[1:] == (3, 4, 4)
    [one] = [pixels for pixels in x if pixels[0, 0, 0] == 10]
    assert one[:, 0, 0].tolist() == [10, 20, 30] and (one[:, 2:] == 255).all()
    (tmp_path / "raw" / "a" / "0.png").unlink()
    assert prepared(tmp_path / "raw", tmp_path / "g").description.feature_shape == (1, 4, 4)
    image(tmp_path / "raw" / "a" / "1.png", np.zeros((6, 8), np.uint8))
    with pytest.raises(AssertionError):
        prepared(tmp_path / "raw", tmp_path / "t")
    assert (
        "images of 2 sizes (5 of 4 x 4, 1 of 8 x 6); resize all, e.g. with --image-size 4x4" in capsys.readouterr().err
    )
    assert prepared(tmp_path / "raw", tmp_path / "t", "--image-size", "5x3").description.feature_shape == (1, 3, 5)
