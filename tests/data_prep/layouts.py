"""Small synthetic files in the layout of published data sets, for checks that need no real rows."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.formats.cifar import CLASSES

RNG = np.random.default_rng(11)


def class_folders(folder: Path, per_class: int) -> np.ndarray:
    """CINIC-10's pictures of random pixels, in the order of reading, (n, 3, 32, 32)."""
    pixels = RNG.integers(0, 256, (len(CLASSES), per_class, 32, 32, 3), np.uint8)
    for name, group in zip(CLASSES, pixels, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(group):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def idx(values: np.ndarray) -> bytes:
    """The content of an idx file of unsigned bytes."""
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def mnist(folder: Path, classes: int, first: int) -> None:
    """The four idx files of another data set under MNIST's names."""
    for part, rows in (("train", 120), ("t10k", 60)):
        pixels = np.random.default_rng(rows).integers(0, 100, (rows, 28, 28), np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(pixels))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(first + np.arange(rows) % classes))


def emnist_files(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """The files of a split; both parts are the same."""
    for part in ("train", "test"):
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"emnist-{split}-{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(values)))
    names = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    mapping = "".join(f"{label} {ord(name)}\n" for label, name in enumerate(names))
    (folder / f"emnist-{split}-mapping.txt").write_text(mapping)


def cifar10(folder: Path) -> None:
    """The batches, as pickles."""
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = {"data": RNG.integers(0, 256, (10, 3072), np.uint8), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(rows, 2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"c{label}" for label in range(10)]}, 2))


def leaf(folder: Path, part: str, users: dict[str, tuple[Any, Any]], packed: bool = False) -> Path:
    """A file as LEAF's scripts write it."""
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path = folder / "data" / part / f"all_data_niid_0_keep_0_{part}_9.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)
    return path
