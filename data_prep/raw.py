"""Data sets before partitioning: how they are described and read, and what a reader passes to the writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, ValidationError

from data_prep.partitions import Count
from fedmpi.common.apportionment import offsets_of
from fedmpi.common.errors import UserError
from fedmpi.common.options import options_of
from fedmpi.common.registry import Component
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import DataDescription, Input, Modality, first_problem, scales_of
from fedmpi.data.schema import Understood as Understood
from fedmpi.data.statistics import STATISTICS_ROWS, statistics

UNKNOWN = "not stated"


@dataclass(frozen=True)
class RawDataset:
    """One data set as read from its files: n samples, by row; some rows are for training, others for testing."""

    name: str  # The data set's name on the command line, e.g. ``"mnist"``
    task: Literal["image", "text", "vector", "inputs"]  # Kind of a sample
    classes: int  # C. For targets that are not classes: the values of an output
    class_names: tuple[str, ...]  # C names, in label order; may be empty if targets are not classes
    # Shape of one sample as stored and as models see it: (channels, height, width) for images (a grey image of 28 x 28
    # is (1, 28, 28)), (length,) for tokens and vectors
    feature_shape: tuple[int, ...]
    dtype: Literal["uint8", "float32", "int32"]  # Smallest dtype that represents the features faithfully
    # ``read(rows)`` gives the features (r, *feature_shape) of rows (int64, in any order); its memory is bounded by the
    # requested rows
    read: Callable[[Ints], AnyArray]
    # (n, *target_shape): Classes 0 ... C-1 (n,), tokens (n, L), -1 at ignored positions, labels (n, C), or numbers
    y: AnyArray
    train: Ints  # Rows for training, in ascending order
    test: Ints  # Rows for testing; without any, `data_prep.holdout` takes some of the rows for training
    # Normalization, one value for each channel or column, or for all, of x / 255 (uint8) or x (float32); empty for text
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    users: Ints | None = None  # (n,): Natural client of every row, -1 if unknown, if the data set names any
    user_names: tuple[str, ...] | None = None  # Names of the users
    skipped: int = 0  # Samples of the files that could not be read
    licence: str = ""  # Terms of use and citation
    citation: str = ""
    vocabulary: tuple[str, ...] = ()  # The words of the token ids, for text
    # (V, dim): Pretrained word vectors in the order of the vocabulary, stored once beside the shards
    vectors: npt.NDArray[np.float32] | None = None
    extras: dict[str, AnyArray] = field(default_factory=dict)  # Further arrays stored once beside the shards
    notes: tuple[str, ...] = ()  # Notes for the user about the data, for the manifest
    # ``fit(data, rows)`` is `data` with the normalization or vocabulary of these rows for training; None if fixed
    fit: Callable[[RawDataset, Ints], RawDataset] | None = None
    targets: str = "classification"  # Kind of targets (`fedmpi.data.schema.TARGETS`)
    understood: Understood = Understood()  # The reader's interpretation of the files
    inputs: tuple[Input, ...] = ()  # The arrays of a sample, if it has several: `read` gives them packed
    groups: Ints | None = None  # (n,): Group of every row, if `ReadOptions.split` names a column

    @property
    def has_classes(self) -> bool:
        """True if each row's target is one class."""
        return self.targets == "classification"

    @property
    def description(self) -> DataDescription:
        """The data set as models need to know it."""
        try:
            return DataDescription(
                feature_shape=self.feature_shape,
                dtype=self.dtype,
                classes=self.classes,
                task=self.task,
                vocabulary=len(self.vocabulary),
                mean=self.mean,
                std=self.std,
                targets=self.targets,
                target_shape=self.y.shape[1:],
                inputs=self.inputs,
            )
        except ValidationError as error:
            raise UserError(f"the data set {self.name} cannot be described: {first_problem(error)}") from None

    def fitted(self, rows: Ints | None = None) -> RawDataset:
        """Return the data set with the normalization or vocabulary of some rows, by default those for training."""
        return self if self.fit is None else self.fit(self, self.train if rows is None else rows)


def rows_of(*parts: AnyArray) -> Callable[[Ints], AnyArray]:
    """Return a function that reads rows of some arrays (n_i, *shape) that follow each other."""
    if len(shapes := {part.shape[1:] for part in parts}) > 1:
        raise UserError(f"samples have the shapes {', '.join(map(str, shapes))}. Give files that belong together")
    starts = offsets_of(np.array([len(part) for part in parts]))

    def read(rows: Ints) -> AnyArray:
        found = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        for part, first, last in zip(parts, starts, starts[1:], strict=False):
            mine = (first <= rows) & (rows < last)
            found[mine] = part[rows[mine] - first]
        return found

    return read


def row_bytes(raw: RawDataset) -> int:
    """Return the bytes of the features of one row."""
    return int(np.prod(raw.feature_shape, dtype=np.int64)) * np.dtype(raw.dtype).itemsize


def measure(data: RawDataset, rows: Ints, at_most: int = STATISTICS_ROWS) -> RawDataset:
    """Return the data set with the mean and standard deviation of some rows, measured on `at_most` of them.

    These are per channel for images, per column for float vectors (d,) and series (T, C), and over all bytes for uint8
    vectors, which share one scale.
    """
    image = len(data.feature_shape) == 3
    columns = not (image or data.dtype == "uint8")
    channels = scales_of(data.feature_shape) if image or columns else 1
    mean, std = statistics(data.read, rows, channels, 255.0 if data.dtype == "uint8" else 1.0, at_most, columns)
    return replace(data, mean=mean, std=std)


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
        column whose values are held out with all their rows.
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
    inputs : tuple of str
        Tables: columns A,B that the model receives as separate arrays.
    delimiter : str
        CSV: what separates columns, e.g. tab; by default detected.
    encoding : str
        CSV: encoding of the text, e.g. latin-1; by default UTF-8.
    targets : {"classification", "tokens", "multilabel", "regression"}
        Arrays, tables: one class per row, one per position, 0 or 1 each, or numbers; by default what they look like.
    task : {"image", "text", "vector"}
        Arrays, tables: what a sample is, if its values do not determine it.
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
    inputs: Columns | None = None
    delimiter: str | None = None
    encoding: str | None = None
    targets: Literal["classification", "tokens", "multilabel", "regression"] | None = None
    task: Modality | None = None
    image_size: Pixels | None = None

    @property
    def tokens(self) -> int:
        """Tokens kept of a text."""
        return self.length or 30


READING = options_of(ReadOptions)
TEXT_OPTIONS = frozenset({"length", "vocabulary", "vectors"})


@dataclass
class Tally:
    """Counts of the skipped rows: unreadable ones (rejected when strict) and those dropped by the data set's rule."""

    strict: bool = False
    unreadable: int = 0
    first: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def bad(self, where: str, why: str) -> None:
        """Count a row that cannot be read."""
        if self.strict:
            raise UserError(f"{where}: {why}; mend or remove it, or run without --strict to leave such rows out")
        self.unreadable += 1
        self.first = self.first or f"{where}: {why}"

    def drop(self, rule: str, count: int = 1) -> None:
        """Count rows that a rule of the data set or the user skips; they are not errors of the file."""
        self.dropped[rule] = self.dropped.get(rule, 0) + count

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
        options = {name: field for name, field in READING.items() if name in self.options}
        return Component("data set", self.name, own=options)

    @property
    def size(self) -> str:
        """Samples and classes of the official set, for people."""
        parts = " (train + test)" if "+" in self.samples else ""
        return self.samples if self.samples == self.classes else f"{self.samples}{parts}, {self.classes} classes"

    def read(self, raw: Path, options: ReadOptions, tally: Tally) -> RawDataset:
        """Read the files below `raw`; the data set has the notes of `tally`."""
        data = self.reader(self, raw, options, tally)
        dropped = (f"left out: {count:,} {rule}" for rule, count in tally.dropped.items())
        return replace(data, skipped=data.skipped + tally.unreadable, notes=(*data.notes, *dropped, *tally.notes))

    def of(self, train_y: AnyArray, test_y: AnyArray, **facts: Any) -> RawDataset:
        """Return the data set of samples for training and testing that follow each other."""
        y, rows = np.concatenate([train_y, test_y]), np.arange(len(train_y) + len(test_y))
        parts = {"y": y, "train": rows[: len(train_y)], "test": rows[len(train_y) :]}
        return RawDataset(**{"name": self.name, "licence": self.licence, "citation": self.citation, **parts, **facts})

    def images(
        self, names: tuple[str, ...], read: Callable[[Ints], AnyArray], train_y: Ints, test_y: Ints, **facts: Any
    ) -> RawDataset:
        """Return the data set of byte images of classes with these names."""
        shape = read(np.zeros(0, np.int64)).shape[1:]
        about: dict[str, Any] = {"task": "image", "dtype": "uint8", "feature_shape": shape, "classes": len(names)}
        return self.of(train_y, test_y, read=read, class_names=names, **about, **facts)


def not_official(data: RawDataset, tally: Tally) -> RawDataset:
    """Mark data in an official set's format as unofficial: unknown license, measured mean and standard deviation."""
    tally.note(
        f"these are not {data.name}'s own files, but another data set in their format ({data.name}-format). Mean and "
        "standard deviation are measured; the license and the citation above are not theirs"
    )
    return replace(data, name=f"{data.name}-format", licence=UNKNOWN, citation=UNKNOWN, fit=measure)
