"""Contracts of components for `python -m data_prep`: partitions, changes of clients' samples, readers of data sets."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.common.registry import KINDS, built_in_name
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, wrong_target
from fedmpi.testing.check import CLIENTS, Alike, Check, CheckSkipped, Contract, Subject, cost, demand
from fedmpi.testing.started import run_module, startable

if TYPE_CHECKING:
    from data_prep.raw import RawDataset

ROWS, CLASSES, FEW_CLIENTS = 900, 10, 7
ROWS_PER_CLIENT, ROWS_PER_USER, SOME_ROWS = 100, 20, 200
SEVERAL = 3
"""Number of processes that write shards together, and of clients of a data set."""


def _labels(rows: int = ROWS) -> Ints:
    """Return read-only labels (n,) of unequal frequency."""
    generator = np.random.Generator(np.random.Philox(6))
    shares = np.arange(2, CLASSES + 2) / np.arange(2, CLASSES + 2).sum()
    labels = generator.choice(CLASSES, rows, p=shares).astype(np.int64)
    labels.flags.writeable = False
    return labels


def _clients(subject: Subject) -> int:
    return int(subject.settings.get("clients", FEW_CLIENTS))


def _partition(subject: Subject, labels: Ints, clients: int, seed: int = 1) -> Any:
    """Return the owners from the partition, which gets further inputs besides labels if it is built in."""
    from data_prep.partitions import Request, partition

    generator = Streams(seed).generator(Purpose.PARTITION)
    if built_in_name(subject.part.object) is None:
        return subject.made()(labels, clients, generator)
    k = np.arange(len(labels))
    users, superclasses = k * 7 % (len(labels) // ROWS_PER_USER), np.arange(CLASSES) // 2
    request = Request(labels, CLASSES, clients, generator, users, (), superclasses, lambda name: np.sin(k))
    return partition(subject.part.name, request, **subject.options).owners(len(labels))


def _owners(subject: Subject) -> list[AnyArray]:
    """Return the clients of samples, -1 for samples without a client, for two seeds."""
    from data_prep.partitions import checked_owners

    clients, found = _clients(subject), []
    for seed in (1, 2):
        found.append(checked_owners(subject.part, _partition(subject, _labels(), clients, seed), ROWS, clients))
        demand(int(found[-1].min()) >= -1, f"client {found[-1].min()}: clients count from 0, and -1 means no client")
    return found


def _shifted(subject: Subject) -> list[AnyArray]:
    """Return shifted byte images of some samples of each client; the given arrays are read-only."""
    from data_prep.shifts import checked_sample

    images = np.random.Generator(np.random.Philox(6)).integers(0, 256, (3 * FEW_CLIENTS, 1, 8, 8)).astype(np.uint8)
    images.flags.writeable = False
    of_sample = subject.made()(FEW_CLIENTS, Streams(1).generator(Purpose.PARTITION))
    demand(callable(of_sample), f"it gives a {type(of_sample).__name__}: it gives a function (x, client, generator)")
    return [
        checked_sample(subject.part, of_sample(x, row % FEW_CLIENTS, Streams(row).generator(Purpose.ROWS)), x)
        for row, x in enumerate(images)
    ]


def _noisy(subject: Subject) -> list[AnyArray]:
    """Return noisy labels of samples of which every tenth has no client and keeps its label."""
    from data_prep.shifts import checked_labels

    rows, labels = np.arange(ROWS), _labels()
    nobody = rows % 10 == 0
    owners = np.where(nobody, -1, rows % FEW_CLIENTS)
    given = subject.made()(labels, owners, CLASSES, Streams(1).generator(Purpose.PARTITION))
    given = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    found = checked_labels(subject.part, given, ROWS, CLASSES)
    demand(np.array_equal(found[nobody], labels[nobody]), "it changes labels of samples without a client (owner -1)")
    return [found]


def _raw(subject: Subject) -> Path:
    """Return the path in the setting `raw`."""
    from data_prep.datasets import reads_files

    if "raw" not in subject.settings and reads_files(subject.part):
        raise CheckSkipped("it reads files: name them, --set raw=PATH")
    return Path(subject.settings.get("raw", "."))


def _contents(subject: Subject, order: int = 1, batch: int = SOME_ROWS) -> list[AnyArray]:
    """Return labels, users, test part, and the first features and targets, read in this order and in batches."""
    from data_prep.datasets import OF_ARRAYS, read_own
    from data_prep.raw import ReadOptions, Tally

    meant = {name: subject.settings[name] for name in OF_ARRAYS if name in subject.settings.keys() - subject.options}
    data = read_own(subject.part, subject.options, _raw(subject), ReadOptions(**meant), Tally())
    rows = np.arange(min(len(data.labels), SOME_ROWS))[::order]
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    x = np.concatenate([np.asarray(data.read(part.copy())) for part in parts])[::order]
    y = np.concatenate([np.asarray(data.targets_of(part.copy())) for part in parts])[::order]
    _as_stated(data, "training", x, data.labels if data.has_classes else y)
    _as_stated(data, "test", np.asarray(data.test_x), np.asarray(data.test_y))
    names = len(data.class_names)
    known = data.classes == names or not (names or data.has_classes)
    demand(known, f"{data.classes} classes, but {names} names of them")
    demand(len(x) == len(rows), f"read(rows) gave {len(x)} rows for {len(rows)}")
    users = np.zeros(0) if data.users is None else data.users
    demand(len(users) in (0, len(data.labels)), f"{len(users)} users for {len(data.labels)} training rows")
    return [data.labels, users, np.asarray(data.test_x[:SOME_ROWS]), np.asarray(data.test_y), x, y]


def _as_stated(data: RawDataset, part: str, x: AnyArray, y: AnyArray) -> None:
    """Require samples with features and targets as stated."""
    demand(len(y) > 0, f"there is no {part} row")
    shape, classes = tuple(data.target_shape), data.classes
    if data.has_classes:
        demand(np.issubdtype(y.dtype, np.integer), f"{part} labels are {y.dtype}, not whole numbers")
        fits = int(y.min()) >= 0 and int(y.max()) < classes
        demand(fits, f"{part} labels are from {y.min()} to {y.max()}, not in 0 … {classes - 1} ({classes} classes)")
    else:
        demand(y.shape[1:] == shape, f"{part} targets are {y.shape[1:]}, but {shape} is stated")
        wrong = wrong_target(y, DataDescription((1,), "float32", classes, "vector", 0, (), (), data.targets, shape))
        demand(wrong is None, f"{part} targets do not suit {data.targets}: one is {wrong and wrong[1]}")
    stated = data.dtype, tuple(data.feature_shape)
    demand((str(x.dtype), x.shape[1:]) == stated, f"{part} rows are {x.dtype} {x.shape[1:]}, but {stated} is stated")


CONTRACTS = {
    "partition": Contract(
        _owners,
        "a client for each sample, or none",
        "same clients from the same generator",
        more=(
            (
                f"cost with {CLIENTS:,} samples",
                lambda s: cost(
                    lambda rows: (_labels(rows), rows // ROWS_PER_CLIENT), lambda pair: _partition(s, *pair), "samples"
                ),
            ),
        ),
    ),
    "feature shift": Contract(_shifted, "samples keep their shape", "same samples from the same generators"),
    "label noise": Contract(
        _noisy, "a label for each sample, unchanged without a client", "same labels from the same generator"
    ),
    "data set": Contract(
        _contents,
        "features and labels as stated",
        "same data every time",
        (
            Alike(
                "samples do not depend on the order of reading",
                ({"order": -1}, {"batch": 17}),
                "read(rows) must give the features of row i for i in rows, in any order: each rank reads other rows",
            ),
        ),
    ),
}


def prepared_checks(subject: Subject) -> Iterator[Check]:
    """Yield the check that starts processes, for any component of data_prep."""
    yield subject.check(f"same shards by 1 and {SEVERAL} processes", _same_shards)


def _same_shards(subject: Subject) -> str:
    if (reason := startable(subject.part)) is not None:
        raise CheckSkipped(reason)
    needed = subject.mark("needs")
    if needed in ("users", "superclasses") and "dataset" not in subject.settings:
        raise CheckSkipped(
            f"it goes by {needed}: name a data set that has them, --set dataset=NAME --set raw=PATH, to write shards of"
        )
    alone, together = _digests(subject, 1), _digests(subject, SEVERAL)
    wrong = sorted(name for name in alone.keys() | together.keys() if alone.get(name) != together.get(name))
    demand(
        not wrong,
        f"{SEVERAL} processes write another {', '.join(wrong)} than one: it may not depend on the process",
    )
    return f"{len(alone)} files, byte for byte"


def _digests(subject: Subject, ranks: int) -> dict[str, str]:
    """Return the SHA-256 of every file of shards that so many processes write."""
    with tempfile.TemporaryDirectory(prefix="fedmpi-check-") as place:
        out = Path(place) / "shards"
        problem = run_module(ranks, ["-m", "data_prep", *_words(subject), "--shards", "3", "--out", str(out)])
        demand(problem is None, f"{ranks} processes: {problem}")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*.h5"))}


def _words(subject: Subject) -> list[str]:
    """Return the command line that uses the component."""
    from data_prep.datasets import OF_ARRAYS

    kind, settings = KINDS[subject.part.kind], subject.settings
    options = [word for name, value in subject.options.items() for word in (kind.option_key(name), _text(value))]
    clients = str(_clients(subject))
    raw = ["--raw", str(Path(settings["raw"]).resolve())] if "raw" in settings else []
    if subject.part.kind == "partition":
        of = str(settings.get("dataset", "digits"))
        return [of, *raw, "--partition", subject.part.name, "--clients", clients, *options]
    if subject.part.kind in ("feature shift", "label noise"):
        return ["digits", "--partition", "iid", "--clients", str(FEW_CLIENTS), kind.key, subject.part.name, *options]
    _raw(subject)
    for name in sorted(OF_ARRAYS):
        if name in settings and name not in subject.options:
            flag = "--" + name.replace("_", "-")
            options += [flag] if settings[name] is True else [flag, _text(settings[name])]
    return [subject.part.name, *raw, *options, "--partition", "iid", "--clients", str(SEVERAL)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
