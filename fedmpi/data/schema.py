"""The shard schema: file names, data set names, and the manifest that describes a folder.

"fedmpi-shards/1" is a folder of one class a sample; "fedmpi-shards/2" one of any other targets, and says which.

The only thing that data_prep (which writes) and fedmpi (which reads) agree on; see docs/reference/shards.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from fedmpi.common.errors import UserError, shown
from fedmpi.common.task_kinds import IGNORED, TARGETS
from fedmpi.common.types import AnyArray

SCHEMA, SCHEMA_OF_TARGETS = "fedmpi-shards/1", "fedmpi-shards/2"
MANIFEST = "manifest.json"
TEST = "test.h5"
VALIDATION = "val.h5"
EXTRAS = "extras.h5"
VOCABULARY = "vocabulary.txt"
VECTORS = "vectors.npy"
PARTIAL = ".partial"  # suffix of a file that is being written
PREPARING = ".preparing"  # marks a folder whose manifest is not written yet
FEATURES, LABELS, OFFSETS, CLIENT_IDS, CLASS_COUNTS = "x", "y", "offsets", "client_ids", "class_counts"
DTYPES = ("uint8", "float32", "int32")
CLASSES_NAMED = 10
SMALLEST_STD = 1e-37  # its inverse is finite in single precision
REPREPARE = "prepare it again with python -m data_prep"

Modality = Literal["image", "text", "vector"]
"""What one sample is."""
TASKS: tuple[str, ...] = get_args(Modality)


def shard_name(index: int) -> str:
    """File name of a training shard."""
    return f"train-{index:05d}.h5"


def scales_of(feature_shape: tuple[int, ...]) -> int:
    """How many values may have their own mean and std: the channels of an image, else the last axis of a sample."""
    return feature_shape[0] if len(feature_shape) == 3 else feature_shape[-1]


@dataclass(frozen=True)
class DataDescription:
    """Everything a model builder needs to know of a data set."""

    feature_shape: tuple[int, ...]  # Shape of one sample: (channels, height, width), (length,) tokens, or (features,)
    dtype: str  # Stored dtype of the features
    classes: int  # C, the values of an output: classes (of each position where targets are tokens), labels, or numbers
    task: str  # What a sample is
    vocabulary: int  # Number of token ids; 0 unless task is "text"
    # Per channel of an image, or per column of a vector (d,) or series (T, C), or one for all; applied to x / 255
    # (uint8) or x (float32); empty for token ids
    mean: tuple[float, ...]
    std: tuple[float, ...]
    targets: str = "classification"  # What y holds (`TARGETS`)
    # Shape of one sample's y: () for a class or a single number, (L,) for tokens, (C,) for labels
    target_shape: tuple[int, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether every sample has one class."""
        return self.targets == "classification"

    @property
    def counted(self) -> bool:
        """Whether y holds numbers of classes, int64 in memory; otherwise numbers, float32."""
        return self.targets in ("classification", "tokens")

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of one sample's outputs, as a model gives them: (C,), or (L, C) where targets are tokens."""
        return (*self.target_shape, self.classes) if self.targets == "tokens" else (self.classes,)

    @property
    def sample(self) -> str:
        """What one sample is, in words."""
        shape = " x ".join(map(str, self.feature_shape))
        if self.task == "text":
            return f"text of {shape} tokens, from a vocabulary of {self.vocabulary:,}"
        if self.task == "image" and len(self.feature_shape) == 3:
            channels, height, width = self.feature_shape
            kind = {1: "gray image", 3: "color image"}.get(channels, f"image of {channels} channels and")
            return f"{kind} of {width} x {height} pixels, {self.dtype}"
        return f"{shape} number{'' if self.feature_shape == (1,) else 's'}, {self.dtype}"

    @property
    def target(self) -> str:
        """What is to be predicted of a sample, in words."""
        shape = " x ".join(map(str, self.target_shape)) or "1"
        return {
            "classification": f"one of {self.classes:,} classes",
            "tokens": f"the token at each of {shape} positions, one of {self.classes:,}",
            "multilabel": f"{shape} labels, each true or false",
            "regression": f"{shape} number{'' if shape == '1' else 's'}",
        }[self.targets]

    def takes_outputs(self, shape: tuple[int, ...], samples: int) -> bool:
        """Whether outputs of this shape are those of the task; numbers may also have the shape of the targets."""
        own = self.targets == "regression" and shape[1:] == self.target_shape
        return shape[:1] == (samples,) and (own or shape[1:] == self.output_shape)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> DataDescription:
        """The description with these entries, as JSON gives them."""
        found = TypeAdapter(cls).validate_json(json.dumps(dict(entries)), strict=True)
        found.check()
        return found

    def check(self) -> None:
        """Raise ValueError where no sample and no model can be like this."""
        if self.dtype not in DTYPES or self.task not in TASKS:
            raise ValueError(
                f"the dtype {shown(self.dtype, repr)} or the task {shown(self.task, repr)} is unknown here"
            )
        if not self.feature_shape or min(self.feature_shape) < 1:
            raise ValueError(f"samples of shape {self.feature_shape} hold nothing")
        if self.classes < 1:
            raise ValueError(f"{self.classes} classes: there is at least one")
        self._check_targets()
        if (self.task == "text") != (self.dtype == "int32") or (self.task == "text" and self.vocabulary < 1):
            raise ValueError("texts are token ids of a vocabulary, int32, and nothing else is")
        scales = scales_of(self.feature_shape)
        if any(len(values) not in (0, 1, scales) for values in (self.mean, self.std)):
            raise ValueError(f"mean and std are one number, or one for each of {scales} channels or columns")
        if not all(map(math.isfinite, self.mean)) or not all(SMALLEST_STD < std < math.inf for std in self.std):
            raise ValueError("mean and std are finite numbers, std above 0")

    def _check_targets(self) -> None:
        shape = self.target_shape
        if self.targets not in TARGETS:
            raise ValueError(f"the targets {shown(self.targets, repr)} are unknown here")
        if any(length < 1 for length in shape):
            raise ValueError(f"targets of shape {shape} hold nothing")
        fits = {
            "classification": shape == (),
            "tokens": len(shape) == 1,
            "multilabel": shape == (self.classes,),
            "regression": math.prod(shape) == self.classes,
        }
        if not fits[self.targets]:
            raise ValueError(f"targets of shape {shape} are no {self.targets} of {self.classes} values")


@dataclass(frozen=True)
class ShardFile:
    """One file of a folder as the manifest lists it; the client fields are 0 for files that hold no clients."""

    name: str
    bytes: int
    sha256: str
    first_client: int = 0
    clients: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Understood:
    """What a reader took the user's files for; printed by every preparation, kept in the manifest, shown by
    `inspect`.
    """

    # What one sample is made of, e.g. ``"3 numbers: age, income, height"`` or ``"grey image of 28 x 28 pixels"``; empty
    # where the data set's name says it
    sample: str = ""
    target: str = ""  # What is to be predicted, e.g. ``"column label"`` or ``"name of the folder"``
    # (str, str): Columns or files that were not used, and why, e.g. ``("id", "every row has a value of its own")``
    unused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    dataset: str  # Names of the data set and of the law that drew the clients
    partition: str
    partition_options: dict[str, Any]  # The law's options as used
    seed: int  # Seed of the partition
    clients: int  # N, n (training), C, clients without a sample, rows the law left out, rows that could not be read
    samples: int
    classes: int
    class_names: tuple[str, ...]  # C names; may be none where samples have no class of their own
    description: DataDescription  # Shape, dtype and normalization of a sample
    train: tuple[ShardFile, ...]  # Training shards in client order
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
    notes: tuple[str, ...] = ()  # What the reader, the partition and the writer reported
    understood: Understood = Understood()  # What the reader took the files for
    # Samples of one part with the features of a sample of another (`fedmpi.data.statistics.duplicates`)
    duplicates: dict[str, int] = field(default_factory=dict)

    def facts(self) -> list[tuple[str, str]]:
        """What the data are, as (name, sentence): the sample, the target, the classes, columns or files not used."""
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
        """How many samples each part has."""
        held = 0 if self.val is None else self.val.samples
        return f"{self.samples:,} train, {self.test.samples:,} test, {held:,} validation"

    def to_json(self) -> str:
        """The text of manifest.json: the schema first, keys as above."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The content of manifest.json."""
        entries = {"schema": SCHEMA_OF_TARGETS, **asdict(self)}
        if self.understood == Understood():
            del entries["understood"]
        if not self.duplicates:
            del entries["duplicates"]
        if self.description.labelled:
            entries["schema"] = SCHEMA
            entries["description"] = without_targets(entries["description"])
        return entries

    def identity(self) -> dict[str, str]:
        """What identifies the data: every entry but the command that made them and the words about them."""
        words = {
            "command",
            "notes",
            "licence",
            "citation",
            "understood",
            "duplicates",
            "train",
            "test",
            "val",
            "extras",
            "words",
            "vectors",
        }
        entries = {key: value for key, value in self.as_dict().items() if key not in words}
        facts = {f"manifest.json, {key}": json.dumps(value) for key, value in entries.items()}
        return facts | {f"manifest.json, {file.name} (sha256)": file.sha256 for file in self.files()}

    @property
    def digest(self) -> str:
        """The SHA-256 of what identifies the data: data prepared anew, in another way, have another."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    def files(self) -> list[ShardFile]:
        """Every file of the folder but the manifest."""
        others = (self.test, self.val, self.extras, self.words, self.vectors)
        return [*self.train, *(file for file in others if file is not None)]


def check_targets(kind: str, description: DataDescription, where: str) -> None:
    """Refuse data whose targets are not those of the task."""
    if description.targets != kind:
        meant = (kind, description.targets) == ("classification", "regression")
        otherwise = "store them as whole numbers, where they are classes" if meant else "prepare them otherwise"
        raise UserError(
            f'task.kind = "{kind}" does not go with the data {where}, whose targets are {description.targets}: set '
            f'task.kind = "{description.targets}", or {otherwise}'
        )


def without_targets(description: dict[str, Any]) -> dict[str, Any]:
    """The entries of a description without those about targets, which one of a class a sample never had."""
    return {name: value for name, value in description.items() if name not in ("targets", "target_shape")}


def is_folder(path: Path) -> bool:
    """Whether there is such a folder; names that no file system takes name none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder."""
    if not is_folder(folder):
        raise UserError(
            f"the shard folder {shown(folder)} does not exist: name a folder written by python -m data_prep, or "
            '"digits"'
        )
    path = folder / MANIFEST
    if (folder / PREPARING).exists():
        raise UserError(f"the preparation of {folder} was interrupted or is still running: {REPREPARE}")
    try:
        if not path.is_file() and path.exists():
            raise UserError(f"{path} is no file: {folder} is not a shard folder; {REPREPARE}")
        text = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {folder} is not a shard folder; {REPREPARE}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None
    try:
        content = from_json(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): {REPREPARE}") from None
    if not isinstance(content, dict) or content.get("schema") not in (SCHEMA, SCHEMA_OF_TARGETS):
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        known = f"{SCHEMA!r} and {SCHEMA_OF_TARGETS!r}"
        raise UserError(f"{path} has the schema {shown(found, repr)} but this version reads {known}: {REPREPARE}")
    try:
        manifest = _manifests().validate_json(text, strict=True)
        _check(manifest)
    except ValidationError as error:
        raise UserError(f"{path} is damaged ({_first(error)}): {REPREPARE}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): {REPREPARE}") from None
    return manifest


@cache
def _manifests() -> TypeAdapter[Manifest]:
    """What reads manifests: making it takes longer than reading one."""
    return TypeAdapter(Manifest)


def _first(error: ValidationError) -> str:
    """The first thing that is wrong with the types of a manifest."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _check(manifest: Manifest) -> None:
    """Raise ValueError where entries contradict each other, or name what no folder of shards holds."""
    if manifest.clients < 1 or not manifest.train:
        raise ValueError("it lists no client, but a run needs at least one")
    manifest.description.check()
    named = len(manifest.class_names) == manifest.classes or not (manifest.class_names or manifest.description.labelled)
    if manifest.classes != manifest.description.classes or not named:
        raise ValueError(f"its numbers of classes differ: {manifest.classes}, and {len(manifest.class_names)} names")
    files = manifest.files()
    for file in files:
        if file.name in ("", ".", "..") or Path(file.name).name != file.name or "\0" in file.name:
            raise ValueError(f"it names the file {shown(file.name, repr)}, but all lie in the folder itself")
        if min(file.bytes, file.first_client, file.clients, file.samples) < 0:
            raise ValueError(f"numbers of {file.name} are negative")
    if len({file.name for file in files}) < len(files):
        raise ValueError("it names a file twice")
    first = list(accumulate((file.clients for file in manifest.train), initial=0))
    counted = [file.first_client for file in manifest.train] == first[:-1] and first[-1] == manifest.clients
    if not counted or sum(file.samples for file in manifest.train) != manifest.samples:
        raise ValueError("the files' clients and samples do not add up to the totals")


def wrong_target(targets: AnyArray, description: DataDescription) -> tuple[int, str] | None:
    """The first row whose target cannot be one, and what it is, in words; None where all can.

    A class lies in 0 … C − 1 (or is -1 at a position that counts nowhere), what a label is worth in 0 … 1, and a number
    is finite in single precision.
    """
    if not targets.size or targets.dtype.kind == "b":
        return None
    least, most = targets.min(), targets.max()
    if description.counted:
        first = IGNORED if description.targets == "tokens" else 0
        if first <= least and most < description.classes:
            return None
        right, what = (targets >= first) & (targets < description.classes), f"none of the {description.classes} classes"
    elif description.targets == "multilabel":
        if least >= 0 and most <= 1:
            return None
        right, what = (targets >= 0) & (targets <= 1), "which is not in 0 to 1"
    else:
        largest = np.finfo(np.float32).max
        if -largest <= least and most <= largest:
            return None
        right, what = np.abs(targets) <= largest, "which is no number of single precision"
    row = int(np.flatnonzero(~right.reshape(len(targets), -1).all(axis=1))[0])
    value = targets[row][~right[row]][0] if targets.ndim > 1 else targets[row]
    return row, f"{value}, {what}"
