"""Checkpoints and final models: safetensors files, complete or absent.

A checkpoint holds the global model, the state of the server optimizer and of the planner as tensors, and a JSON header
with the next round and the record that still waits for its evaluation. Its checksum is the SHA-256 of the whole file,
taken with zeros in the place of the checksum itself. The newest few are kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_inner_folder, sync_folder, write_whole
from fedmpi.models import check_values

log = logging.getLogger("fedmpi")

MOST_ROUNDS = 10**8  # as many as the eight digits of a checkpoint's name tell apart
DIGITS = 64  # of a SHA-256
LENGTH_BYTES = 8  # of the safetensors header's length, at the start of the file
SET_ASIDE = ".damaged"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on: the next round, tensors by name, and the header."""

    next_round: int
    tensors: dict[str, Tensor]
    header: dict[str, Any]


def copied(next_round: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint of what these are now, in memory of its own."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return Checkpoint(next_round, copies, copy.deepcopy(dict(header)))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint atomically in the folder, made in one that is there, and delete all but the newest `keep`."""
    make_inner_folder(folder)
    path = folder / f"round-{checkpoint.next_round:08d}.safetensors"
    header = {
        "fedmpi": json.dumps({"next_round": checkpoint.next_round, **checkpoint.header}),
        "checksum": "0" * DIGITS,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    content = memoryview(save(tensors, header))
    place = _header_text(content).index(_entry("0" * DIGITS)) + LENGTH_BYTES + len(_entry("")) - 1
    digest = hashlib.sha256(content).hexdigest().encode()
    write_whole(path, content[:place], digest, content[place + DIGITS :])
    kept = sorted(folder.glob("round-*.safetensors"))
    for old in kept[:-keep]:
        old.unlink()
    named = {clients_file(folder, path) for path in kept[-keep:]}
    for old in folder.glob("clients-*.safetensors"):
        if old not in named:
            old.unlink()
    return path


def clients_file(folder: Path, checkpoint: Path | int) -> Path:
    """Where the clients' state of a checkpoint lies, given its own file or the round that it goes on with."""
    number = f"{checkpoint:08d}" if isinstance(checkpoint, int) else checkpoint.stem.removeprefix("round-")
    return folder / f"clients-{number}.safetensors"


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a folder, or None when there is none.

    Damaged ones that are newer are renamed to NAME.damaged, with a warning each, so that the run that goes on from an
    older one neither counts nor meets them again.
    """
    paths = sorted(folder.glob("round-*.safetensors"), reverse=True)
    damaged = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
            _check_clients(path, checkpoint)
        except (OSError, ValueError) as error:
            log.warning("checkpoint %s is damaged (%s): trying the one before", path, error)
            damaged.append(path)
            continue
        for other in damaged:
            other.rename(other.with_name(other.name + SET_ASIDE))
        if damaged:
            sync_folder(folder)
            log.warning("going on from %s instead, at round %d", path, checkpoint.next_round)
        return checkpoint
    if paths:
        raise UserError(f"no checkpoint in {folder} is whole: choose another --out to start the run anew")
    return None


def _check_clients(path: Path, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose clients' state is missing or differs from what was written."""
    digest, beside = checkpoint.header.get("clients"), clients_file(path.parent, path)
    if digest and file_digest(beside) != digest:
        raise ValueError(f"{beside.name} beside it differs from what was written")


def file_digest(path: Path) -> str:
    """The SHA-256 of a file; OSError where it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """The content of one checkpoint file."""
    if not path.is_file():
        raise ValueError("it is no file")
    whole = path.read_bytes()
    content = memoryview(whole)
    text = _header_text(content)
    try:
        header = json.loads(text)["__metadata__"]
        digest, ours = header["checksum"], header["fedmpi"]
        place = text.index(_entry(digest)) + LENGTH_BYTES + len(_entry("")) - 1
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error!r}") from None
    if not isinstance(digest, str) or len(digest) != DIGITS or _digest_without(content, place) != digest:
        raise ValueError("its checksum differs from its content")
    try:
        facts = json.loads(ours)
        next_round = facts.pop("next_round")
        settled, record = facts.get("settled", 0), facts.get("unsettled")
        counts = all(type(number) is int and 0 <= number < MOST_ROUNDS for number in (next_round, settled))
        if not counts or not isinstance(record, dict | None):
            raise ValueError(f"it goes on at round {next_round!r} after {settled!r} records")
        return Checkpoint(next_round, load(whole), facts)
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"it was not written by this version: {error!r}") from None


def _header_text(content: memoryview) -> bytes:
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    return bytes(content[LENGTH_BYTES : LENGTH_BYTES + length])


def _entry(digest: str) -> bytes:
    return f'"checksum":"{digest}"'.encode()


def _digest_without(content: memoryview, place: int) -> str:
    """The SHA-256 of a file with zeros for the checksum at `place`."""
    summed = hashlib.sha256(content[:place])
    summed.update(b"0" * DIGITS)
    summed.update(content[place + DIGITS :])
    return summed.hexdigest()


class Beside:
    """A thread for one piece of work after another, each waited for before the next begins."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work; waits for the one before and raises what that one raised."""
        self.wait()

        def done() -> None:
            try:
                work()
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=done, name="fedmpi-checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what the work has raised, if it is over; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the work, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure


def model_file(module: nn.Module) -> bytes:
    """The bytes of model.safetensors."""
    check_values(module)
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
            kind = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise UserError(
                f"the model cannot be saved: {name} of its state dict is {kind}, not a dense tensor; leave it out of "
                "the state dict, or make it one"
            )
        dense = value.detach().cpu().contiguous()
        tensors[name] = dense.clone() if any(_overlap(dense, other) for other in tensors.values()) else dense
    try:
        return save(tensors)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the model cannot be saved ({error}): change what its state_dict holds") from error


def load_model(module: nn.Module, path: Path) -> None:
    """Give a freshly built module the values of model.safetensors."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        tensors = load_file(path)
        own = module.state_dict()
        for name, tensor in tensors.items():
            if name in own and tensor.dtype != own[name].dtype:
                raise ValueError(f"{name} is {tensor.dtype} there and {own[name].dtype} in the model")
        module.load_state_dict(tensors)
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold this model ({error})") from None


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
