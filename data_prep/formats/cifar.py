"""CIFAR-10 and CIFAR-100: color images, 32 x 32, in the official Python pickles (Krizhevsky 2009).

Loading a pickle can run arbitrary code. The unpickler of this module resolves only NumPy arrays.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.formats.files import require
from data_prep.raw import DataSet, RawDataset, ReadOptions, Tally, not_official, rows_of
from fedmpi.common.errors import UserError, raised
from fedmpi.common.types import Ints

SHAPE = (3, 32, 32)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NAMES100 = "fbe8ad23bbaf24969898a386833b49c3aaf6ad1119d43f7b41cdea1b3416d578"
"""SHA-256 of CIFAR-100's class names, one per line."""
STATISTICS = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _byte(kind: Any, *about: Any) -> np.dtype[np.uint8]:
    """Return the only allowed array dtype: a pickle could choose the state of other dtypes, including pointers."""
    if kind not in ("u1", "|u1"):
        raise pickle.UnpicklingError(f"the type of its values is {kind}, not uint8")
    return np.dtype(np.uint8)


def _latin1(text: str, codec: str) -> bytes:
    """Return the bytes that Python 3 wrote as text in protocol 2."""
    if codec != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {codec}")
    return text.encode(codec)


_EMPTY = np.zeros(0)
ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): type(_EMPTY),
    ("numpy", "dtype"): _byte,
    ("_codecs", "encode"): _latin1,
    ("numpy.core.multiarray", "_reconstruct"): _EMPTY.__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): _EMPTY.__reduce__()[0],
}


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles arrays of bytes and plain containers, and rejects a pickle that names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names, if it is allowed."""
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not an array")
        return ADMITTED[module, name]


def load_batch(path: Path) -> dict[str, Any]:
    """Return the dictionary of one batch file, with str keys."""
    try:
        with path.open("rb") as stream:
            content = ArrayUnpickler(stream, encoding="latin1").load()
        return {key.decode("latin1") if isinstance(key, bytes) else str(key): content[key] for key in content}
    except Exception as error:  # a damaged pickle raises many kinds of errors
        raise UserError(f"{path} is not a CIFAR batch ({raised(error)}). Fetch it again") from error


def _listed(path: Path, batch: dict[str, Any], key: str, kind: type, length: int) -> list[Any]:
    """Return a list of so many labels or names of a batch."""
    values = batch.get(key)
    if type(values) is not list or len(values) != length or any(type(value) is not kind for value in values):
        raise UserError(f"{path}: {key!r} is not a list of {length} values of type {kind.__name__}. Fetch it again")
    return values


def _images(path: Path, label_key: str, classes: int) -> tuple[NDArray[np.uint8], Ints]:
    batch = load_batch(path)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise UserError(f"{path}: 'data' is {found} instead of uint8 (n, 3072). Fetch it again")
    labels = np.array(_listed(path, batch, label_key, int, len(data)), np.int64)
    if len(wrong := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise UserError(
            f"{path}, record {wrong[0]}: label {labels[wrong[0]]} is not one of the {classes} classes. Fetch it again"
        )
    return data.reshape(-1, *SHAPE), labels


def read_cifar(data_set: DataSet, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
    """Read CIFAR-10, or CIFAR-100 with its fine labels; features (3, 32, 32) uint8."""
    classes = int(data_set.classes)
    files = [f"data_batch_{number}" for number in range(1, 6)] if classes == 10 else ["train"]
    about, tested, prefix = ("batches.meta", "test_batch", "") if classes == 10 else ("meta", "test", "fine_")
    train = [require(raw, (name,), data_set.files) for name in files]
    meta = require(raw, (about,), data_set.files)
    names = tuple(_listed(meta, load_batch(meta), f"{prefix}label_names", str, classes))
    parts = [_images(path, f"{prefix}labels", classes) for path in train]
    test = _images(require(raw, (tested,), data_set.files), f"{prefix}labels", classes)
    labels = np.concatenate([some for _, some in parts])
    mean, std = STATISTICS[classes]
    read = rows_of(*(images for images, _ in (*parts, test)))
    data = data_set.images(names, read, labels, test[1], mean=mean, std=std)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    official = names == CLASSES if classes == 10 else digest == NAMES100
    return data if official else not_official(data, tally)
