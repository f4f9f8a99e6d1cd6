"""Make idx files of EMNIST from smaller public files, where the official archive cannot be had.

    git clone https://github.com/jeffreynghm/emnist_image_generator_predictor raw/emnist-small     # commit 731bd1e
    git clone https://github.com/0r4nd/emnist-packed raw/emnist-packed                             # commit 0f121ef
    python -m jobs.experiments.emnist_files balanced raw/emnist-small/dataset/emnist-balanced-small.mat raw/emnist
    python -m jobs.experiments.emnist_files letters raw/emnist raw/emnist-letters
    python -m jobs.experiments.emnist_files bymerge raw/emnist raw/emnist-bymerge --packed raw/emnist-packed

`balanced`: the first 2,000 training and test images of the official split.
`letters`: the letters of these, both cases as one class, labels 1 to 26 as in the official split.
`bymerge`: 127,563 different images, from the official test part and from the last 9,120 training images of balanced
(lossless pictures; Pillow reads them), then those of balanced. The first 100 of each class are the test part.
"""

from __future__ import annotations

import argparse
import gzip
import json
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat

from data_prep.formats.files import require
from data_prep.formats.idx import read_idx

BYMERGE = string.digits + string.ascii_uppercase + "abdefghnqrt"
"""Characters of the 47 classes of balanced and bymerge."""
TEST_PER_CLASS = 100
Bytes = NDArray[np.uint8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", choices=("balanced", "letters", "bymerge"))
    parser.add_argument("source", type=Path, help="balanced: the .mat file; else the folder of emnist-balanced-*")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--packed", type=Path, help="bymerge: clone of github.com/0r4nd/emnist-packed")
    given = parser.parse_args()
    if given.split == "bymerge" and given.packed is None:
        parser.error("bymerge needs --packed")
    given.out.mkdir(parents=True, exist_ok=True)
    {"balanced": balanced, "letters": letters, "bymerge": bymerge}[given.split](given)


def balanced(given: argparse.Namespace) -> None:
    data = loadmat(given.source)["dataset"][0, 0]
    for part in ("train", "test"):
        rows = data[part][0, 0]
        write(given.out, "balanced", part, rows["images"].reshape(-1, 28, 28), rows["labels"].ravel())
    mapping(given.out, "balanced", [(label, one) for label, one in enumerate(BYMERGE)])


def bymerge(given: argparse.Namespace) -> None:
    parts = [*packed(given.packed / "emnist-bymerge", "test"), *packed(given.packed / "emnist-balanced", "train")]
    parts += [official(given.source, part) for part in ("train", "test")]
    labels = np.concatenate([y for _, y in parts])
    images = np.concatenate([x for x, _ in parts])
    _, first = np.unique(images.reshape(len(images), -1), axis=0, return_index=True)
    keep = np.sort(first)
    images, labels = images[keep], labels[keep]
    tested = np.sort(np.concatenate([np.flatnonzero(labels == one)[:TEST_PER_CLASS] for one in range(len(BYMERGE))]))
    trained = np.setdiff1d(np.arange(len(labels)), tested)
    write(given.out, "bymerge", "train", images[trained], labels[trained])
    write(given.out, "bymerge", "test", images[tested], labels[tested])
    mapping(given.out, "bymerge", [(label, one) for label, one in enumerate(BYMERGE)])
    print(f"{len(trained)} + {len(tested)} images")


def letters(given: argparse.Namespace) -> None:
    merged = np.array([string.ascii_uppercase.find(one.upper()) + 1 for one in BYMERGE], np.uint8)  # 0: a digit
    for part in ("train", "test"):
        images, labels = official(given.source, part)
        rows = merged[labels] > 0
        write(given.out, "letters", part, images[rows], merged[labels[rows]])
    mapping(given.out, "letters", [(n, one + one.lower()) for n, one in enumerate(string.ascii_uppercase, 1)])


def packed(folder: Path, part: str) -> Iterator[tuple[Bytes, Bytes]]:
    """Images (n, 28, 28), transposed as in the official files, and labels of each picture that is there."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    facts = json.loads((folder / f"{part}.json").read_text())
    for name in facts["files"]:
        first, last = (int(word) for word in Path(name).stem.split("_") if word.isdigit())
        if (folder / name).is_file() and (part == "test" or last == len(facts["id"]) - 1):
            sheet = np.asarray(Image.open(folder / name).convert("L"))
            tiles = sheet.reshape(sheet.shape[0] // 28, 28, sheet.shape[1] // 28, 28).transpose(0, 2, 3, 1)
            labels = np.array(facts["id"][first : last + 1], np.uint8)
            yield tiles.reshape(-1, 28, 28)[: len(labels)], labels


def official(folder: Path, part: str) -> tuple[Bytes, Bytes]:
    kinds = (("images-idx3", 3), ("labels-idx1", 1))
    names = [(require(folder, (f"emnist-balanced-{part}-{kind}-ubyte.gz",), "the .gz files"), n) for kind, n in kinds]
    images, labels = (np.asarray(read_idx(*each)) for each in names)
    return images, labels


def mapping(folder: Path, split: str, classes: list[tuple[int, str]]) -> None:
    lines = [" ".join(map(str, (label, *map(ord, characters)))) for label, characters in classes]
    (folder / f"emnist-{split}-mapping.txt").write_text("\n".join(lines) + "\n")


def write(folder: Path, split: str, part: str, images: Bytes, labels: Bytes) -> None:
    for name, values in (("images-idx3", images), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        path = folder / f"emnist-{split}-{part}-{name}-ubyte.gz"
        path.write_bytes(gzip.compress(head + values.tobytes(), mtime=0))


if __name__ == "__main__":
    main()
