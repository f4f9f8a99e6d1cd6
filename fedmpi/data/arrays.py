"""Data in memory: the clients of a run as arrays (`ClientArrays`), the shard that the store reads them from, and what
their targets may be.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.common.calling import calling, takes
from fedmpi.common.data_choices import ARRAYS as NAME
from fedmpi.common.errors import UserError
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import IGNORED, TARGETS
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, Manifest, Modality, ShardFile, scales_of
from fedmpi.data.shardfile import ShardData
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import (
    TESTING,
    TRAINING,
    VALIDATION,
    class_notes,
    duplicate_notes,
    duplicates,
    sample_hashes,
    statistics,
)

Targets = Literal["classification", "tokens", "multilabel", "regression"]

MOST_CLASSES = 1 << 22


WRITER = "data_prep.arrays_saved"
"""What writes shards."""
LARGEST_BYTE = 255.0
CHANNELS = (1, 3, 4)
"""Values that an axis of channels commonly has."""
MOST_COUNTS = 1 << 31
"""Clients times classes: how many samples of each class each client holds is a table of 8 bytes an entry."""
MOST_CLIENTS = 1 << 30


def targets_like(y: AnyArray, declared: str | None) -> str:
    """What targets (n, …) are: as said, or as they look."""
    if declared is not None and declared not in TARGETS:
        raise UserError(f"{NAME}: targets = {declared!r} is unknown: choose {', '.join(map(repr, TARGETS))}")
    if y.dtype.kind not in "buif" and y.size:
        raise UserError(
            f"{NAME}: y is {y.dtype} {y.shape}; it must be (n,) whole numbers, the classes from 0 on, or other "
            "numbers (targets)"
        )
    if declared is not None:
        return declared
    if y.ndim < 2:
        return "regression" if y.dtype.kind == "f" and y.size else "classification"
    return {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "tokens")


def one_column(y: AnyArray, declared: str | None) -> AnyArray:
    """Values of one column (n, 1) as (n,), unless they are said to be tokens or labels."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and declared not in ("tokens", "multilabel") else y


def truth_values(y: AnyArray, positions: int) -> AnyArray:
    """Targets (n, C) that are all 0 or 1 as truth values, unless samples have so many positions; others as they are."""
    several = y.ndim == 2 and y.dtype.kind in "iu" and 1 < y.shape[1] != positions
    return y.astype(bool) if several and np.isin(y, (0, 1)).all() else y


def one_hot_classes(y: AnyArray) -> Ints | None:
    """The class of each row of targets (n, C) that all have one 1 among zeros; None where some have not."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y) or y.dtype.kind not in "biuf":
        return None
    one_hot = np.isin(y, (0, 1)).all() and (np.count_nonzero(y, axis=1) == 1).all()
    return y.argmax(axis=1).astype(np.int64) if one_hot else None


def kept_targets(what: str, y: AnyArray, targets: str) -> AnyArray:
    """Targets as they are kept: int64 of classes and tokens, float32 of labels and numbers; `what` is told of them."""
    if targets == "classification":
        return _classes_of(what, y)
    if targets in ("tokens", "multilabel") and y.ndim != 2:
        raise UserError(f"{what} is {y.dtype} {y.shape}; {targets} have a row of values for each sample")
    if y.dtype.kind not in ("ui" if targets == "tokens" else "buif"):
        raise UserError(f"{what} is {y.dtype} {y.shape}; tokens are whole numbers, -1 where none counts")
    if y.ndim < 1 or not math.prod(y.shape[1:]):
        raise UserError(f"{what} is {y.dtype} {y.shape}: a sample has no target")
    if targets == "tokens":
        if len(y) and not IGNORED <= y.min() <= y.max() < MOST_CLASSES:
            wrong = y.min() if y.min() < IGNORED else y.max()
            raise UserError(f"{what} holds the token {wrong}: they are numbered from 0 on, -1 where none counts")
        return np.ascontiguousarray(y, np.int64)
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(y, np.float32)
    if not np.isfinite(y).all():
        raise UserError(f"{what} holds numbers that are not finite in 32 bits: take those samples out")
    if targets == "multilabel" and len(y) and not 0 <= y.min() <= y.max() <= 1:
        raise UserError(f"{what} holds a label that is neither 0 nor 1, nor between them")
    return y


def _classes_of(what: str, y: AnyArray) -> Ints:
    if y.ndim != 1 or (y.dtype.kind not in "bui" and len(y)):
        raise UserError(f"{what} is {y.dtype} {y.shape}; it must be (n,) whole numbers, the classes from 0 on")
    if len(y) and not 0 <= y.min() <= y.max() < MOST_CLASSES:
        wrong = y.min() if y.min() < 0 else y.max()
        raise UserError(f"{what} holds the label {wrong}: classes are numbered from 0 on without gaps")
    return y.astype(np.int64)


class ArrayShard(ShardData):
    """A shard whose arrays are in memory already."""

    def __init__(
        self,
        x: AnyArray,
        y: AnyArray,
        offsets: Ints,
        description: DataDescription,
        client_ids: AnyArray | None = None,
    ):
        super().__init__({}, offsets, description)
        clients, classes = len(offsets) - 1, description.classes
        self.x, self.y = x, y
        if description.labelled:
            owner = np.repeat(np.arange(clients), np.diff(offsets))
            self.class_counts = np.bincount(owner * classes + y, minlength=clients * classes).reshape(clients, classes)
        self.client_ids = np.arange(clients) if client_ids is None else client_ids


class ClientArrays:
    """Samples in memory, each with the client that owns it: a source of data for `fedmpi.run`.

    Under MPI every rank gives the same arrays; that they are the same is checked before anything else.

    Parameters
    ----------
    x : array or tensor (n, …)
        Features: uint8, floats (kept as float32), or whole numbers with `task`.
    y : array or tensor (n, …)
        Targets: classes (n,), whole numbers from 0 on, or rows (n, C) with one 1 among zeros; tokens (n, L), whole
        numbers, -1 at positions that count nowhere; labels (n, C), true or false (or numbers from 0 to 1, with
        `targets`); numbers (n,) or (n, D). Values of one column (n, 1) are (n,).
    owner : array or tensor (n,)
        Each sample's client: an index from 0 on, or a name (clients are then numbered in the order of their names).
        Owners, and labels, that start above 0 are rejected unless `clients`, or `classes`, says how many there are.
    test : pair of arrays
        Features and labels that the global model is evaluated on.
    val : pair or triple of arrays, optional
        Held-out features and labels, and their owners where each client has its own.
    clients : int, optional
        N, where the last clients hold no sample.
    classes : int, optional
        C; by default one more than the largest label (of tokens, also of the vocabulary).
    targets : {"classification", "tokens", "multilabel", "regression"}, optional
        What y holds: by default whole numbers (n,) and rows with one 1 among zeros are classes, other whole numbers
        (n, L) tokens, booleans (n, C) labels, and so are zeros and ones unless samples have C positions; other numbers
        are what a regression predicts.
    task : {"image", "text", "vector"}, optional
        What a sample is: by default an image (C, H, W) where it has three axes, else a vector. Text is token ids.
    channels : {"first", "last"}, optional
        Which axis of an image holds its channels; needed where only the last has 1, 3 or 4 values.
    vocabulary : int, optional
        Token ids of a text; by default one more than the largest.
    mean, std : float or sequence, optional
        The model receives (x / 255 - mean) / std of uint8 and (x - mean) / std of floats: one number, or one for each
        channel of images and each column of vectors.
        By default uint8 is standardised by the mean and deviation of the training samples, and floats stay as given.
    name : str
        What records call the data.

    Raises
    ------
    UserError
        Arrays that do not fit together, or that no model can read.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        owner: Any,
        *,
        test: Sequence[Any],
        val: Sequence[Any] | None = None,
        clients: int | None = None,
        classes: int | None = None,
        targets: Targets | None = None,
        task: Modality | None = None,
        channels: Literal["first", "last"] | None = None,
        vocabulary: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        name: str = "arrays",
    ):
        self.name, self.channels = name, channels
        self.notes: tuple[str, ...] = ()
        x, y = _features("x", x, task, channels), one_column(_array(y), targets)
        codes = one_hot_classes(y) if targets in (None, "classification") else None
        if codes is not None:
            self.notes = (f"y has one 1 among {y.shape[1]} values in each row, which names the class of a sample",)
            y, classes = codes, max(classes or 0, y.shape[1])
        if targets is None:
            y = truth_values(y, x.shape[1] if x.dtype == np.int32 or (x.ndim == 3 and task != "image") else 0)
        self.targets = targets_like(y, targets)
        y = kept_targets(f"{NAME}: y", y, self.targets)
        owner, names = _owners(owner)
        _check_length("y", y, "x", x)
        _check_length("owner", owner, "x", x)
        if not len(x):
            raise UserError(f"{NAME}: x holds no sample: a run needs at least one")
        if names is None and clients is None and owner.min() > 0:
            raise UserError(
                f"{NAME}: owner holds {owner.min()} to {owner.max()}, so client 0 has no sample. Subtract "
                f"{owner.min()}, or pass clients={owner.max() + 1}."
            )
        count = _count(clients, names, owner)
        self.client_ids = np.arange(count) if names is None else names
        self.x, self.y, self.offsets = _by_owner(x, y, owner, count)
        if clients is None and (idle := int((np.diff(self.offsets) == 0).sum())):
            self.notes += (f"{idle:,} of {count:,} clients own no sample: owners are numbered with gaps",)
        self.test = self._pair("test", test, task)
        self.val: tuple[AnyArray, AnyArray] | None = None
        self.val_offsets: Ints | None = None
        if val is not None:
            if not _is_tuple(val, (2, 3)):
                raise UserError(
                    f"{NAME}: val must be features and labels, and their owners where clients have their own"
                )
            self._hold_out(val, task)
        self.classes = self._classes(classes, vocabulary)
        if self.targets == "classification" and count * self.classes > MOST_COUNTS:
            raise UserError(
                f"{NAME}: {count} clients times {self.classes} classes are more than {MOST_COUNTS} class counts: "
                "number owners and labels from 0 on without gaps"
            )
        self.description = self._describe(task, vocabulary, mean, std)

    def __call__(self) -> ClientArrays:
        """Itself: where a function that gives such arrays is expected, they can be given as they are."""
        return self

    def __repr__(self) -> str:
        return self.config_name

    @property
    def config_name(self) -> str:
        """What a run's config.toml calls these data."""
        return f"{NAME}:{self.name}-{self.digest[:16]}"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that makes these data what they are."""
        summed = hashlib.sha256(repr((self.name, self.description, self.offsets.tolist())).encode())
        for array in (self.x, self.y, *self.test, *(self.val or ())):
            summed.update(_digest(array).encode())
        if self.val_offsets is not None:
            summed.update(repr(self.val_offsets.tolist()).encode())
        return summed.hexdigest()

    @cached_property
    def store(self) -> ShardStore:
        """The arrays as a store of one shard."""
        parts = {"test": self.test} | ({} if self.val is None else {"val": self.val})
        shard = ArrayShard(self.x, self.y, self.offsets, self.description, self.client_ids)
        return ShardStore(self._manifest(), [shard], parts, validation_offsets=self.val_offsets)

    def save(self, folder: str | Path, *, shards: int = 8, overwrite: bool = False) -> Path:
        """Write the data to a folder of shards, from which a run reads the same samples in the same order.

        Under MPI one rank does so.

        Parameters
        ----------
        folder : str or Path
            New or empty, or, with `overwrite`, one that was prepared before.
        shards : int
            Training shards, at most one a client.
        overwrite : bool
            Replace what is in the folder.

        Returns
        -------
        Path
            The folder, for `data.source`.

        Raises
        ------
        UserError
            The folder holds something else, or cannot be written.
        """
        writer = import_module(WRITER)  # which knows of this module: by its name, nothing goes in a circle
        return Path(writer.write_arrays(self, Path(folder), shards, overwrite))

    def _pair(self, what: str, given: Sequence[Any], task: Modality | None) -> tuple[AnyArray, AnyArray]:
        return _pair(what, given, self.x, self.y, self.targets, task, self.channels)

    def _hold_out(self, val: Sequence[Any], task: Modality | None) -> None:
        x, y = self._pair("val", val[:2], task)
        if len(val) > 2:
            ids = self.client_ids
            owner, names = _owners(val[2], None if ids.dtype.kind in "iu" else ids)
            _check_length("val's owner", owner, "val's x", x)
            _count(len(self.offsets) - 1, names, owner)
            x, y, self.val_offsets = _by_owner(x, y, owner, len(self.offsets) - 1)
        self.val = x, y

    def _classes(self, classes: int | None, vocabulary: int | None) -> int:
        if self.targets not in ("classification", "tokens"):
            width = math.prod(self.y.shape[1:])
            if classes not in (None, width):
                raise UserError(f"{NAME}: classes = {classes}, but a target has {width} values: leave classes out")
            return width
        parts = (self.y, self.test[1], *(self.val or ())[1:])
        found = max(int(y.max(initial=0)) for y in parts) + 1
        least = min(int(y.min()) for y in parts if y.size)
        if self.targets == "classification" and classes is None and least > 0:
            raise UserError(
                f"{NAME}: the labels are {least} to {found - 1}, so class 0 has no sample. Subtract {least} from all "
                f"labels, or pass classes={found}."
            )
        if self.targets == "tokens" and classes is None:
            found = max(found, vocabulary or 0)
        classes = _whole("classes", classes)
        if classes is not None and classes > MOST_CLASSES:
            raise UserError(f"{NAME}: classes = {classes} is more than {MOST_CLASSES}")
        if classes is not None and classes < found:
            raise UserError(f"{NAME}: classes = {classes}, but there is a label {found - 1}: labels lie below classes")
        return max(2, found) if classes is None else classes

    def _describe(
        self,
        task: Modality | None,
        vocabulary: int | None,
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
    ) -> DataDescription:
        shape, dtype = self.x.shape[1:], str(self.x.dtype)
        if task is None:
            task = "image" if len(shape) == 3 else "vector"
        if dtype == "int32":
            parts = (self.x, self.test[0], *(self.val or ())[:1])
            largest = max(int(part.max(initial=0)) for part in parts) + 1
            vocabulary = _whole("vocabulary", vocabulary)
            words = max(largest, vocabulary or 0)
            return DataDescription(shape, dtype, self.classes, "text", words, (), (), self.targets, self.y.shape[1:])
        channels = scales_of(shape)
        if mean is not None or std is not None:
            centre = _per_channel("mean", 0.0 if mean is None else mean, channels)
            spread = _per_channel("std", 1.0 if std is None else std, channels)
        else:
            centre, spread = self._measured(channels if len(shape) == 3 else 1) if dtype == "uint8" else ((), ())
        if any(not 0 < value < np.inf for value in spread) or not np.isfinite(centre).all():
            raise UserError(f"{NAME}: std must be above 0 and mean finite, not {std} and {mean}")
        return DataDescription(shape, dtype, self.classes, task, 0, centre, spread, self.targets, self.y.shape[1:])

    def _measured(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the training samples on the scale of x / 255, as data_prep measures them."""
        return statistics(lambda rows: self.x[rows], np.arange(len(self.x)), channels, LARGEST_BYTE)

    def _manifest(self) -> Manifest:
        clients, samples = len(self.offsets) - 1, len(self.x)
        test_x, test_y = self.test
        parts = {TRAINING: (self.x, self.y), TESTING: self.test} | ({} if self.val is None else {VALIDATION: self.val})
        shared = duplicates({part: sample_hashes(x) for part, (x, _) in parts.items()})
        notes = duplicate_notes(shared, {part: len(x) for part, (x, _) in parts.items()})
        if self.targets == "classification":
            notes = (*class_notes({part: y for part, (_, y) in parts.items()}, range(self.classes)), *notes)
        return Manifest(
            dataset=self.name,
            partition="given",
            partition_options={},
            seed=0,
            clients=clients,
            samples=samples,
            classes=self.classes,
            class_names=tuple(map(str, range(self.classes))) if self.targets == "classification" else (),
            description=self.description,
            train=(ShardFile("", self.x.nbytes + self.y.nbytes, self.digest, 0, clients, samples),),
            test=ShardFile("", test_x.nbytes + test_y.nbytes, "", samples=len(test_y)),
            val=None if self.val is None else ShardFile("", self.val[0].nbytes, "", samples=len(self.val[1])),
            empty_clients=int((np.diff(self.offsets) == 0).sum()),
            command="in memory",
            notes=(*self.notes, *notes),
            duplicates=shared,
        )


def arrays_of(where: Any, options: Mapping[str, Any]) -> ClientArrays:
    """The arrays that were given, or that the function of the user's own gives."""
    if isinstance(where, str) and where.startswith(f"{NAME}:"):
        raise UserError(
            f"data.source = {where!r} were arrays in the memory of the program that ran: give them again, as "
            "fedmpi.run(…, data=fedmpi.ClientArrays(…))"
        )
    source = resolve("data source", where)
    with calling(source):
        make = source.make(options)
        takes(source, make)
        try:
            found = make()
        except UserError as error:
            if not str(error).startswith(f"{NAME}: "):  # it refuses in its own words, and not arrays that it makes
                raise
            raise UserError(f"data.source = {source.name!r}: {error}") from error
    if not isinstance(found, ClientArrays):
        raise UserError(f"data.source = {source.name!r} gave {type(found).__name__}: it must return fedmpi.{NAME}")
    return found


def _array(given: Any) -> AnyArray:
    """The values of an array, a list, or a tensor wherever it lies."""
    if np.ma.is_masked(given):
        raise UserError(f"{NAME}: an array has masked values: take those samples out, or fill them in")
    try:
        return np.asarray(given.numpy(force=True) if hasattr(given, "numpy") and hasattr(given, "device") else given)
    except Exception as error:  # rows of several lengths, tensors without plain values
        reason = " ".join(str(error).split())
        raise UserError(f"{NAME}: no array can be made of a {type(given).__name__} given ({reason})") from None


def _features(what: str, given: Any, task: Modality | None, channels: Literal["first", "last"] | None) -> AnyArray:
    x = _array(given)
    if channels not in (None, "first", "last") or (channels is not None and x.ndim != 4):
        raise UserError(
            f'{NAME}: channels = {channels!r} with {what} {x.shape}: give "first" or "last" for images (n, C, H, W)'
        )
    if channels is None and x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS and task != "vector":
        raise UserError(
            f'{NAME}: {what} is {x.shape}, and its last axis may hold the channels of images. Pass channels="last" for '
            '(n, H, W, C), or channels="first" for (n, C, H, W).'
        )
    x = np.moveaxis(x, 3, 1) if channels == "last" else x
    if x.dtype.kind not in "buif" or x.ndim < 2:
        raise UserError(f"{NAME}: {what} is {x.dtype} {x.shape}; it must hold numbers, a row of them for each sample")
    if not x[:1].size and len(x):
        raise UserError(f"{NAME}: {what} is {x.dtype} {x.shape}: a sample holds no value")
    if task not in (None, "image", "text", "vector"):
        raise UserError(f'{NAME}: task = {task!r} is unknown: choose "image", "text" or "vector"')
    if task == "text":
        if x.dtype.kind not in "ui" or x.min(initial=0) < 0 or x.max(initial=0) > np.iinfo(np.int32).max:
            raise UserError(f'{NAME}: task = "text" needs token ids from 0 on, but {what} is {x.dtype} or beyond them')
        return np.ascontiguousarray(x, np.int32)
    if x.dtype.kind in "ui" and x.dtype != np.uint8 and task is None:
        raise UserError(f'{NAME}: {what} holds {x.dtype} numbers: say task = "text" (token ids), "vector" or "image"')
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, np.float32)
    if not np.isfinite(x).all():
        raise UserError(f"{NAME}: {what} holds numbers that are not finite in 32 bits: take those samples out")
    return x


def _owners(given: Any, known: AnyArray | None = None) -> tuple[Ints, AnyArray | None]:
    """The client of every sample, and the clients' names in order where the owners are names."""
    owner = _array(given)
    if owner.ndim != 1:
        raise UserError(f"{NAME}: owner is {owner.dtype} {owner.shape}; it must be (n,), the client of each sample")
    if owner.dtype.kind in "ui" or not len(owner):
        if len(owner) and not 0 <= owner.min() <= owner.max() < MOST_CLIENTS:
            wrong = owner.min() if owner.min() < 0 else owner.max()
            raise UserError(f"{NAME}: owner holds {wrong}: clients are numbered from 0 on without gaps, or have names")
        return owner.astype(np.int64), None
    if owner.dtype.kind not in "OSU" or not all(isinstance(name, str | bytes | int) for name in owner.tolist()):
        raise UserError(f"{NAME}: owner holds {_kinds(owner)}: give whole numbers from 0 on, or names")
    written = owner.astype(str)
    if known is None:
        names, index = np.unique(written, return_inverse=True)
        return index.astype(np.int64), names
    unknown = np.setdiff1d(written, known)
    if len(unknown):
        raise UserError(f"{NAME}: val has samples of {str(unknown[0])!r}, who owns none of x")
    return np.searchsorted(known, written).astype(np.int64), known


def _kinds(owner: AnyArray) -> str:
    """What owners are that are neither whole numbers nor names."""
    if owner.dtype.kind != "O":
        return f"{owner.dtype} values"
    return next(repr(name) for name in owner.tolist() if not isinstance(name, str | bytes | int))


def _whole(what: str, given: int | None) -> int | None:
    """A whole number above 0, or None."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 1):
        raise UserError(f"{NAME}: {what} = {given!r} must be a whole number above 0")
    return None if given is None else int(given)


def _count(clients: int | None, names: AnyArray | None, owner: Ints) -> int:
    clients = _whole("clients", clients)
    if clients is not None and clients > MOST_CLIENTS:
        raise UserError(f"{NAME}: clients = {clients} is more than {MOST_CLIENTS}")
    found = len(names) if names is not None else int(owner.max(initial=-1)) + 1
    if clients is not None and clients < found:
        raise UserError(f"{NAME}: there are {clients} clients, but a sample of client {found - 1}: clients start at 0")
    if names is not None and clients is not None and clients > found:
        raise UserError(f"{NAME}: clients = {clients}, but owner names {found}: leave clients out")
    return found if clients is None else clients


def _by_owner(x: AnyArray, y: AnyArray, owner: Ints, clients: int) -> tuple[AnyArray, AnyArray, Ints]:
    """Read-only samples client after client, those of one client in the order given; where each client begins."""
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        x, y = x[order], y[order]
    x, y = x.view(), y.view()
    x.flags.writeable = y.flags.writeable = False
    return x, y, np.concatenate(([0], np.cumsum(np.bincount(owner, minlength=clients)))).astype(np.int64)


def _is_tuple(given: Any, lengths: tuple[int, ...]) -> bool:
    """Whether something has its elements at 0, 1, …, and so many of them."""
    return hasattr(given, "__getitem__") and not isinstance(given, Mapping) and len(given) in lengths


def _pair(
    what: str,
    given: Sequence[Any],
    like: AnyArray,
    targets: AnyArray,
    kind: str,
    task: Modality | None,
    channels: Literal["first", "last"] | None,
) -> tuple[AnyArray, AnyArray]:
    """The features and targets of another part, of the shape of the training samples' ones."""
    if not _is_tuple(given, (2,)):
        raise UserError(f"{NAME}: {what} must be a pair of features and labels")
    x, y = _features(f"{what}'s x", given[0], task, channels), one_column(_array(given[1]), kind)
    if kind == "classification" and (codes := one_hot_classes(y)) is not None:
        y = codes
    y = kept_targets(f"{NAME}: {what}'s y", y, kind)
    _check_length(f"{what}'s y", y, f"{what}'s x", x)
    if x.shape[1:] != like.shape[1:] or x.dtype != like.dtype:
        raise UserError(
            f"{NAME}: {what}'s x has samples {x.dtype} {x.shape[1:]} where those of x are {like.dtype} {like.shape[1:]}"
        )
    if y.shape[1:] != targets.shape[1:]:
        raise UserError(f"{NAME}: {what}'s y has targets {y.shape[1:]} where those of y are {targets.shape[1:]}")
    if not len(x):
        raise UserError(f"{NAME}: {what} holds no sample: a run needs at least one")
    return x, y


def _check_length(one: str, values: AnyArray, other: str, rows: AnyArray) -> None:
    if len(values) != len(rows):
        raise UserError(f"{NAME}: {one} has {len(values)} entries where {other} has {len(rows)}: one for each sample")


def _per_channel(what: str, given: float | Sequence[float], channels: int) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in np.atleast_1d(np.asarray(given, np.float64)))
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{NAME}: {what} = {given!r} must be a number, or one for each channel or column") from None
    if len(values) not in (1, channels):
        raise UserError(
            f"{NAME}: {what} has {len(values)} values for {channels} channels or columns: give one, or one for each"
        )
    return values


def _digest(array: AnyArray) -> str:
    head = f"{array.dtype}{array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
