"""The shard schema: file names, names of datasets, and the manifest that describes a folder.

"fedmpi-shards/1" is a folder with one class per sample, "fedmpi-shards/2" one with any other targets, "fedmpi-shards/3"
one whose samples have several arrays. The schema is all that data_prep (which writes) and fedmpi (which reads) share;
see docs/reference/shards.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import Field, TypeAdapter, ValidationError

from fedmpi.common.errors import UserError, shown
from fedmpi.common.options import reason_of
from fedmpi.common.task_kinds import IGNORED, TARGETS
from fedmpi.common.types import AnyArray

SCHEMA, SCHEMA_OF_TARGETS, SCHEMA_OF_INPUTS = (f"fedmpi-shards/{version}" for version in (1, 2, 3))
MANIFEST = "manifest.json"
TEST = "test.h5"
VALIDATION = "val.h5"
EXTRAS = "extras.h5"
VOCABULARY = "vocabulary.txt"
VECTORS = "vectors.npy"
PREPARING = ".preparing"  # marks a folder whose manifest is not written yet
FEATURES, LABELS, OFFSETS, CLIENT_IDS, CLASS_COUNTS = "x", "y", "offsets", "client_ids", "class_counts"
CLASSES_NAMED = 10
SMALLEST_STD = 1e-37  # its inverse is finite in single precision
TEXTS_AND_FILES = {"command", "notes", "licence", "citation", "understood"}
TEXTS_AND_FILES |= {"train", "test", "val", "extras", "words", "vectors"}
"""Entries of a manifest that do not identify the data, or do so by their checksums."""
REPREPARE = "prepare it again with python -m data_prep"

Modality = Literal["image", "text", "vector"]
"""Kind of a sample."""
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Mean = Annotated[float, Field(allow_inf_nan=False)]
Std = Annotated[float, Field(gt=SMALLEST_STD, allow_inf_nan=False)]


def shard_name(index: int) -> str:
    """File name of a training shard."""
    return f"train-{index:05d}.h5"


def scales_of(feature_shape: tuple[int, ...]) -> int:
    """Return how many values have a separate mean and std: the channels of an image, else a sample's last axis."""
    return feature_shape[0] if len(feature_shape) == 3 else feature_shape[-1]


@pydantic.dataclasses.dataclass(frozen=True)
class Input:
    """One of several arrays of a sample, as a model receives it."""

    name: str  # Argument of the model's forward; "0", "1", … for positions
    shape: tuple[Size, ...]  # Shape without the batch axis; () for one number
    dtype: Annotated[str, Field(pattern="^(int64|float32|bool)$")]
    vocabulary: Count = 0  # One more than the largest whole number; 0 for floats and booleans

    @property
    def values(self) -> int:
        """Return the number of values per sample."""
        return math.prod(self.shape)


@pydantic.dataclasses.dataclass(frozen=True)
class DataDescription:
    """Everything a model builder needs to know of a data set; one that no data can have raises ValidationError."""

    # Shape of one sample: (channels, height, width), (length,) tokens, or (features,); of several arrays, (all values,)
    feature_shape: Annotated[tuple[Size, ...], Field(min_length=1)]
    dtype: Annotated[str, Field(pattern="^(uint8|float32|int32)$")]  # Stored dtype of the features
    classes: Size  # C, the values of an output: classes (of each position where targets are tokens), labels, or numbers
    task: Modality | Literal["inputs"]  # "inputs": several arrays, packed as in `fedmpi.data.inputs`
    vocabulary: Count  # Number of token ids; 0 unless task is "text"
    # Per channel of an image, or per column of a vector (d,) or series (T, C), or one for all; applied to x / 255
    # (uint8) or x (float32); empty for token ids
    mean: tuple[Mean, ...]
    std: tuple[Std, ...]
    targets: Annotated[str, Field(pattern=f"^({'|'.join(TARGETS)})$")] = "classification"  # Meaning of y
    # Shape of one sample's y: () for a class or a single number, (L,) for tokens, (C,) for labels
    target_shape: tuple[Size, ...] = ()
    inputs: tuple[Input, ...] = ()  # The arrays of a sample, if it has several

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> DataDescription:
        shape, scales, text = self.target_shape, scales_of(self.feature_shape), self.task == "text"
        fits = {
            "classification": shape == (),
            "tokens": len(shape) == 1,
            "multilabel": shape == (self.classes,),
            "regression": math.prod(shape) == self.classes,
        }
        if not fits[self.targets]:
            raise ValueError(f"targets of shape {shape} are no {self.targets} of {self.classes} values")
        if (text or self.task == "inputs") != (self.dtype == "int32") or (text and self.vocabulary < 1):
            raise ValueError("texts are token ids of a vocabulary, int32, and nothing else is")
        if self.task == "inputs" and self.feature_shape != (sum(one.values for one in self.inputs),):
            raise ValueError("the arrays of a sample do not add up to its values")
        if any(len(values) not in (0, 1, scales) for values in (self.mean, self.std)):
            raise ValueError(f"mean and std are one number, or one for each of {scales} channels or columns")
        return self

    @property
    def labeled(self) -> bool:
        """True if every sample has one class."""
        return self.targets == "classification"

    @property
    def counted(self) -> bool:
        """True if y contains numbers of classes, int64 in memory; otherwise numbers, float32."""
        return self.targets in ("classification", "tokens")

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of a model's outputs for one sample: (C,), or (L, C) where targets are tokens."""
        return (*self.target_shape, self.classes) if self.targets == "tokens" else (self.classes,)

    @property
    def sample(self) -> str:
        """One sample, in words."""
        if self.inputs:
            shapes = [" x ".join(map(str, one.shape)) or "1" for one in self.inputs]
            return ", ".join(f"{one.name}: {shape} {one.dtype}" for one, shape in zip(self.inputs, shapes, strict=True))
        shape = " x ".join(map(str, self.feature_shape))
        words = f", from a vocabulary of {self.vocabulary:,}" if self.task == "text" else ""
        return f"{self.task} of {shape} values, {self.dtype}{words}"

    @property
    def target(self) -> str:
        """The target of one sample, in words."""
        shape = " x ".join(map(str, self.target_shape)) or "1"
        return {
            "classification": f"one of {self.classes:,} classes",
            "tokens": f"the token at each of {shape} positions, one of {self.classes:,}",
            "multilabel": f"{shape} labels, each true or false",
            "regression": f"{shape} number{'' if shape == '1' else 's'}",
        }[self.targets]

    def takes_outputs(self, shape: tuple[int, ...], samples: int) -> bool:
        """Check whether outputs have the shape of the task; numbers may also have the shape of the targets."""
        own = self.targets == "regression" and shape[1:] == self.target_shape
        return shape[:1] == (samples,) and (own or shape[1:] == self.output_shape)


@dataclass(frozen=True)
class ShardFile:
    """One file of a folder as the manifest lists it; the client fields are 0 for files without clients."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    bytes: Count
    sha256: str
    first_client: Count = 0
    clients: Count = 0
    samples: Count = 0


@dataclass(frozen=True)
class Understood:
    """A reader's interpretation of the user's files: printed by every preparation, stored in the manifest, shown by
    `inspect`.
    """

    sample: str = ""  # Parts of one sample, e.g. ``"3 numbers: age, income, height"``
    target: str = ""  # Source of the target, e.g. ``"column label"`` or ``"name of the folder"``
    # (str, str): Columns or files that were not used, and why, e.g. ``("id", "every row has another value")``
    unused: tuple[tuple[str, str], ...] = ()


@pydantic.dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of manifest.json; entries that contradict each other raise ValidationError."""

    dataset: str  # Names of the data set and of the partition scheme
    partition: str
    partition_options: dict[str, Any]  # The scheme's options as used
    seed: int  # Seed of the partition
    clients: Size  # N, n (training), C, clients without a sample, rows that the scheme left out, unreadable rows
    samples: int
    classes: int
    class_names: tuple[str, ...]  # C names; may be empty where samples have no class
    description: DataDescription  # Shape, dtype and normalization of a sample
    train: Annotated[tuple[ShardFile, ...], Field(min_length=1)]  # Training shards in client order
    test: ShardFile  # The test part
    val: ShardFile | None = None  # Validation part, further arrays, vocabulary, word vectors, where there are any
    extras: ShardFile | None = None
    words: ShardFile | None = None
    vectors: ShardFile | None = None
    empty_clients: int = 0
    dropped: int = 0
    skipped: int = 0
    licence: str = ""  # Terms of the data set, what to cite, and the command that made the folder
    citation: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()  # Reports of the reader, the partition and the writer
    understood: Understood = Understood()  # What the reader took the files for

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Manifest:
        named = len(self.class_names) == self.classes or not (self.class_names or self.description.labeled)
        if self.classes != self.description.classes or not named:
            raise ValueError(f"its numbers of classes differ: {self.classes}, and {len(self.class_names)} names")
        first = list(accumulate((file.clients for file in self.train), initial=0))
        counted = [file.first_client for file in self.train] == first[:-1] and first[-1] == self.clients
        if not counted or sum(file.samples for file in self.train) != self.samples:
            raise ValueError("the files' clients and samples do not add up to the totals")
        return self

    def facts(self) -> list[tuple[str, str]]:
        """Description of the data as (name, sentence): sample, target, classes, columns or files not used."""
        known = self.understood
        facts = [
            ("sample", known.sample or self.description.sample),
            ("target", known.target or self.description.target),
        ]
        if self.class_names:
            more = f" and {self.classes - CLASSES_NAMED:,} more" if self.classes > CLASSES_NAMED else ""
            facts.append(("classes", f"{self.classes:,}: {', '.join(self.class_names[:CLASSES_NAMED])}{more}"))
        if known.unused:
            reasons: dict[str, list[str]] = {}
            for name, why in known.unused:
                reasons.setdefault(why, []).append(name)
            facts.append(("not used", "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())))
        return facts

    @property
    def parts(self) -> str:
        """Number of samples of each part."""
        held = 0 if self.val is None else self.val.samples
        return f"{self.samples:,} train, {self.test.samples:,} test, {held:,} validation"

    def as_dict(self) -> dict[str, Any]:
        """The content of manifest.json: the schema first, keys as above."""
        entries = {"schema": SCHEMA_OF_TARGETS, **asdict(self)}
        if self.understood == Understood():
            del entries["understood"]
        if self.description.inputs:
            entries["schema"] = SCHEMA_OF_INPUTS
            return entries
        del entries["description"]["inputs"]
        if self.description.labeled:
            entries["schema"] = SCHEMA
            for name in ("targets", "target_shape"):  # schema 1 does not have them
                del entries["description"][name]
        return entries

    def identity(self) -> dict[str, str]:
        """Entries that identify the data: all except the command that made them and texts about them."""
        entries = {key: value for key, value in self.as_dict().items() if key not in TEXTS_AND_FILES}
        facts = {f"manifest.json, {key}": json.dumps(value) for key, value in entries.items()}
        return facts | {f"manifest.json, {file.name} (sha256)": file.sha256 for file in self.files()}

    @property
    def digest(self) -> str:
        """The SHA-256 of what identifies the data: data prepared again in another way have another."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def files(self) -> list[ShardFile]:
        """Every file of the folder but the manifest."""
        others = (self.test, self.val, self.extras, self.words, self.vectors)
        return [*self.train, *(file for file in others if file is not None)]


def check_targets(kind: str, description: DataDescription, where: str) -> None:
    """Reject data with other targets than those of the task."""
    if description.targets != kind:
        meant = (kind, description.targets) == ("classification", "regression")
        otherwise = "store them as whole numbers, where they are classes" if meant else "prepare them otherwise"
        raise UserError(
            f'task.kind = "{kind}" does not go with the data {where}, whose targets are {description.targets}. Set '
            f'task.kind = "{description.targets}", or {otherwise}'
        )


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a shard folder."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(
            f"the shard folder {shown(folder)} does not exist. Name a folder written by python -m data_prep, or "
            '"digits"'
        )
    if (folder / PREPARING).exists():
        raise UserError(f"the preparation of {folder} was interrupted or is still running: {REPREPARE}")
    if not path.is_file():
        raise UserError(f"{path} is missing: {folder} is not a shard folder; {REPREPARE}")
    try:
        text = path.read_bytes()
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Check its permissions") from None
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({first_problem(error)}): {REPREPARE}") from None
    if (schema := json.loads(text).get("schema")) not in (SCHEMA, SCHEMA_OF_TARGETS, SCHEMA_OF_INPUTS):
        raise UserError(f"{path} has the unknown schema {shown(schema, repr)}: {REPREPARE}")
    return manifest


def first_problem(error: ValidationError) -> str:
    """Return the first problem with its place, in words."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else reason_of(first)


def wrong_target(targets: AnyArray, description: DataDescription) -> tuple[int, str] | None:
    """Return the first row with an invalid target and the reason, or None.

    A class must be in 0 … C − 1 (or -1 at a position that is not counted) and the value of a label in 0 … 1. A number
    must be finite in single precision.
    """
    if not targets.size:
        return None
    largest = float(np.finfo(np.float32).max)
    low, high, reason = {
        "classification": (0, description.classes - 1, f"none of the {description.classes} classes"),
        "tokens": (IGNORED, description.classes - 1, f"none of the {description.classes} classes"),
        "multilabel": (0, 1, "which is not in 0 to 1"),
        "regression": (-largest, largest, "which is no number of single precision"),
    }[description.targets]
    if low <= targets.min() and targets.max() <= high:
        return None
    wrong = ~((targets >= low) & (targets <= high)).reshape(len(targets), -1)
    row = int(wrong.any(axis=1).argmax())
    return row, f"{targets[row].reshape(-1)[wrong[row].argmax()]}, {reason}"
