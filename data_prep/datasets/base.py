"""What a data set is to data_prep: its description, the options of its reader, and the count of rows left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from data_prep.raw import RawDataset, measured
from data_prep.sources import Source
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Part
from fedmpi.data.schema import Modality

UNKNOWN = "not stated"


@dataclass(frozen=True)
class ReadOptions:
    """What a reader may be told; a data set takes the options that it names in `DataSet.options`."""

    length: int = 30  # Tokens kept of a text; shorter texts are padded with 0
    vocabulary: int = 20_000  # Words kept, the most frequent first; padding and unknown come on top
    vectors: Path | None = None  # Pretrained word vectors, a GloVe text file
    files: tuple[str, ...] = ()  # Names of the files to read, where a folder holds several
    label: str = "label"  # Column that holds the label, or several with commas between
    task: Modality | None = None  # What the arrays mean, where their dtype does not say
    # Which axis of four-dimensional arrays holds the channels, where their shape does not say
    channels: Literal["first", "last"] | None = None
    skip_unlabelled: bool = False  # Rows of the user's own data without a label are left out, not refused
    numbers_are_classes: bool = False  # Every distinct number among labels is a class, fractions too
    # (int, int): Width and height that images are resized to; None keeps their size, which must then be the same for
    # all
    image_size: tuple[int, int] | None = None
    skip_odd_sizes: bool = False  # Images of another size than most are left out, not refused
    # What is held out for testing where the files have no test part: "rows", "users" with all their rows, "texts" with
    # all rows that have them, or the column whose values are held out with all their rows
    split: str = "rows"
    keep_duplicates: bool = False  # Reviews that say the same of the same thing by the same person are all kept
    # What the user's own targets are (`fedmpi.data.schema.TARGETS`); None takes whole numbers or texts (n,) for
    # classes, and tells targets of several values by their kind of numbers
    targets: Literal["classification", "tokens", "multilabel", "regression"] | None = None
    # Column that names the natural client of a row; None takes a column "user", where there is one
    user: str | None = None
    features: tuple[str, ...] | None = None  # Columns that the samples are made of; None takes what suits
    users: int | None = None  # Users read of each part, chosen once at random; None reads all
    per_user: int | None = None  # Samples read of each user, the first ones; None reads all
    tags: int = 500  # Labels kept, the most frequent ones
    delimiter: str | None = None  # What separates the columns of a CSV file; None detects it
    decimal: Literal[".", ","] | None = None  # What separates the decimals of a number in a CSV file; None detects it
    encoding: str | None = None  # Of a CSV file; None is UTF-8


@dataclass
class Tally:
    """Counts the rows that are left out: unreadable ones (refused when strict) and those the data set's rule drops."""

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

    def drop(self, rule: str, rows: int = 1) -> None:
        """Count rows that the data set's rule, or the user's, leaves out; no fault of the file, so never refused."""
        self.dropped[rule] = self.dropped.get(rule, 0) + rows

    def note(self, text: str) -> None:
        """Keep a sentence for the report."""
        self.notes.append(text)


def not_official(data: RawDataset, tally: Tally) -> RawDataset:
    """Data in an official set's format that are not this set's: of unknown licence, mean and deviation measured."""
    tally.note(
        f"these are not {data.name}'s own files, but another data set in their format ({data.name}-format). Mean and "
        "standard deviation are measured; the licence and the citation above are not theirs"
    )
    other = replace(data, name=f"{data.name}-format", licence=UNKNOWN, citation=UNKNOWN, notes=tuple(tally.notes))
    return measured(other)


Reader = Callable[[Path, ReadOptions, Tally], RawDataset]


@dataclass(frozen=True)
class DataSet:
    """One data set that data_prep can read."""

    name: str  # Its name on the command line
    samples: str  # Size of the official set, for people
    classes: str  # Number of classes, for people
    licence: str  # Printed before anything is read
    citation: str
    page: str  # Where a person gets the files
    files: str  # What `--raw` must hold, for the error message that asks for it
    read: Reader  # read(folder, options, tally) -> RawDataset
    sources: tuple[Source, ...] = ()  # Official addresses with checksums; empty: must be fetched by hand
    options: frozenset[str] = frozenset()  # Fields of ReadOptions that the reader takes
    raw: Literal["folder", "file", "none"] = "folder"  # What `--raw` names
    own: Part | None = None  # The reader of the user's own, which has options of its own
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Of options, where they are not those of ReadOptions


TEXT_OPTIONS = frozenset({"length", "vocabulary", "vectors"})
SEQUENCE_OPTIONS = frozenset({"length", "vocabulary", "vectors", "users", "per_user"})
