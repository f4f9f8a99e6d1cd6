"""Checkpoints: one file a checkpoint, complete or absent, the newest few kept.

A checkpoint is a safetensors file: the global model, the state of the server optimizer and of the planner as tensors,
and a JSON header with the next round and the record that still waits for its evaluation.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: the next round, tensors by name, and the header."""

    next_round: int
    tensors: dict[str, Tensor]
    header: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint atomically and delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{checkpoint.next_round:08d}.safetensors"
    header = {"fedmpi": json.dumps({"next_round": checkpoint.next_round, **checkpoint.header})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    write_whole(path, save(tensors, header))
    for old in sorted(folder.glob("round-*.safetensors"))[:-keep]:
        old.unlink()
    return path


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest readable checkpoint of a folder, or None when there is none.

    Raises
    ------
    UserError
        When checkpoints exist but none of them can be read.
    """
    paths = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads(file.metadata()["fedmpi"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            log.warning("checkpoint %s cannot be read (%s): trying an older one", path, error)
            continue
        return Checkpoint(header.pop("next_round"), tensors, header)
    if paths:
        raise UserError(f"no checkpoint in {folder} can be read: remove the folder to start the run anew")
    return None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync it and rename it: readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
