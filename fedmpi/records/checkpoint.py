"""Files of checkpoints, final models and clients' state: safetensors, complete or absent.

`core/state.py` says what a checkpoint holds: tensors, and a JSON header. Its checksum is the SHA-256 of the whole file,
with zeros instead of the checksum itself. The newest few are kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save
from torch import Tensor, nn

from fedmpi.common.errors import UserError
from fedmpi.common.files import make_inner_folder, whole_file, write_whole
from fedmpi.common.types import AnyArray, Ints
from fedmpi.local.client_state import ClientState
from fedmpi.mpi import Cluster

log = logging.getLogger("fedmpi")

DIGITS = 64  # of a SHA-256
LENGTH_BYTES = 8  # of the safetensors header's length, at the start of the file
SET_ASIDE = ".damaged"
WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
PREFIXES = ("_orig_mod", "module")
INSERTED = re.compile(r"(?<![^.])(_orig_mod|module)\.")
PIECE_BYTES = 64 << 20
"""Largest size of the clients' records that rank 0 has in memory."""
TYPES = {np.dtype(np.float32): "F32", np.dtype(np.float64): "F64"}


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run resumes: the next round, tensors by name, and the header."""

    next_round: int
    tensors: dict[str, Tensor]
    header: dict[str, Any]


def copied(next_round: int, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint with copies of these values."""
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return Checkpoint(next_round, copies, copy.deepcopy(dict(header)))


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint atomically, and delete all but the newest `keep`; only the folder itself may be missing."""
    make_inner_folder(folder)
    path = folder / f"round-{checkpoint.next_round:08d}.safetensors"
    header = {
        "fedmpi": json.dumps({"next_round": checkpoint.next_round, **checkpoint.header}),
        "checksum": "0" * DIGITS,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    head, rest = _parts(save(tensors, header))
    write_whole(path, head.replace(_entry("0" * DIGITS), _entry(_digest(head, rest))), rest)
    kept = sorted(folder.glob("round-*.safetensors"))
    for old in kept[:-keep]:
        old.unlink()
    named = {clients_file(folder, path) for path in kept[-keep:]}
    for old in folder.glob("clients-*.safetensors"):
        if old not in named:
            old.unlink()
    return path


def clients_file(folder: Path, checkpoint: Path | int) -> Path:
    """Return the file of the clients' state of a checkpoint, given its own file or its next round."""
    number = f"{checkpoint:08d}" if isinstance(checkpoint, int) else checkpoint.stem.removeprefix("round-")
    return folder / f"clients-{number}.safetensors"


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a folder, or None if there is no checkpoint.

    Damaged ones are renamed to NAME.damaged, with a warning each.
    """
    for path in sorted(folder.glob("round-*.safetensors"), reverse=True):
        try:
            checkpoint = read_checkpoint(path)
            digest, beside = checkpoint.header.get("clients"), clients_file(folder, path)
            if digest and file_digest(beside) != digest:
                raise ValueError(f"{beside.name} beside it differs from what was written")
        except (OSError, ValueError) as error:
            log.warning("checkpoint %s is damaged (%s): trying the one before", path, error)
            path.rename(path.with_name(path.name + SET_ASIDE))
        else:
            return checkpoint
    if any(folder.glob(f"round-*{SET_ASIDE}")):
        raise UserError(f"all checkpoints in {folder} are damaged. Choose another --out to start a new run")
    return None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint file; ValueError if it is damaged."""
    whole = path.read_bytes()
    head, rest = _parts(whole)
    try:
        header = json.loads(head[LENGTH_BYTES:])["__metadata__"]
        digest, facts = str(header["checksum"]), json.loads(header["fedmpi"])
        if _digest(head.replace(_entry(digest), _entry("0" * DIGITS)), rest) != digest:
            raise ValueError("its checksum differs from its content")
        return Checkpoint(facts.pop("next_round"), load(whole), facts)
    except (SafetensorError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error!r}") from None


def _parts(content: bytes) -> tuple[bytes, memoryview]:
    """Return the header of a safetensors file with the header's length, and the tensors."""
    end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    return content[:end], memoryview(content)[end:]


def _entry(digest: str) -> bytes:
    return f'"checksum":"{digest}"'.encode()


def _digest(head: bytes, rest: memoryview) -> str:
    summed = hashlib.sha256(head)
    summed.update(rest)
    return summed.hexdigest()


def model_file(module: nn.Module) -> bytes:
    """Return the bytes of model.safetensors."""
    bare = bare_names(module)
    state = {bare[name]: value for name, value in module.state_dict().items()}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            raise UserError(f"the model cannot be saved: {name} of its state dict is not a dense tensor; leave it out")
    try:
        return save({name: value.detach().cpu().contiguous().clone() for name, value in state.items()})
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the model cannot be saved ({error}). Change what its state_dict holds") from error


def bare_names(module: nn.Module) -> dict[str, str]:
    """Return each name of a state dict without the prefixes that torch.compile and DataParallel insert."""
    wrapped = {path for path, part in module.named_modules() if type(part).__name__ in WRAPPERS}
    names = {}
    for name in module.state_dict():
        keys = name.split(".")
        kept = [key for i, key in enumerate(keys) if key not in PREFIXES or ".".join(keys[:i]) not in wrapped]
        names[name] = ".".join(kept)
    return names


def load_model(module: nn.Module, path: Path) -> None:
    """Load the parameters of model.safetensors, with or without such prefixes, into a freshly built module."""
    own = {bare: name for name, bare in bare_names(module).items()}
    try:
        state = load_file(path)
        bare = {name if name in own else INSERTED.sub("", name): value for name, value in state.items()}
        module.load_state_dict({own.get(name, name): value for name, value in bare.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} does not hold this model ({error})") from None


# --- clients' state beside a checkpoint ---


def save_records(cluster: Cluster, state: ClientState, path: Path | None) -> str:
    """Write the records of all ranks to one file, piece by piece; return its SHA-256 on rank 0; collective.

    The file is a safetensors file with `clients` int64 (c,) and `records` (c, vectors, d) in the same order. Writing
    and reading need at most PIECE_BYTES of memory, and a run may resume with another number of ranks.
    """
    wanted = cluster.broadcast([np.array([path is not None])] if cluster.is_server else None)
    if not wanted[0][0]:
        return ""
    at_once = _records_at_once(state, cluster.size)
    clients = cluster.gather(state.clients)
    pieces, steps = state.pieces(at_once), cluster.maximum(-(-len(state) // at_once))
    digest = hashlib.sha256()
    with ExitStack() as stack:
        file: BinaryIO | None = None
        if path is not None and clients is not None:
            make_inner_folder(path.parent)
            file = stack.enter_context(whole_file(path))
            # in the order of the gathered records: a piece of every rank, then the next one
            ordered = [own[step * at_once : (step + 1) * at_once] for step in range(steps) for own in clients]
            head = _records_head(np.concatenate([np.empty(0, np.int64), *ordered]), state)
            file.write(head)
            digest.update(head)
        empty = np.empty((0, len(state.names), state.values), state.dtype)
        for _ in range(steps):
            for records in cluster.gather(next(pieces, (None, empty))[1]) or ():
                if file is not None and records.size:
                    part = np.ascontiguousarray(records).data.cast("B")
                    file.write(part)
                    digest.update(part)
    return "" if file is None else digest.hexdigest()


def load_records(cluster: Cluster, state: ClientState, path: Path | None, owned: range) -> Ints:
    """Load the records of this rank's clients from a file that rank 0 reads; return all its clients; collective."""
    state.clear()
    everybody = [np.empty(0, np.int64)]
    pieces = _read_records(path, state) if cluster.is_server else iter(())
    while True:
        piece = cluster.broadcast(next(pieces, [np.empty(0, np.int64)]) if cluster.is_server else None)
        everybody.append(piece[0])
        if not piece[0].size:
            return np.concatenate(everybody)
        for client, record in zip(piece[0].tolist(), piece[1], strict=True):
            if client in owned:
                state.put(client, record.copy())


def _records_at_once(state: ClientState, ranks: int) -> int:
    return max(1, PIECE_BYTES // max(1, ranks * state.record_bytes))


def _records_head(clients: Ints, state: ClientState) -> bytes:
    """Return the head of the file: the length of its table, the table, and the clients."""
    size, end = len(clients) * state.record_bytes, clients.nbytes
    shape = [len(clients), len(state.names), state.values]
    table = {
        "__metadata__": {"vectors": json.dumps(state.names)},
        "clients": {"dtype": "I64", "shape": [len(clients)], "data_offsets": [0, end]},
        "records": {"dtype": TYPES[state.dtype], "shape": shape, "data_offsets": [end, end + size]},
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + clients.astype("<i8").tobytes()


def _read_records(path: Path | None, state: ClientState) -> Iterator[list[AnyArray]]:
    """Yield pieces of a file: clients (c,), at least one, and their records (c, vectors, d)."""
    if path is None:
        return
    with safe_open(path, "np") as file:
        clients, records = file.get_tensor("clients"), file.get_slice("records")
        names, shape = json.loads(file.metadata()["vectors"]), records.get_shape()[1:]
        if [names, shape, records.get_dtype()] != [list(state.names), [len(names), state.values], TYPES[state.dtype]]:
            raise UserError(
                f"{path} keeps {', '.join(names)} with {shape[1]} values for each client, but local.algorithm now "
                f"declares {', '.join(state.names)} with {state.values}. Choose another --out"
            )
        at_once = _records_at_once(state, 1)
        for first in range(0, len(clients), at_once):
            some = clients[first : first + at_once]
            yield [some, records[first : first + len(some)]]
