"""Data sets before partitioning: how they are described and read, and what a reader passes to the writer."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from data_prep.partitions import Count
from fedmpi.common.errors import UserError
from fedmpi.common.options import options_of
from fedmpi.common.registry import Component
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.schema import DataDescription, Modality, scales_of
from fedmpi.data.schema import Understood as Understood
from fedmpi.data.statistics import STATISTICS_ROWS, statistics

UNKNOWN = "not stated"
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class RawDataset:
    """One data set as read from its official files; n training rows, C classes."""

    name: str  # The data set's name on the command line, e.g. ``"mnist"``
    task: Literal["image", "text", "vector"]  # Kind of a row of features
    # C; labels are in 0 ... C-1. For targets that are not classes, the values of an output: labels, numbers, or the
    # classes
    # of each position
    classes: int
    class_names: tuple[str, ...]  # C names, in label order; may be empty if targets are not classes
    # Shape of one row as stored and as models see it: (channels, height, width) for images (a grey image of 28 x 28 is
    # (1, 28, 28)), (length,) for tokens and vectors
    feature_shape: tuple[int, ...]
    dtype: Literal["uint8", "float32", "int32"]  # Smallest dtype that represents the features faithfully
    # Normalization, one value for each channel or column, or for all, of x / 255 (uint8) or x (float32); empty for text
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # (n,): Labels of the training rows. For targets that are not classes: the values that partition schemes may use
    # instead, or zeros
    labels: Ints
    users: Ints | None  # (n,): Natural client of every training row, 0 ... U-1, if the data set names one
    user_names: tuple[str, ...] | None  # U names of the users
    # ``read(rows)`` gives the features (r, \*feature_shape) of the given training rows (int64, in any order); its
    # memory is bounded by the requested rows
    read: Callable[[Ints], AnyArray]
    # (t, \*feature_shape): Test part; test_y is (t, \*target_shape) if targets are not classes. Empty if the files
    # have no test part: `data_prep.holdout` then takes one from the training rows
    test_x: AnyArray
    test_y: AnyArray
    skipped: int  # Training and test rows of the official files that could not be read
    licence: str  # Terms of use and citation
    citation: str
    vocabulary: tuple[str, ...] = ()  # The words of the token ids, for text
    # (V, dim): Pretrained word vectors in the order of the vocabulary, stored once beside the shards
    vectors: npt.NDArray[np.float32] | None = None
    extras: dict[str, AnyArray] = field(default_factory=dict)  # Further arrays stored once beside the shards
    notes: tuple[str, ...] = ()  # Notes for the user about the data, for the manifest
    superclasses: Ints | None = None  # (C,): Superclass of every class, for the partition pachinko
    # (n,): Further numbers of the training rows beside their features, by name, for the partition attribute
    attributes: dict[str, Floats] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()  # Names of the numbers of a vector; empty if they have none
    # (n,): Labels of the clients' training samples, if they differ from `labels`, the true ones
    given_labels: Ints | None = None
    # ``refit(rows)`` is this data set with the normalization or vocabulary of these training rows alone; None if
    # neither depends on the rows
    refit: Callable[[Ints], RawDataset] | None = None
    targets: str = "classification"  # Kind of targets (`fedmpi.data.schema.TARGETS`)
    # Shape of one row's target: (L,) of tokens, (C,) of labels, () or any other of numbers
    target_shape: tuple[int, ...] = ()
    # ``read_targets(rows)`` gives the targets (r, \*target_shape) of the given training rows, like `read` for the
    # features: whole numbers of tokens (-1 at ignored positions), 0 and 1 or numbers between them of labels, floats of
    # a regression. None if they are the labels
    read_targets: Callable[[Ints], AnyArray] | None = None
    understood: Understood = Understood()  # The reader's interpretation of the files
    groups: Ints | None = None  # (n,): Group of every training row, 0 ... G-1, if `ReadOptions.split` names a column

    @property
    def has_classes(self) -> bool:
        """True if each row's target is one class."""
        return self.targets == "classification"

    @property
    def labeled(self) -> bool:
        """True if partition schemes may use the labels."""
        return self.has_classes or bool(np.any(self.labels))

    @property
    def label_classes(self) -> int:
        """Number of classes of the labels: C if each row's target is one class."""
        return self.classes if self.has_classes else int(self.labels.max(initial=0)) + 1

    def targets_of(self, rows: Ints) -> AnyArray:
        """Return the targets of training rows (r, \\*target_shape)."""
        return self.labels[rows] if self.read_targets is None else np.asarray(self.read_targets(rows))

    def attribute(self, name: str) -> Floats:
        """Return a number for every training row, float64 (n,), for the partition `attribute`."""
        if name in self.attributes:
            return np.asarray(self.attributes[name], np.float64)
        measures: dict[str, Callable[[AnyArray], AnyArray]] = {
            "mean": lambda x: x.mean(axis=1, dtype=np.float64),
            "std": lambda x: x.std(axis=1, dtype=np.float64),
        }
        if self.task == "text":
            measures = {"length": lambda x: (x != 0).sum(axis=1)}
        if name in self.feature_names:
            column = self.feature_names.index(name)
            measures[name] = lambda x: x[:, column]
        elif name not in measures:
            known = [*self.attributes, *measures, *self.feature_names]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:12])}"
            raise UserError(f"{self.name} has no attribute {name!r}: {hint}")
        found = np.empty(len(self.labels))
        step = max(1, _CHUNK_BYTES // row_bytes(self))
        for low in range(0, len(found), step):
            index = np.arange(low, min(low + step, len(found)))
            found[index] = measures[name](np.asarray(self.read(index)).reshape(len(index), -1))
        return found


def described(description: DataDescription) -> dict[str, Any]:
    """Return the fields of `RawDataset` that describe prepared data."""
    names = ("task", "classes", "feature_shape", "dtype", "mean", "std", "targets", "target_shape")
    return {name: getattr(description, name) for name in names}


def row_bytes(raw: RawDataset) -> int:
    """Return the bytes of the features of one row."""
    return int(np.prod(raw.feature_shape, dtype=np.int64)) * np.dtype(raw.dtype).itemsize


def measured(raw: RawDataset, among: Ints | None = None, at_most: int = STATISTICS_ROWS) -> RawDataset:
    """Return the data set with the mean and standard deviation of its training rows.

    These are per channel for images, per column for float vectors (d,) and series (T, C), and over all bytes for uint8
    vectors, which share one scale.
    """
    again = replace(raw, refit=lambda kept: measured(raw, kept, at_most))
    if among is None and not len(raw.test_y):
        return again
    rows = np.arange(len(raw.labels)) if among is None else among
    image = len(raw.feature_shape) == 3
    columns = not (image or raw.dtype == "uint8")
    channels = scales_of(raw.feature_shape) if image or columns else 1
    mean, std = statistics(raw.read, rows, channels, 255.0 if raw.dtype == "uint8" else 1.0, at_most, columns)
    return replace(again, mean=mean, std=std)


def _pixels(given: Any) -> Any:
    """Parse width and height of 64x48 or 64."""
    width, _, height = str(given).lower().partition("x")
    return (width, height or width) if isinstance(given, str) else given


Pixels = Annotated[tuple[Count, Count], BeforeValidator(_pixels)]
Columns = Annotated[tuple[str, ...], BeforeValidator(lambda text: text.split(",") if isinstance(text, str) else text)]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of readers; a data set takes the options that it names in `DataSet.options`.

    Parameters
    ----------
    split : str
        Your data: what is held out for testing if the files have no test part: rows, users with all their rows, or a
        column whose values are held out with all their rows. Image folders: folders.
    length : int
        Texts: tokens kept of each, by default 30; shorter texts are padded. Lists of tokens: by default all.
    vocabulary : int
        Texts: words kept, the most frequent first.
    vectors : Path
        Texts: GloVe vectors to store.
    label : str
        Tables: label column, or columns A,B.
    user : str
        Tables: column of users; by default user, if there is one.
    features : tuple of str
        Tables: columns A,B that samples are made of; by default suitable ones.
    delimiter : str
        CSV: what separates columns, e.g. tab; by default detected.
    decimal : {".", ","}
        CSV: the decimal sign; by default detected.
    encoding : str
        CSV: encoding of the text, e.g. latin-1; by default UTF-8.
    targets : {"classification", "tokens", "multilabel", "regression"}
        Arrays, tables: one class per row, one per position, 0 or 1 each, or numbers; by default what they look like.
    task : {"image", "text", "vector"}
        Arrays, tables: what a sample is, if its values do not determine it.
    channels : {"first", "last"}
        Arrays: channel axis of images, (n, C, h, w) or (n, h, w, C), if their shape does not determine it.
    image_size : (int, int)
        Image folders, tables: resize to WIDTHxHEIGHT, or N to N x N; by default all must have one size.
    """

    split: str = "rows"
    length: Count | None = None
    vocabulary: Count = 20_000
    vectors: Path | None = None
    label: str = "label"
    user: str | None = None
    features: Columns | None = None
    delimiter: str | None = None
    decimal: Literal[".", ","] | None = None
    encoding: str | None = None
    targets: Literal["classification", "tokens", "multilabel", "regression"] | None = None
    task: Modality | None = None
    channels: Literal["first", "last"] | None = None
    image_size: Pixels | None = None

    @property
    def tokens(self) -> int:
        """Tokens kept of a text."""
        return self.length or 30


READING = options_of(ReadOptions)[0]
TEXT_OPTIONS = frozenset({"length", "vocabulary", "vectors"})


@dataclass
class Tally:
    """Counts of the skipped rows: unreadable ones (rejected when strict) and those dropped by the data set's rule."""

    strict: bool = False
    unreadable: int = 0
    first: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def bad(self, where: str, why: str, rows: int = 1) -> None:
        """Count a row, or several, that cannot be read."""
        if self.strict:
            raise UserError(f"{where}: {why}; mend or remove it, or run without --strict to leave such rows out")
        self.unreadable += rows
        self.first = self.first or f"{where}: {why}"

    def drop(self, rule: str) -> None:
        """Count a row that the data set's or the user's rule skips; not an error of the file, so never rejected."""
        self.dropped[rule] = self.dropped.get(rule, 0) + 1

    def note(self, text: str) -> None:
        """Keep a sentence for the report."""
        self.notes.append(text)

    @property
    def first_bad(self) -> str:
        """The first unreadable row as a sentence; empty if there is none."""
        return f" The first: {self.first}." if self.first else ""


@dataclass(frozen=True)
class Source:
    """One file at its official address."""

    url: str  # The address
    checksum: str  # "sha256:..." or "md5:...", as published
    members: tuple[str, ...] = ()  # Files to extract from an archive; empty extracts all

    @property
    def filename(self) -> str:
        """The last part of the address."""
        return Path(urlsplit(self.url).path).name


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Data set that data_prep can read; by default the user's own."""

    name: str  # Name on the command line
    samples: str = "yours"  # Size of the official set, for people
    classes: str = "yours"  # Number of classes, for people
    licence: str = "yours"  # Printed before anything is read
    citation: str = "yours"
    page: str = ""  # Page to get the files from
    files: str = ""  # Required content of `--raw`, for the error message that requests it
    reader: Callable[[DataSet, Path, ReadOptions, Tally], RawDataset]
    sources: tuple[Source, ...] = ()  # Official addresses with checksums; empty if the user must download the files
    options: frozenset[str] = frozenset()  # Fields of ReadOptions that the reader takes
    raw: Literal["folder", "file", "none"] = "folder"  # Kind of path that `--raw` names
    own: Component | None = None  # Custom reader, which has its options

    @property
    def reading(self) -> Component:
        """The options of reading it, as those of a component."""
        return Component(
            "data set", self.name, ReadOptions, options=tuple(o for o in READING if o.name in self.options)
        )

    @property
    def size(self) -> str:
        """Samples and classes of the official set, for people."""
        parts = " (train + test)" if "+" in self.samples else ""
        return self.samples if self.samples == self.classes else f"{self.samples}{parts}, {self.classes} classes"

    def read(self, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
        """Read the official files below `raw`."""
        return self.reader(self, raw, options, tally)

    def of(self, tally: Tally, **facts: Any) -> RawDataset:
        """Return the raw data set of a reader's findings: by default without users and normalization."""
        said = {"name": self.name, "licence": self.licence, "citation": self.citation, "skipped": tally.unreadable}
        return RawDataset(**{**said, "mean": (), "std": (), "users": None, "user_names": None, **facts})

    def images(
        self,
        tally: Tally,
        names: tuple[str, ...],
        train: tuple[Callable[[Ints], AnyArray], Ints],
        test: tuple[AnyArray, Ints],
        **facts: Any,
    ) -> RawDataset:
        """Return the raw data set of byte images: training images by row, and the test part, each with labels."""
        shape = train[0](np.zeros(0, np.int64)).shape[1:]
        about: dict[str, Any] = {"task": "image", "dtype": "uint8", "feature_shape": shape, "classes": len(names)}
        parts = {"read": train[0], "labels": train[1], "test_x": test[0], "test_y": test[1]}
        return self.of(tally, **about, **parts, class_names=names, **facts)


def not_official(data: RawDataset, tally: Tally) -> RawDataset:
    """Mark data in an official set's format as unofficial: unknown licence, measured mean and standard deviation."""
    tally.note(
        f"these are not {data.name}'s own files, but another data set in their format ({data.name}-format). Mean and "
        "standard deviation are measured; the licence and the citation above are not theirs"
    )
    other = replace(data, name=f"{data.name}-format", licence=UNKNOWN, citation=UNKNOWN, notes=tuple(tally.notes))
    return measured(other)


def natural_clients(users: Ints, names: tuple[str, ...], tally: Tally) -> tuple[Ints | None, tuple[str, ...] | None]:
    """Return the users of the training rows as clients, int64 (n,), and their names; None if a row has no user (-1)."""
    if nobody := int((users < 0).sum()):
        tally.note(f"{nobody:,} of {len(users):,} training rows name no user, so the data have no natural clients")
        return None, None
    return compact(users, names)


def compact(codes: Ints, names: tuple[str, ...]) -> tuple[Ints, tuple[str, ...]]:
    """Renumber codes so that only the used names remain, in their old order."""
    used, inverse = np.unique(codes, return_inverse=True)
    return inverse.astype(np.int64), tuple(names[code] for code in used)
