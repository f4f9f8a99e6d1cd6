"""The embedded data set: scikit-learn's 1,797 real 8 x 8 images of digits, as a shard store that needs no preparation.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (CC BY 4.0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmpi.common.data_choices import DIGITS
from fedmpi.common.errors import UserError
from fedmpi.common.registry import register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.arrays import ArrayShard
from fedmpi.data.assignment import Rows, dirichlet_by_class, even_sizes, iid
from fedmpi.data.schema import DataDescription, Manifest, ShardFile
from fedmpi.data.shards import ShardStore


@register("data source", name=DIGITS)
@dataclass(frozen=True, kw_only=True)
class DigitsOptions:
    """The 1,797 handwritten digits that come with scikit-learn, given to clients; no file is needed.

    `data.shards` may also name a folder that `python -m data_prep` wrote. Options may be written in the name as well,
    "digits:clients=50,partition=iid".

    Parameters
    ----------
    clients : int
        N, at most the 1,442 training images.
    partition : {"dirichlet", "iid"}
        Dirichlet(alpha) shares of the clients for every class, or equal random parts.
    alpha : float
        Concentration of the Dirichlet law; the default is mildly heterogeneous.
    seed : int
        Seed of the partition, independent of a run's seed.
    """

    clients: int = 20
    partition: Literal["dirichlet", "iid"] = "dirichlet"
    alpha: float = 1.0
    seed: int = 0


def parse_options(where: str, options: Mapping[str, Any]) -> DigitsOptions:
    """The options in ``"digits:clients=50,partition=iid"`` and those in `options`, checked; raises `UserError`."""
    written = where.split(":", 1)[1] if ":" in where else ""
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in written.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"{item!r} in data.shards = {where!r} is not key=value: write e.g. digits:clients=50")
        given[key.strip()] = value.strip()
    for key in given.keys() & options.keys():
        raise UserError(
            f"data.shards = {where!r} and data.{key} = {options[key]!r} say the same in two ways. Keep one of them"
        )
    given.update(options)
    kinds: dict[str, Callable[[Any], Any]] = {key: type(value) for key, value in asdict(DigitsOptions()).items()}
    values = {}
    for key, value in given.items():
        if key not in kinds:
            close = get_close_matches(key, kinds, n=1)
            hint = f"did you mean {close[0]}?" if close else f"they are {', '.join(kinds)}"
            raise UserError(f"the embedded digits have no option {key!r} (data.shards = {where!r}): {hint}")
        try:
            values[key] = kinds[key](value)
        except (TypeError, ValueError):
            raise UserError(f"{key} = {value!r} of the embedded digits is not a number") from None
    return _checked(DigitsOptions(**values), where)


def _checked(options: DigitsOptions, where: str) -> DigitsOptions:
    context = f"of the embedded digits (data.shards = {where!r})"
    if options.partition not in ("dirichlet", "iid"):
        raise UserError(f"partition = {options.partition!r} {context} is unknown: choose dirichlet or iid")
    if options.clients < 1:
        raise UserError(f"clients = {options.clients} {context} is impossible: ask for at least one")
    if not 1e-3 <= options.alpha <= 1e6:
        raise UserError(f"alpha = {options.alpha} {context} is impossible: choose a number from 0.001 to 1000000")
    if not 0 <= options.seed < 2**64:
        raise UserError(f"seed = {options.seed} {context} is impossible: choose a number from 0 to 2**64 - 1")
    return options


CLASSES = 10
TEST_EVERY = 5
LEVELS = 16  # pixel values are 0 ... 16


def open_digits(where: str = DIGITS, options: Mapping[str, Any] | None = None) -> ShardStore:
    """The embedded digits as a store; `options` count over those written in `where`."""
    chosen = parse_options(where, options or {})
    x, y, test_x, test_y = load_digits_split()
    rows, offsets = _draw(chosen, y)
    x, y = np.ascontiguousarray(x[rows]), y[rows]
    x.flags.writeable = y.flags.writeable = False
    manifest = _manifest(chosen, x, y, test_x)
    return ShardStore(manifest, [ArrayShard(x, y, offsets, manifest.description)], {"test": (test_x, test_y)})


def load_digits_split() -> tuple[npt.NDArray[np.uint8], Ints, npt.NDArray[np.uint8], Ints]:
    """Training and test features and labels: every fifth image of a class, in the data set's order, is for testing."""
    images, labels = _images_and_labels()
    rank = np.empty(len(labels), np.int64)  # position of an image within its class
    for label in range(CLASSES):
        members = np.flatnonzero(labels == label)
        rank[members] = np.arange(len(members))
    test = rank % TEST_EVERY == TEST_EVERY - 1
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


def _draw(options: DigitsOptions, labels: Ints) -> Rows:
    if options.clients > len(labels):
        raise UserError(f"the embedded digits have {len(labels)} training images: ask for at most as many clients")
    generator = Streams(options.seed).generator(Purpose.PARTITION)
    if options.partition == "iid":
        return iid(len(labels), even_sizes(len(labels), options.clients), generator)
    return dirichlet_by_class(labels, CLASSES, options.clients, options.alpha, generator)[:2]


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
