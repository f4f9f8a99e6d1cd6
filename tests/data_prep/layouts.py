"""Small synthetic files in the layout of published data sets, for checks that need no real rows."""

from __future__ import annotations

import gzip
import json
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


def emnist_files(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    """The files of a split; both parts are the same."""
    for part in ("train", "test"):
        for kind, values, head in (("images-idx3", images, 2051), ("labels-idx1", labels, 2049)):
            header = struct.pack(f">{1 + values.ndim}I", head, *values.shape)
            path = folder / f"emnist-{split}-{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + values.tobytes()))
    names = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    mapping = "".join(f"{label} {ord(name)}\n" for label, name in enumerate(names))
    (folder / f"emnist-{split}-mapping.txt").write_text(mapping)


def leaf(folder: Path, part: str, users: dict[str, tuple[Any, Any]], packed: bool = False) -> Path:
    """A file as LEAF's scripts write it."""
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    content = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    (folder / "data" / part).mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path = folder / "data" / part / f"all_data_niid_0_keep_0_{part}_9.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)
    return path
