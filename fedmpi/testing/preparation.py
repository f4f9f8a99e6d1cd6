"""Contracts of components for `python -m data_prep`: partitions, changes of clients' samples, readers of data sets."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpi.common.registry import KINDS
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, wrong_target
from fedmpi.testing.check import CLIENTS, Check, CheckSkipped, Contract, Subject, cost, demand
from fedmpi.testing.started import run_module, startable

if TYPE_CHECKING:
    from data_prep.raw import RawDataset

ROWS, CLASSES, FEW_CLIENTS = 900, 10, 7
ROWS_A_CLIENT, ROWS_A_USER = 100, 20
SEVERAL = 3
"""Number of processes that write shards together."""
SHARD_CLIENTS = 3
"""Number of clients to which the samples of a data set are assigned for the check of its shards."""


def _labels(rows: int = ROWS) -> Ints:
    """Return labels (n,) of unequal frequency."""
    generator = np.random.Generator(np.random.Philox(6))
    shares = np.arange(2, CLASSES + 2) / np.arange(2, CLASSES + 2).sum()
    return generator.choice(CLASSES, rows, p=shares).astype(np.int64)


def _partition(subject: Subject, labels: Ints, clients: int | None, seed: int = 1) -> Any:
    """Return the owners from the partition, which gets further inputs besides labels if it is built in."""
    from data_prep.partitions import partition

    generator = Streams(seed).generator(Purpose.PARTITION)
    if subject.part.foreign:
        return subject.made()(labels, clients, generator)
    k = np.arange(len(labels))
    drawn = partition(
        subject.part.name,
        labels,
        CLASSES,
        clients,
        generator,
        users=k * 7 % (len(labels) // ROWS_A_USER),
        superclasses=np.arange(CLASSES) // 2,
        attribute_of=lambda name: np.sin(k),
        **subject.options,
    )
    return drawn.owners(len(labels))


def _partitions(subject: Subject) -> list[AnyArray]:
    clients = subject.settings.get("clients", FEW_CLIENTS)
    return [np.asarray(_partition(subject, _labels(), clients, seed)) for seed in (1, 2)]


def _owners(subject: Subject) -> str:
    """Require whole numbers below the number of clients, -1 for samples without a client, and unchanged labels."""
    from data_prep.partitions import checked_owners

    clients = subject.settings.get("clients", FEW_CLIENTS)
    labels = _labels()
    before = labels.copy()
    found = checked_owners(subject.part, _partition(subject, labels, clients), ROWS, clients)
    demand(np.array_equal(labels, before), "it changes the labels that it is given: copy them first")
    demand(int(found.min()) >= -1, f"client {found.min()}: clients count from 0, and -1 is nobody")
    sizes = np.bincount(found[found >= 0], minlength=clients)
    return f"{int(sizes.sum())} of {ROWS} rows for {clients} clients, {sizes.min()} to {sizes.max()} each"


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


def _some_owners() -> Ints:
    rows = np.arange(ROWS)
    return np.where(rows % 10 == 0, -1, rows % FEW_CLIENTS)


def _noisy(subject: Subject) -> list[AnyArray]:
    """Return noisy labels of samples of which every tenth has no client."""
    from data_prep.shifts import checked_labels

    given = subject.made()(_labels(), _some_owners(), CLASSES, Streams(1).generator(Purpose.PARTITION))
    given = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    return [checked_labels(subject.part, given, ROWS, CLASSES)]


def _labels_kept(subject: Subject) -> str:
    """Require as many labels of the same classes; samples without a client keep theirs."""
    labels, [found] = _labels(), _noisy(subject)
    nobody = _some_owners() < 0
    kept = np.array_equal(found[nobody], labels[nobody])
    demand(kept, "it changes labels of rows whose owner is -1: nobody has them")
    return f"{int((found != labels).sum())} of {ROWS} labels changed"


def _raw(subject: Subject) -> Path:
    """Return the path in the setting `raw`."""
    from data_prep.datasets import reads_files

    if "raw" not in subject.settings and reads_files(subject.part):
        raise CheckSkipped("it reads files: name them, --set raw=PATH")
    return Path(subject.settings.get("raw", "."))


def _bare_reader(subject: Subject) -> object:
    """Return the reader's result, without data_prep's protection of generators."""
    from data_prep.datasets import reads_files

    raw = _raw(subject)
    return subject.made()(raw) if reads_files(subject.part) else subject.made()()


def _read(subject: Subject) -> RawDataset:
    """Return the data set as data_prep gets it."""
    from data_prep.datasets import OF_ARRAYS, read_own
    from data_prep.raw import ReadOptions, Tally

    meant = {name: subject.settings[name] for name in OF_ARRAYS if name in subject.settings.keys() - subject.options}
    return read_own(subject.part, subject.options, _raw(subject), ReadOptions(**meant), Tally())


def _contents(subject: Subject) -> list[AnyArray]:
    """Return labels, users, the first features of both parts, and the first targets."""
    data = _read(subject)
    some = np.arange(min(len(data.labels), 200))
    users = np.zeros(0) if data.users is None else data.users
    test = np.asarray(data.test_y), np.asarray(data.test_x[:200])
    return [data.labels, users, data.read(some), *test, data.targets_of(some)]


def as_stated(subject: Subject) -> str:
    """Require samples in both parts, targets as stated, and finite features of the stated shape and type."""
    data = _read(subject)
    some = np.arange(min(len(data.labels), 200))
    names = len(data.class_names)
    known = data.classes == names or not (names or data.has_classes)
    demand(known, f"{data.classes} classes, but {names} names of them")
    training = data.labels if data.has_classes else data.targets_of(some)
    for part, x, y in (("training", data.read(some), training), ("test", data.test_x, data.test_y)):
        x, y = np.asarray(x), np.asarray(y)
        demand(len(y) > 0, f"there is no {part} row")
        _targets_as_stated(data, part, y)
        demand(
            x.shape[1:] == tuple(data.feature_shape) and str(x.dtype) == data.dtype,
            f"{part} rows are {x.dtype} {x.shape[1:]}, but {data.dtype} {tuple(data.feature_shape)} is stated",
        )
        demand(bool(np.isfinite(x.astype(np.float64)).all()), f"{part} features are not finite")
    demand(len(data.read(some)) == len(some), f"read(rows) gave {len(data.read(some))} rows for {len(some)}")
    if data.users is not None:
        demand(data.users.shape == data.labels.shape, f"{len(data.users)} users for {len(data.labels)} training rows")
    shape = tuple(data.feature_shape)
    return f"{len(data.labels)} + {len(data.test_y)} rows of {data.dtype} {shape}, {data.classes} classes"


def _targets_as_stated(data: RawDataset, part: str, y: AnyArray) -> None:
    if data.has_classes:
        demand(np.issubdtype(y.dtype, np.integer), f"{part} labels are {y.dtype}: they are whole numbers")
        demand(
            int(y.min()) >= 0 and int(y.max()) < data.classes,
            f"{part} labels from {y.min()} to {y.max()} of {data.classes} classes: they lie in 0 … {data.classes - 1}",
        )
        return
    shape = tuple(data.target_shape)
    demand(y.shape[1:] == shape, f"{part} targets are {y.shape[1:]}, but {shape} is stated")
    wrong = wrong_target(y, DataDescription((1,), "float32", data.classes, "vector", 0, (), (), data.targets, shape))
    demand(wrong is None, f"{part} targets are no {data.targets}: one is {wrong and wrong[1]}")


def _rows_alone(subject: Subject) -> str:
    """Require that samples can be read in any order and combination: a rank reads those of its shards."""
    data = _read(subject)
    rows = np.unique(np.linspace(0, len(data.labels) - 1, 12).astype(np.int64))
    together = np.asarray(data.read(rows))
    backwards = np.asarray(data.read(rows[::-1].copy()))[::-1]
    single = np.concatenate([np.asarray(data.read(rows[i : i + 1])) for i in range(len(rows))])
    for found, how in ((backwards, "in another order"), (single, "one by one")):
        demand(np.array_equal(together, found), f"read(rows) gives other features {how}: row i is always row i")
    return f"{len(rows)} rows, the same in another order and one by one"


CONTRACTS = {
    "partition": Contract(
        _partitions,
        "same clients from the same generator",
        (
            ("a client for each row, or nobody", _owners),
            (
                f"cost with {CLIENTS:,} rows",
                lambda s: cost(
                    lambda rows: (_labels(rows), rows // ROWS_A_CLIENT), lambda pair: _partition(s, *pair), "rows"
                ),
            ),
        ),
    ),
    "feature shift": Contract(
        _shifted,
        "same samples from the same generators",
        (
            (
                "samples keep their shape, and those given stay as they are",
                lambda s: f"{len(_shifted(s))} images of 8 x 8 pixels",
            ),
        ),
    ),
    "label noise": Contract(
        _noisy,
        "same labels from the same generator",
        (("a label for each row, those of nobody's rows kept", _labels_kept),),
    ),
    "data set": Contract(
        _contents,
        "same data every time",
        (
            ("features and labels as stated", as_stated),
            ("rows do not depend on those read beside them", _rows_alone),
        ),
        bare=_bare_reader,
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
    clients = str(settings.get("clients", FEW_CLIENTS))
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
    return [subject.part.name, *raw, *options, "--partition", "iid", "--clients", str(SHARD_CLIENTS)]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
