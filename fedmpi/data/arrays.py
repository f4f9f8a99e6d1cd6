"""Data in memory: the clients of a run as arrays (`ClientArrays`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.calling import calling, takes
from fedmpi.common.errors import UserError
from fedmpi.common.registry import ARRAYS as NAME
from fedmpi.common.registry import resolve
from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.inputs import are_several, array_of, columns_of, lengths, packed, padded, unequal
from fedmpi.data.schema import DataDescription, Input, Manifest, Modality, ShardFile, first_problem, wrong_target
from fedmpi.data.shards import Samples, ShardStore, shard_in_memory
from fedmpi.data.statistics import class_notes, statistics

Targets = Literal["classification", "tokens", "multilabel", "regression"]

CHANNELS = (1, 3, 4)
"""Usual sizes of an axis of channels."""
MOST_COUNTS = 1 << 31
"""Clients times classes: the table of class counts has 8 bytes per entry."""
MOST_CLIENTS = 1 << 30
IGNORED_BY_TORCH = -100
"""Target of an ignored sample or position in torch and Hugging Face."""
FORMS = {
    "classification": "(n,) whole numbers, the classes from 0 on",
    "tokens": "(n, L) whole numbers, -1 or -100 where none counts",
    "multilabel": "(n, C) values from 0 to 1",
    "regression": "(n,) or (n, D) numbers",
}
"""Shape and type of the targets of each kind."""


def _need(holds: Any, problem: str) -> None:
    if not holds:
        raise UserError(f"{NAME}: {problem}")


def one_column(y: AnyArray, declared: str | None) -> AnyArray:
    """Return values of one column (n, 1) as (n,), unless they are declared as tokens or labels."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and declared not in ("tokens", "multilabel") else y


def kept_targets(what: str, y: AnyArray, targets: str) -> AnyArray:
    """Return targets as they are kept: int64 of classes and tokens, float32 of labels and numbers; -1 for -100.

    `what` names them in error messages.
    """
    whole = targets in ("classification", "tokens")
    axes = {"classification": 1, "tokens": 2, "multilabel": 2}.get(targets, max(1, y.ndim))
    if y.ndim != axes or (y.size and y.dtype.kind not in ("bui" if whole else "buif")):
        raise UserError(f"{what} is {y.dtype} {y.shape}; {targets} needs {FORMS[targets]}")
    with np.errstate(over="ignore"):
        kept = np.ascontiguousarray(y, np.int64 if whole else np.float32)
    return np.where(kept == IGNORED_BY_TORCH, IGNORED, kept) if targets == "tokens" else kept


class ClientArrays:
    """Samples in memory, each with the client that owns it: a source of data for `fedmpi.run`.

    Under MPI every rank gives the same arrays; this is checked before anything else.

    Parameters
    ----------
    x : array or tensor (n, …), or a dict or tuple of such arrays
        Features: uint8, floats (kept as float32), or whole numbers with `task`. Several arrays per sample need a model
        that takes them as arguments, by name or in this order: whole numbers as int64, floats as float32, booleans as
        given. Lists of sequences of unequal length are padded with 0, and the model also receives a mask (n, L), True
        where a sequence has an entry: the argument "attention_mask" of a dict (unless it has one), else the last one.
    y : array or tensor (n, …)
        Targets: classes (n,), whole numbers from 0 on; tokens (n, L), whole numbers, -1 or -100 at positions that count
        nowhere (shorter sequences end with -1); labels (n, C), true or false (or numbers from 0 to 1, with `targets`);
        numbers (n,) or (n, D). Values of one column (n, 1) are (n,). Samples of class -100 are left out.
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
    class_names : sequence of str, optional
        C names of the classes or labels, by number, for shards, `fedmpi inspect` and confusion.csv.
    targets : {"classification", "tokens", "multilabel", "regression"}, optional
        Kind of y. By default whole numbers (n,) are classes, whole numbers (n, L) tokens, booleans (n, C) labels, and
        other numbers a regression. Rows of zeros and ones need it: they could be classes, labels or tokens.
    task : {"image", "text", "vector"}, optional
        Kind of a sample: by default an image (C, H, W) where it has three axes, else a vector. Text is token ids.
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
        class_names: Sequence[str] | None = None,
        targets: Targets | None = None,
        task: Modality | None = None,
        vocabulary: int | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        name: str = "arrays",
    ):
        self.name, self.task = name, task
        others = {"test": test} if val is None else {"test": test, "val": val}
        for what, given in others.items():
            pair = given is not None and len(given) in (2, 2 + (what == "val"))
            _need(pair, f"{what} must be features and labels (val also the owners of its samples)")
        of_parts = [y, *(given[1] for given in others.values())]
        uneven = any(map(unequal, of_parts))
        self._longest = max(int(lengths(each).max(initial=0)) for each in of_parts) if uneven else None
        y = self._target("y", y, targets)
        self.targets = _kind_of(y) if targets is None else targets
        _need(self.targets in FORMS, f"targets = {targets!r} is unknown: choose {', '.join(map(repr, FORMS))}")
        of_x = {"x": x} | {f"{what}'s x": given[0] for what, given in others.items()}
        self.inputs: tuple[Input, ...] = ()
        if any(map(are_several, of_x.values())):
            for option, value in {"task": task, "vocabulary": vocabulary, "mean": mean, "std": std}.items():
                _need(value is None, f"{option} has no effect on samples of several arrays. Leave it out")
            of_x, self.inputs = packed(f"{NAME}: ", of_x)
        x, y = self._part("", of_x["x"], y)
        owner, names = _owners("owner", owner, len(x))
        first, last = int(owner.min()), int(owner.max())
        count = last + 1 if clients is None else clients
        fits = count > last if names is None else count == len(names)
        _need(fits, f"clients = {clients}, but owner has {last + 1}: clients start at 0")
        _need(
            clients is not None or first == 0,
            f"owner holds {first} to {last}, so client 0 has no sample. Subtract {first}, or pass clients={count}.",
        )
        self.client_ids = np.arange(count) if names is None else names
        x, y, owner = self._labelled("y", x, y, owner)
        self.x, self.y, self.offsets = _by_owner(x, y, owner, count)
        self.class_names = tuple(map(str, () if class_names is None else class_names))
        named = not self.class_names or self.targets in ("classification", "multilabel")
        _need(named, f"class_names has no effect on targets = {self.targets!r}. Leave it out")
        self.test: Samples = self._labelled("test's y", *self._held_out("test", of_x["test's x"], test[1]))
        self.val: Samples | None = None
        self.val_offsets: Ints | None = None
        if val is not None:
            x, y = self._held_out("val", of_x["val's x"], val[1])
            if len(val) == 3:
                owner, _ = _owners("val's owner", val[2], len(x), names)
                _need(owner.max() < count, f"val's owner holds {owner.max()}, but there are {count} clients")
                x, y, owner = self._labelled("val's y", x, y, owner)
                x, y, self.val_offsets = _by_owner(x, y, owner, count)
            self.val = self._labelled("val's y", x, y)
        try:
            self.description = self._describe(classes, vocabulary, mean, std)
        except ValidationError as error:
            raise UserError(f"{NAME}: {first_problem(error)}") from None
        known, held = self.description.classes, len(self.class_names)
        _need(held in (0, known), f"class_names has {held} names, but there are {known} classes. Name each")
        counts = count * self.description.classes
        _need(
            self.targets != "classification" or counts <= MOST_COUNTS,
            f"{count} clients times {self.description.classes} classes are too many. Number owners and labels from 0 "
            "on without gaps",
        )
        for what, (_, y) in self._parts().items():
            wrong = wrong_target(y, self.description)
            _need(wrong is None, f"a {what} target is {wrong and wrong[1]}")

    def __call__(self) -> ClientArrays:
        """Return itself, so that it can be given instead of a function that makes such arrays."""
        return self

    def __repr__(self) -> str:
        return self.config_name

    @classmethod
    def from_datasets(
        cls,
        train: Any,
        owner: Any,
        *,
        test: Any,
        val: Any = None,
        label: str | None = None,
        inputs: Sequence[str] | None = None,
        **options: Any,
    ) -> ClientArrays:
        """Return the samples of map-style datasets of torch or of Hugging Face's `datasets`, read into memory.

        Parameters
        ----------
        train, test, val : dataset
            Samples are dicts (columns), or tuples (x, y) or (x_1, x_2, …, y). x may be a dict or tuple; y is then
            column "label", or the last one. `val` is optional.
        owner : str, or array (n,)
            Column of each sample's client, read from `val` too if it has this column; or the clients themselves.
        label : str, optional
            Column of the targets, by default label or labels; of tuples the last entry.
        inputs : sequence of str, optional
            Columns that the model receives, by default all others. One column of equal shapes is a single array.
        **options
            Further parameters of `ClientArrays`.

        Raises
        ------
        UserError
            A dataset without these columns, or samples that `ClientArrays` rejects.
        """
        given = {"train": train, "test": test} | ({} if val is None else {"val": val})
        parts = {what: columns_of(f"{NAME}: {what}", dataset) for what, dataset in given.items()}
        columns = parts["train"]
        by_place = all(name.isdigit() for name in columns)
        label = label or ("label" if "label" in columns else "labels")
        label = str(len(columns) - 1) if by_place else label
        roles = {label, owner} if isinstance(owner, str) else {label}
        used = [name for name in columns if name not in roles] if inputs is None else [*inputs]
        for what, part in parts.items():
            wanted = {*used, *roles} if what == "train" else {*used, label}
            absent = sorted(wanted - {*part})
            _need(not absent, f"{what} has no column {absent and absent[0]!r}, but {', '.join(part)}")
        single = len(used) == 1 and not any(isinstance(part[used[0]], list) for part in parts.values())

        def samples(part: Mapping[str, Any]) -> tuple[Any, Any]:
            several = {name: part[name] for name in used}
            return part[used[0]] if single else tuple(several.values()) if by_place else several, part[label]

        options |= {what: samples(part) for what, part in parts.items() if what != "train"}
        if val is not None and isinstance(owner, str) and owner in parts["val"]:
            options["val"] = *options["val"], parts["val"][owner]
        if isinstance(getattr(train, "features", None), Mapping):  # Hugging Face's know the names of classes
            options.setdefault("class_names", getattr(train.features[label], "names", None))
        owner = columns[owner] if isinstance(owner, str) else owner
        return cls(*samples(columns), owner, **options)

    @property
    def config_name(self) -> str:
        """Name of these data in a run's config.toml."""
        return f"{NAME}:{self.name}-{self.digest[:16]}"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything that identifies these data."""
        summed = hashlib.sha256(repr((self.name, self.description, self.offsets.tolist())).encode())
        for array in (array for part in self._parts().values() for array in part):
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
        if not isinstance(shards, int) or shards < 1:
            raise UserError(f"shards = {shards!r} is impossible. Give a whole number of at least 1")
        writer, out = import_module("data_prep.writer"), Path(folder)  # imported by name to avoid a circular import
        shards = min(shards, len(self.offsets) - 1)
        writer.write_again(self.store, self.store, out, shards, 0, "fedmpi.ClientArrays.save", overwrite)
        return out

    def _parts(self) -> dict[str, Samples]:
        """Return features and targets of each part by its name."""
        parts = {"training": (self.x, self.y), "test": self.test}
        return parts if self.val is None else parts | {"validation": self.val}

    def _part(self, what: str, x: Any, y: Any) -> Samples:
        """Return features and targets of a part as they are kept; `what` comes before x and y in messages."""
        x = x if self.inputs else features(f"{NAME}: {what}x", x, self.task)
        y = kept_targets(f"{NAME}: {what}y", self._target(f"{what}y", y, self.targets), self.targets)
        _need(len(x) == len(y), f"{what}y has {len(y)} entries where {what}x has {len(x)}: one for each sample")
        _need(x.size, f"{what}x holds no value: a run needs at least one sample")
        return x, y

    def _target(self, what: str, y: Any, targets: str | None) -> AnyArray:
        """Return targets as an array; sequences end with ignored positions."""
        what = f"{NAME}: {what}"
        return one_column(
            array_of(what, y) if self._longest is None else padded(what, y, self._longest, IGNORED), targets
        )

    def _labelled(self, what: str, *arrays: AnyArray) -> Any:
        """Return features, targets and perhaps owners of the samples that have a class."""
        kept = arrays[1] != IGNORED_BY_TORCH
        if self.targets != "classification" or kept.all():
            return arrays
        _need(kept.any(), f"{what} is {IGNORED_BY_TORCH} for all samples. Give at least one sample a class")
        return tuple(each[kept] for each in arrays)

    def _held_out(self, what: str, x: Any, y: Any) -> Samples:
        """Return features and targets of another part, with samples as those of the training part."""
        x, y = self._part(f"{what}'s ", x, y)
        for name, one, own in (("x", x, self.x), ("y", y, self.y)):
            found, expected = f"{one.dtype} {one.shape[1:]}", f"{own.dtype} {own.shape[1:]}"
            _need(found == expected, f"{what}'s {name} has {found} per sample where that of {name} is {expected}")
        return x, y

    def _classes(self, classes: int | None, vocabulary: int | None) -> int:
        """Return C as given, or as the targets show it."""
        if self.targets not in ("classification", "tokens"):
            return classes or math.prod(self.y.shape[1:])
        least = min(int(y.min()) for _, y in self._parts().values())
        found = max(int(y.max()) for _, y in self._parts().values()) + 1
        _need(
            self.targets == "tokens" or classes is not None or self.class_names or least <= 0,
            f"the labels are {least} to {found - 1}, so class 0 has no sample. Subtract {least} from all labels, or "
            f"pass classes={found}.",
        )
        return classes or max(2, len(self.class_names), found, (vocabulary or 0) if self.targets == "tokens" else 0)

    def _describe(
        self,
        classes: int | None,
        vocabulary: int | None,
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
    ) -> DataDescription:
        shape, dtype = self.x.shape[1:], str(self.x.dtype)
        image, words = len(shape) == 3, 0
        centre: Any = ()
        spread: Any = ()
        if dtype == "int32" and not self.inputs:
            words = max(vocabulary or 0, *(int(x.max()) + 1 for x, _ in self._parts().values()))
        elif mean is not None or std is not None:
            centre = np.atleast_1d(np.asarray(0.0 if mean is None else mean, np.float64)).tolist()
            spread = np.atleast_1d(np.asarray(1.0 if std is None else std, np.float64)).tolist()
        elif dtype == "uint8":  # on the scale of x / 255, as data_prep measures them
            rows = np.arange(len(self.x))
            centre, spread = statistics(lambda rows: self.x[rows], rows, shape[0] if image else 1, 255.0)
        return DataDescription(
            feature_shape=shape,
            dtype=dtype,
            classes=self._classes(classes, vocabulary),
            task="inputs" if self.inputs else self.task or ("image" if image else "vector"),
            vocabulary=words,
            mean=centre,
            std=spread,
            targets=self.targets,
            target_shape=self.y.shape[1:],
            inputs=self.inputs,
        )

    def _manifest(self) -> Manifest:
        clients, samples, classes = len(self.offsets) - 1, len(self.x), self.description.classes
        names = self.class_names or (tuple(map(str, range(classes))) if self.description.labeled else ())
        test_x, test_y = self.test
        return Manifest(
            dataset=self.name,
            partition="given",
            partition_options={},
            seed=0,
            clients=clients,
            samples=samples,
            classes=classes,
            class_names=names,
            description=self.description,
            train=(ShardFile("", self.x.nbytes + self.y.nbytes, self.digest, 0, clients, samples),),
            test=ShardFile("", test_x.nbytes + test_y.nbytes, "", samples=len(test_y)),
            val=None if self.val is None else ShardFile("", self.val[0].nbytes, "", samples=len(self.val[1])),
            empty_clients=int((np.diff(self.offsets) == 0).sum()),
            command="in memory",
            notes=class_notes({part: y for part, (_, y) in self._parts().items()}, names)
            if self.description.labeled
            else (),
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
        found = make()
    if not isinstance(found, ClientArrays):
        raise UserError(f"data.source = {source.name!r} gave {type(found).__name__}. Return fedmpi.{NAME} from it")
    return found


def _kind_of(y: AnyArray) -> str:
    """Return the kind that targets (n, …) look like."""
    if y.ndim < 2:
        return "regression" if y.dtype.kind == "f" and y.size else "classification"
    _need(
        y.ndim > 2 or y.dtype.kind not in "uif" or not np.isin(y, (0, 1)).all(),
        f"y is {y.shape} with zeros and ones alone. Give y.argmax(1) if they are classes, y.astype(bool) if they "
        "are labels, or the kind as targets",
    )
    return {"b": "multilabel", "f": "regression"}.get(y.dtype.kind, "tokens")


def features(what: str, given: Any, task: Modality | None) -> AnyArray:
    """Return samples as they are kept: uint8, int32 (token ids) or float32; `what` names them in error messages."""
    x = array_of(what, given)
    found = f"{what} is {x.dtype} {x.shape}"
    if x.dtype.kind not in "buif" or x.ndim < 2:
        raise UserError(f"{found}; it must hold numbers, a row of them for each sample")
    if task is None and x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        raise UserError(
            f"{found}, and its last axis may hold the channels of images. Give np.moveaxis(x, 3, 1), which is "
            '(n, C, H, W), or task="image" if it is that already'
        )
    if task == "text":
        if x.dtype.kind not in "ui" or x.min(initial=0) < 0 or x.max(initial=0) > np.iinfo(np.int32).max:
            raise UserError(f'task = "text" needs token ids from 0 on, but {found} or beyond them')
        return np.ascontiguousarray(x, np.int32)
    if task is None and x.dtype.kind in "ui" and x.dtype != np.uint8:
        raise UserError(f'{what} holds {x.dtype} numbers. Set task = "text" (token ids), "vector" or "image"')
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, np.uint8 if x.dtype == np.uint8 else np.float32)
    if not np.isfinite(x).all():
        raise UserError(f"{what} holds numbers that are not finite in 32 bits. Remove those samples")
    return x


def _owners(what: str, given: Any, samples: int, known: AnyArray | None = None) -> tuple[Ints, AnyArray | None]:
    """Return the client of every sample, and the clients' names in order where the owners are names."""
    owner = array_of(f"{NAME}: {what}", given)
    _need(owner.shape == (samples,), f"{what} is {owner.dtype} {owner.shape}, but there are {samples} samples")
    if owner.dtype.kind in "ui" and known is None:
        fits = 0 <= owner.min() <= owner.max() < MOST_CLIENTS
        _need(fits, f"{what} holds {owner.min()} to {owner.max()}: number clients from 0 on, or name them by texts")
        return owner.astype(np.int64), None
    named = all(isinstance(name, str | bytes | int) for name in owner.tolist())
    _need(named, f"{what} holds {owner.dtype} values: give whole numbers from 0 on, or names")
    names, index = np.unique(owner.astype(str), return_inverse=True)
    if known is None:
        return index.astype(np.int64), names
    unknown = np.setdiff1d(names, known)
    _need(not len(unknown), f"{what} holds {' '.join(unknown[:1])!r}, who owns none of x")
    return np.searchsorted(known, names)[index].astype(np.int64), known


def _by_owner(x: AnyArray, y: AnyArray, owner: Ints, clients: int) -> tuple[AnyArray, AnyArray, Ints]:
    """Return read-only samples client after client, those of one client in the given order, and the offsets."""
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        x, y = x[order], y[order]
    x, y = x.view(), y.view()
    x.flags.writeable = y.flags.writeable = False
    return x, y, offsets_of(np.bincount(owner, minlength=clients))
