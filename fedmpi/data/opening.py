"""The data that a configuration names, as a shard store: a folder, data in memory, or the embedded digits.

scikit-learn's 1,797 real 8 x 8 images of digits need no preparation: Alpaydin and Kaynak, Optical Recognition of
Handwritten Digits, UCI Machine Learning Repository (CC BY 4.0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.common.errors import UserError
from fedmpi.common.registry import DIGITS, SOURCE, Chosen, in_memory, is_digits
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.arrays import arrays_of
from fedmpi.data.assignment import dirichlet_by_class, even_sizes, iid
from fedmpi.data.digits_options import DigitsOptions
from fedmpi.data.schema import DataDescription, Manifest, ShardFile
from fedmpi.data.shards import ShardStore, open_folder, shard_in_memory

CLASSES = 10
TEST_EVERY = 5


def open_digits(where: str, options: Mapping[str, Any]) -> ShardStore:
    """The embedded digits as a store, with the options written in `where` and those in `options`."""
    chosen: DigitsOptions = Chosen.read(SOURCE, {"name": where, **options}, DIGITS).make()
    x, y, test_x, test_y = load_digits_split()
    if chosen.clients > len(y):
        raise UserError(f"the embedded digits have {len(y)} training images. Ask for at most as many clients")
    generator = Streams(chosen.seed).generator(Purpose.PARTITION)
    if chosen.partition == "iid":
        rows, offsets = iid(len(y), even_sizes(len(y), chosen.clients), generator)
    else:
        rows, offsets, _ = dirichlet_by_class(y, CLASSES, chosen.clients, chosen.alpha, generator)
    x, y = np.ascontiguousarray(x[rows]), y[rows]
    x.flags.writeable = y.flags.writeable = False
    manifest = _manifest(chosen, x, y, test_x)
    described = manifest.description
    return ShardStore(manifest, [shard_in_memory(x, y, described, offsets)], shard_in_memory(test_x, test_y, described))


def load_digits_split() -> tuple[npt.NDArray[np.uint8], Ints, npt.NDArray[np.uint8], Ints]:
    """Training and test features and labels: every fifth image of a class, in the data set's order, is for testing."""
    images, labels = _images_and_labels()
    test = np.zeros(len(labels), bool)
    for label in range(CLASSES):
        test[np.flatnonzero(labels == label)[TEST_EVERY - 1 :: TEST_EVERY]] = True
    features = images.reshape(-1, 1, 8, 8).astype(np.uint8)
    return features[~test], labels[~test], features[test], labels[test]


@cache
def _images_and_labels() -> tuple[AnyArray, Ints]:
    """Pixels (1797, 64) and labels, from the file that comes with scikit-learn, which is slow to import; read once."""
    package = find_spec("sklearn")
    for folder in package.submodule_search_locations or () if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            table = np.loadtxt(file, np.uint8, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images, labels.astype(np.int64)


def _manifest(options: DigitsOptions, x: npt.NDArray[np.uint8], y: Ints, test_x: npt.NDArray[np.uint8]) -> Manifest:
    # The schema scales uint8 by 1 / 255; mean and std are on that scale though pixels end at 16.
    scaled = x / 255.0
    description = DataDescription(
        (1, 8, 8), "uint8", CLASSES, "image", 0, (round(float(scaled.mean()), 6),), (round(float(scaled.std()), 6),)
    )
    digest = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    law = {"alpha": options.alpha} if options.partition == "dirichlet" else {}
    return Manifest(
        dataset=DIGITS,
        partition=options.partition,
        partition_options=law,
        seed=options.seed,
        clients=options.clients,
        samples=len(x),
        classes=CLASSES,
        class_names=tuple(map(str, range(CLASSES))),
        description=description,
        train=(ShardFile("", x.nbytes + y.nbytes, digest, 0, options.clients, len(x)),),
        test=ShardFile("", test_x.nbytes, "", samples=len(test_x)),
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI ML Repository, 1998",
        command="embedded",
    )


def open_store(where: Any, options: Mapping[str, Any] | None = None, verify: bool = False) -> ShardStore:
    """Open the data that ``data.source`` names."""
    if is_digits(where):
        return open_digits(str(where), options or {})
    if in_memory(where):
        return arrays_of(where, options or {}).store
    if options:
        raise UserError(f"data.{next(iter(options))} has no effect on the shard folder {where}. Remove it")
    return open_folder(Path(where), verify)
