"""The shard schema "fedmpi-shards/1": file names, data set names, and the manifest that describes a folder.

The only thing that data_prep (which writes) and fedmpi (which reads) agree on; see docs/data.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.errors import UserError

SCHEMA = "fedmpi-shards/1"
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
TASKS = ("image", "text", "vector")
REPREPARE = "prepare it again with python -m data_prep"


def shard_name(index: int) -> str:
    """File name of a training shard."""
    return f"train-{index:05d}.h5"


@dataclass(frozen=True)
class DataDescription:
    """Everything a model builder needs to know of a data set.

    Parameters
    ----------
    feature_shape : tuple of int
        Shape of one sample: (channels, height, width), (length,) tokens, or (features,).
    dtype : {"uint8", "float32", "int32"}
        Stored dtype of the features.
    classes : int
        C.
    task : {"image", "text", "vector"}
        What a sample is.
    vocabulary : int
        Number of token ids; 0 unless task is "text".
    mean, std : tuple of float
        Per channel, applied to x / 255 (uint8) or x (float32); empty for token ids.
    """

    feature_shape: tuple[int, ...]
    dtype: str
    classes: int
    task: str
    vocabulary: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> DataDescription:
        """The description with these entries, as JSON gives them."""
        return cls(**{key: _tupled(value) for key, value in entries.items()})


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
class Manifest:
    """The content of manifest.json.

    Parameters
    ----------
    dataset, partition : str
        Names of the data set and of the law that drew the clients.
    partition_options : dict
        The law's options as used.
    seed : int
        Seed of the partition.
    clients, samples, classes, empty_clients, dropped, skipped : int
        N, n (training), C, clients without a sample, rows the law left out, rows that could not be read.
    class_names : tuple of str
        C names.
    description : DataDescription
        Shape, dtype and normalisation of a sample.
    train : tuple of ShardFile
        Training shards in client order.
    test : ShardFile
        The test part.
    val, extras, words, vectors : ShardFile or None
        Validation part, further arrays, vocabulary, word vectors, where there are any.
    licence, citation, command : str
        Terms of the data set, what to cite, and the command that made the folder.
    notes : tuple of str
        What the partition reported.
    """

    dataset: str
    partition: str
    partition_options: dict[str, Any]
    seed: int
    clients: int
    samples: int
    classes: int
    class_names: tuple[str, ...]
    description: DataDescription
    train: tuple[ShardFile, ...]
    test: ShardFile
    val: ShardFile | None = None
    extras: ShardFile | None = None
    words: ShardFile | None = None
    vectors: ShardFile | None = None
    empty_clients: int = 0
    dropped: int = 0
    skipped: int = 0
    licence: str = ""
    citation: str = ""
    command: str = ""
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text of manifest.json: the schema first, keys as above."""
        return json.dumps(self.as_dict(), indent=1) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {"schema": SCHEMA, **asdict(self)}

    def files(self) -> list[ShardFile]:
        """Every file of the folder but the manifest."""
        others = (self.test, self.val, self.extras, self.words, self.vectors)
        return [*self.train, *(file for file in others if file is not None)]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder.

    Raises
    ------
    UserError
        The folder or its manifest is missing, is not JSON, has another schema, or lacks a key.
    """
    if not folder.is_dir():
        raise UserError(
            f'the shard folder {folder} does not exist: name a folder written by python -m data_prep, or "digits"'
        )
    path = folder / MANIFEST
    if (folder / PREPARING).exists():
        raise UserError(f"the preparation of {folder} was interrupted or is still running: {REPREPARE}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {folder} is not a shard folder; {REPREPARE}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): {REPREPARE}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path} has the schema {found!r} but this version reads {SCHEMA!r}: {REPREPARE}")
    try:
        manifest = _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): {REPREPARE}") from None
    _check(manifest, path)
    return manifest


def _parse(content: dict[str, Any]) -> Manifest:
    values = {field.name: content[field.name] for field in fields(Manifest) if field.name in content}
    values["description"] = DataDescription.of(values["description"])
    values["train"] = tuple(ShardFile(**file) for file in values["train"])
    for part in ("test", "val", "extras", "words", "vectors"):
        if values.get(part) is not None:
            values[part] = ShardFile(**values[part])
    return Manifest(**{key: _tupled(value) for key, value in values.items()})


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(manifest: Manifest, path: Path) -> None:
    description = manifest.description
    if manifest.clients < 1 or not manifest.train:
        raise UserError(f"{path} lists no client: a run needs at least one; {REPREPARE}")
    if description.dtype not in DTYPES or description.task not in TASKS:
        raise UserError(
            f"{path} names the dtype {description.dtype!r} and task {description.task!r}, unknown here: {REPREPARE}"
        )
    first = np.cumsum([0] + [file.clients for file in manifest.train])
    counted = [file.first_client for file in manifest.train] == first[:-1].tolist() and first[-1] == manifest.clients
    if not counted or sum(file.samples for file in manifest.train) != manifest.samples:
        raise UserError(f"{path} is damaged (the files' clients and samples do not add up to the totals): {REPREPARE}")
