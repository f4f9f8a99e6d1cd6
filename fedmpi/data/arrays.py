"""Data in memory: the clients of a run as arrays (`ClientArrays`), and the kinds of targets that they may have."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.calling import calling, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import ARRAYS as NAME
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import IGNORED, TARGETS
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, Manifest, Modality, ShardFile
from fedmpi.data.shards import ShardStore, shard_in_memory
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

WRITER = "data_prep.writer"
"""Module that writes shards."""
CHANNELS = (1, 3, 4)
"""Usual sizes of an axis of channels."""
MOST_CLASSES = 1 << 22
MOST_CLIENTS = 1 << 30
MOST_COUNTS = 1 << 31
"""Clients times classes: the table of class counts has 8 bytes per entry."""


def _need(holds: Any, problem: str) -> None:
    if not holds:
        raise UserError(f"{NAME}: {problem}")


def one_column(y: AnyArray, declared: str | None) -> AnyArray:
    """Return values of one column (n, 1) as (n,), unless they are declared as tokens or labels."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and declared not in ("tokens", "multilabel") else y


def truth_values(y: AnyArray, positions: int) -> AnyArray:
    """Return targets (n, C) that are all 0 or 1 as truth values, unless samples have so many positions."""
    several = y.ndim == 2 and y.dtype.kind in "iu" and 1 < y.shape[1] != positions
    return y.astype(bool) if several and np.isin(y, (0, 1)).all() else y


def one_hot_classes(y: AnyArray) -> Ints | None:
    """Return the class of each row of targets (n, C) that all have one 1 among zeros; None if some do not."""
    if y.ndim != 2 or y.shape[1] < 2 or not len(y) or y.dtype.kind not in "biuf":
        return None
    one_hot = np.isin(y, (0, 1)).all() and (np.count_nonzero(y, axis=1) == 1).all()
    return y.argmax(axis=1).astype(np.int64) if one_hot else None


def kept_targets(what: str, y: AnyArray, targets: str) -> AnyArray:
    """Return targets as they are kept: int64 of classes and tokens, float32 of labels and numbers.

    `what` names them in error messages.
    """
    found = f"{what} is {y.dtype} {y.shape}"
    if targets == "classification":
        if y.ndim != 1 or (y.dtype.kind not in "bui" and len(y)):
            raise UserError(f"{found}; it must be (n,) whole numbers, the classes from 0 on")
    elif targets in ("tokens", "multilabel") and y.ndim != 2:
        raise UserError(f"{found}; {targets} have a row of values for each sample")
    elif y.dtype.kind not in ("ui" if targets == "tokens" else "buif"):
        raise UserError(f"{found}; tokens are whole numbers, -1 where none counts")
    elif y.ndim < 1 or not math.prod(y.shape[1:]):
        raise UserError(f"{found}: a sample has no target")
    if targets in ("classification", "tokens"):
        first, name = (0, "label") if targets == "classification" else (IGNORED, "token")
        if len(y) and not first <= y.min() <= y.max() < MOST_CLASSES:
            wrong = y.min() if y.min() < first else y.max()
            counted = (
                "classes are numbered from 0 on without gaps" if first == 0 else "-1 marks those that do not count"
            )
            raise UserError(f"{what} holds the {name} {wrong}: {counted}")
        return np.ascontiguousarray(y, np.int64)
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(y, np.float32)
    if not np.isfinite(y).all():
        raise UserError(f"{what} holds numbers that are not finite in 32 bits. Take those samples out")
    if targets == "multilabel" and len(y) and not 0 <= y.min() <= y.max() <= 1:
        raise UserError(f"{what} holds a label that is neither 0 nor 1, nor between them")
    return y


class ClientArrays:
    """Samples in memory, each with the client that owns it: a source of data for `fedmpi.run`.

    Under MPI every rank gives the same arrays; this is checked before anything else.

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
        Owners, and labels, that start above 0 are rejected unless `clients`, or `classes`, gives their number.
    test : pair of arrays
        Features and labels that the global model is evaluated on.
    val : pair or triple of arrays, optional
        Held-out features and labels, and their owners where each client has its own.
    clients : int, optional
        N, where the last clients hold no sample.
    classes : int, optional
        C; by default one more than the largest label (of tokens, also of the vocabulary).
    targets : {"classification", "tokens", "multilabel", "regression"}, optional
        Kind of y. By default whole numbers (n,) and rows with one 1 among zeros are classes, other whole numbers (n, L)
        tokens, booleans (n, C) labels, and so are zeros and ones unless samples have C positions; other numbers are a
        regression.
    task : {"image", "text", "vector"}, optional
        Kind of a sample: by default an image (C, H, W) where it has three axes, else a vector. Text is token ids.
    channels : {"first", "last"}, optional
        Channel axis of images; needed where only the last has 1, 3 or 4 values.
    vocabulary : int, optional
        Number of token ids of a text; by default one more than the largest.
    mean, std : float or sequence, optional
        The model receives (x / 255 - mean) / std of uint8 and (x - mean) / std of floats: one number, or one for each
        channel of images and each column of vectors. By default uint8 is standardized by the mean and standard
        deviation of the training samples, and floats stay as given.
    name : str
        Name of the data in records.

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
        self.name, self.channels, self.task = name, channels, task
        self.notes: tuple[str, ...] = ()
        x, y = _features("x", x, task, channels), one_column(_array(y), targets)
        codes = one_hot_classes(y) if targets in (None, "classification") else None
        if codes is not None:
            self.notes = (f"y has one 1 among {y.shape[1]} values in each row, which names the class of a sample",)
            y, classes = codes, max(classes or 0, y.shape[1])
        if targets is None:
            y = truth_values(y, x.shape[1] if x.dtype == np.int32 or (x.ndim == 3 and task != "image") else 0)
        self.targets = _kind_of(y, targets)
        y = kept_targets(f"{NAME}: y", y, self.targets)
        owner, names = _owners(owner)
        _check_length("y", y, "x", x)
        _check_length("owner", owner, "x", x)
        _need(len(x), "x holds no sample: a run needs at least one")
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
        self.test = self._pair("test", test)
        self.val: tuple[AnyArray, AnyArray] | None = None
        self.val_offsets: Ints | None = None
        if val is not None:
            self._hold_out(val)
        self.classes = self._classes(classes, vocabulary)
        _need(
            self.targets != "classification" or count * self.classes <= MOST_COUNTS,
            f"{count} clients times {self.classes} classes are more than {MOST_COUNTS} class counts: number owners and "
            "labels from 0 on without gaps",
        )
        self.description = self._describe(vocabulary, mean, std)
        try:
            self.description.check()
        except ValueError as error:
            raise UserError(f"{NAME}: {error}") from None

    def __call__(self) -> ClientArrays:
        """Return itself, so that it can be given instead of a function that makes such arrays."""
        return self

    def __repr__(self) -> str:
        return self.config_name

    @property
    def config_name(self) -> str:
        """Name of these data in a run's config.toml."""
        return f"{NAME}:{self.name}-{self.digest[:16]}"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that identifies these data."""
        summed = hashlib.sha256(repr((self.name, self.description, self.offsets.tolist())).encode())
        for array in (self.x, self.y, *self.test, *(self.val or ())):
            head = f"{array.dtype}{array.shape}".encode()
            summed.update(hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest().encode())
        if self.val_offsets is not None:
            summed.update(repr(self.val_offsets.tolist()).encode())
        return summed.hexdigest()

    @cached_property
    def store(self) -> ShardStore:
        """The arrays as a store of one shard."""
        described = self.description
        shard = shard_in_memory(self.x, self.y, described, self.offsets, self.client_ids)
        val = None if self.val is None else shard_in_memory(*self.val, described, self.val_offsets)
        return ShardStore(self._manifest(), [shard], shard_in_memory(*self.test, described), val)

    def save(self, folder: str | Path, *, shards: int = 8, overwrite: bool = False) -> Path:
        """Write the data to a folder of shards, from which a run reads the same samples in the same order.

        Under MPI one rank does so.

        Parameters
        ----------
        folder : str or Path
            New or empty, or, with `overwrite`, prepared before; return it for `data.source`.
        shards : int
            Training shards, at most one per client.
        overwrite : bool
            Replace the content of the folder.

        Raises
        ------
        UserError
            The folder contains something else, or cannot be written.
        """
        writer = import_module(WRITER)  # imported by name to avoid a circular import
        return Path(writer.write_arrays(self, Path(folder), shards, overwrite))

    def _pair(self, what: str, given: Sequence[Any]) -> tuple[AnyArray, AnyArray]:
        """Return features and targets of another part, of the shape of the training samples' ones."""
        _need(len(given) == 2, f"{what} must be features and labels (val also the owners of its samples)")
        x, y = _features(f"{what}'s x", given[0], self.task, self.channels), one_column(_array(given[1]), self.targets)
        if self.targets == "classification" and (codes := one_hot_classes(y)) is not None:
            y = codes
        y = kept_targets(f"{NAME}: {what}'s y", y, self.targets)
        _check_length(f"{what}'s y", y, f"{what}'s x", x)
        samples, expected = f"{x.dtype} {x.shape[1:]}", f"{self.x.dtype} {self.x.shape[1:]}"
        _need(samples == expected, f"{what}'s x has samples {samples} where those of x are {expected}")
        same = y.shape[1:] == self.y.shape[1:]
        _need(same, f"{what}'s y has targets {y.shape[1:]} where those of y are {self.y.shape[1:]}")
        _need(len(x), f"{what} holds no sample: a run needs at least one")
        return x, y

    def _hold_out(self, val: Sequence[Any]) -> None:
        x, y = self._pair("val", val[:2] if len(val) == 3 else val)
        if len(val) == 3:
            ids, clients = self.client_ids, len(self.offsets) - 1
            owner, names = _owners(val[2], None if ids.dtype.kind in "iu" else ids)
            _check_length("val's owner", owner, "val's x", x)
            _count(clients, names, owner)
            x, y, self.val_offsets = _by_owner(x, y, owner, clients)
        self.val = x, y

    def _classes(self, classes: int | None, vocabulary: int | None) -> int:
        if self.targets not in ("classification", "tokens"):
            width = math.prod(self.y.shape[1:])
            fits = classes in (None, width)
            _need(fits, f"classes = {classes}, but a target has {width} values: leave classes out")
            return width
        parts = (self.y, self.test[1], *(self.val or ())[1:])
        found = max(int(y.max(initial=0)) for y in parts) + 1
        least = min(int(y.min()) for y in parts if y.size)
        _need(
            self.targets != "classification" or classes is not None or least <= 0,
            f"the labels are {least} to {found - 1}, so class 0 has no sample. Subtract {least} from all labels, or "
            f"pass classes={found}.",
        )
        if self.targets == "tokens" and classes is None:
            found = max(found, vocabulary or 0)
        if classes is None:
            return max(2, found)
        _need(classes >= found, f"classes = {classes}, but there is a label {found - 1}: labels lie below classes")
        return classes

    def _describe(
        self, vocabulary: int | None, mean: float | Sequence[float] | None, std: float | Sequence[float] | None
    ) -> DataDescription:
        shape, dtype, target_shape = self.x.shape[1:], str(self.x.dtype), self.y.shape[1:]
        if dtype == "int32":
            largest = max(int(part.max(initial=0)) for part in (self.x, self.test[0], *(self.val or ())[:1])) + 1
            words = max(largest, vocabulary or 0)
            return DataDescription(shape, dtype, self.classes, "text", words, (), (), self.targets, target_shape)
        centre: tuple[float, ...] = ()
        spread: tuple[float, ...] = ()
        if mean is not None or std is not None:
            centre = tuple(np.atleast_1d(np.asarray(0.0 if mean is None else mean, np.float64)).tolist())
            spread = tuple(np.atleast_1d(np.asarray(1.0 if std is None else std, np.float64)).tolist())
        elif dtype == "uint8":  # on the scale of x / 255, as data_prep measures them
            rows = np.arange(len(self.x))
            centre, spread = statistics(lambda rows: self.x[rows], rows, shape[0] if len(shape) == 3 else 1, 255.0)
        task = self.task or ("image" if len(shape) == 3 else "vector")
        return DataDescription(shape, dtype, self.classes, task, 0, centre, spread, self.targets, target_shape)

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
    """Return the given arrays, or those that the user's function makes."""
    if isinstance(where, str) and where.startswith(f"{NAME}:"):
        raise UserError(
            f"data.source = {where!r} were arrays in the memory of the program that ran. Give them again, as "
            "fedmpi.run(…, data=fedmpi.ClientArrays(…))"
        )
    source = resolve("data source", where)
    with calling(source):
        make = source.make(options)
        takes(source, make)
        try:
            found = make()
        except UserError as error:
            if not str(error).startswith(f"{NAME}: "):  # its own rejection, not one of the arrays that it makes
                raise
            raise UserError(f"data.source = {source.name!r}: {error}") from error
    if not isinstance(found, ClientArrays):
        raise UserError(f"data.source = {source.name!r} gave {type(found).__name__}: it must return fedmpi.{NAME}")
    return found


def _kind_of(y: AnyArray, declared: str | None) -> str:
    """Return the kind of targets (n, …): the declared one, or the one that they look like."""
    known = declared is None or declared in TARGETS
    _need(known, f"targets = {declared!r} is unknown: choose {', '.join(map(repr, TARGETS))}")
    _need(
        y.dtype.kind in "buif" or not y.size,
        f"y is {y.dtype} {y.shape}; it must be (n,) whole numbers, the classes from 0 on, or other numbers (targets)",
    )
    if declared is not None:
        return declared
    if y.ndim < 2:
        return "regression" if y.dtype.kind == "f" and y.size else "classification"
    return {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "tokens")


def _array(given: Any) -> AnyArray:
    """Return the values of an array, a list, or a tensor on any device."""
    try:
        return np.asarray(given.numpy(force=True) if hasattr(given, "numpy") and hasattr(given, "device") else given)
    except Exception as error:  # rows of several lengths, tensors without plain values
        reason = " ".join(str(error).split())
        raise UserError(f"{NAME}: no array can be made of a {type(given).__name__} given ({reason})") from None


def _features(what: str, given: Any, task: Modality | None, channels: Literal["first", "last"] | None) -> AnyArray:
    x = _array(given)
    found = f"{what} is {x.dtype} {x.shape}"
    _need(
        channels is None or (channels in ("first", "last") and x.ndim == 4),
        f'channels = {channels!r} with {what} {x.shape}: give "first" or "last" for images (n, C, H, W)',
    )
    if channels is None and x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS and task != "vector":
        raise UserError(
            f'{NAME}: {what} is {x.shape}, and its last axis may hold the channels of images. Pass channels="last" for '
            '(n, H, W, C), or channels="first" for (n, C, H, W).'
        )
    x = np.moveaxis(x, 3, 1) if channels == "last" else x
    _need(x.dtype.kind in "buif" and x.ndim > 1, f"{found}; it must hold numbers, a row of them for each sample")
    if task == "text":
        ids = x.dtype.kind in "ui" and x.min(initial=0) >= 0 and x.max(initial=0) <= np.iinfo(np.int32).max
        _need(ids, f'task = "text" needs token ids from 0 on, but {found} or beyond them')
        return np.ascontiguousarray(x, np.int32)
    known = x.dtype.kind not in "ui" or x.dtype == np.uint8 or task is not None
    _need(known, f'{what} holds {x.dtype} numbers: say task = "text" (token ids), "vector" or "image"')
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, np.float32)
    _need(np.isfinite(x).all(), f"{what} holds numbers that are not finite in 32 bits: take those samples out")
    return x


def _owners(given: Any, known: AnyArray | None = None) -> tuple[Ints, AnyArray | None]:
    """Return the client of every sample, and the clients' names in order where the owners are names."""
    owner = _array(given)
    _need(owner.ndim == 1, f"owner is {owner.dtype} {owner.shape}; it must be (n,), the client of each sample")
    if owner.dtype.kind in "ui" or not len(owner):
        if len(owner) and not 0 <= owner.min() <= owner.max() < MOST_CLIENTS:
            wrong = owner.min() if owner.min() < 0 else owner.max()
            raise UserError(f"{NAME}: owner holds {wrong}: clients are numbered from 0 on without gaps, or have names")
        return owner.astype(np.int64), None
    named = all(isinstance(name, str | bytes | int) for name in owner.tolist())
    _need(named, f"owner holds {owner.dtype} values: give whole numbers from 0 on, or names")
    written = owner.astype(str)
    if known is None:
        names, index = np.unique(written, return_inverse=True)
        return index.astype(np.int64), names
    unknown = np.setdiff1d(written, known)
    if len(unknown):
        raise UserError(f"{NAME}: val has samples of {str(unknown[0])!r}, who owns none of x")
    return np.searchsorted(known, written).astype(np.int64), known


def _count(clients: int | None, names: AnyArray | None, owner: Ints) -> int:
    found = len(names) if names is not None else int(owner.max(initial=-1)) + 1
    if clients is None:
        return found
    _need(clients >= found, f"there are {clients} clients, but a sample of client {found - 1}: clients start at 0")
    _need(names is None or clients <= found, f"clients = {clients}, but owner names {found}: leave clients out")
    return int(clients)


def _by_owner(x: AnyArray, y: AnyArray, owner: Ints, clients: int) -> tuple[AnyArray, AnyArray, Ints]:
    """Return read-only samples client after client, those of one client in the given order, and the offsets."""
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        x, y = x[order], y[order]
    x, y = x.view(), y.view()
    x.flags.writeable = y.flags.writeable = False
    return x, y, offsets_of(np.bincount(owner, minlength=clients))


def _check_length(one: str, values: AnyArray, other: str, rows: AnyArray) -> None:
    same = len(values) == len(rows)
    _need(same, f"{one} has {len(values)} entries where {other} has {len(rows)}: one for each sample")
