"""Checkpoints and model files: damaged in any byte, cut short, or signed rightly around a header of junk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from fedmpi.records.checkpoint import Checkpoint, load_model, model_file, newest_checkpoint, save_checkpoint
from tests.fuzz.verdict import REFUSED, Finding, outcome

Case = tuple[str, Any]
WHERE = st.floats(0, 1, exclude_max=True)
TENSORS = {"model": torch.arange(6.0), "server.m": torch.ones(6), "usage.clients": torch.arange(3)}
JUNK: list[Any] = [None, True, -1, 0, 7, 1.5, 10**400, "", "7", [], {}, [[[]]], {"round": "x"}, "\ud800"]
METADATA = ["", "{", "null", "[]", "5", '{"next_round": 1}', "[" * 50_000, '{"next_round": ' + "9" * 5000 + "}"]


def strategy() -> st.SearchStrategy[Case]:
    """What is done to the newest checkpoint, or to a model's file."""
    entries = st.dictionaries(
        st.sampled_from(["next_round", "settled", "unsettled", "data", "x"]), st.sampled_from(JUNK), max_size=3
    )
    places = st.sampled_from(["newest", "model"])
    return st.one_of(
        st.tuples(st.just("flip"), st.tuples(places, WHERE, st.integers(0, 7))),
        st.tuples(st.just("head"), st.tuples(places, st.integers(0, 300), st.integers(0, 255))),
        st.tuples(st.just("cut"), st.tuples(places, WHERE)),
        st.tuples(st.just("signed"), entries),
        st.tuples(st.just("metadata"), st.sampled_from(METADATA)),
        st.tuples(st.just("kind"), st.tuples(places, st.sampled_from(["folder", "fifo", "empty", "gone"]))),
        st.tuples(st.just("model"), st.sampled_from(sorted(MODELS))),
    )


MODELS: dict[str, bytes] = {
    "another shape": save({"weight": torch.ones(3, 3), "bias": torch.ones(2)}),
    "another type": save({"weight": torch.ones(2, 3, dtype=torch.int64), "bias": torch.ones(2)}),
    "another name": save({"heft": torch.ones(2, 3), "bias": torch.ones(2)}),
    "one missing": save({"weight": torch.ones(2, 3)}),
    "one more": save({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}),
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
    "a header of junk": (60).to_bytes(8, "little")
    + b'{"weight":{"dtype":"F32","shape":[9999999],"data_offsets":[0,4]}}',
    "none": b"",
}


def attempt(case: Case) -> str:
    """The newest as it was written, the one before it, or refused; a model of the right shape, or refused."""
    damage, how = case
    folder = Path(gettempdir()) / f"fedmpi-fuzz-checkpoints-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    paths = [save_checkpoint(folder, Checkpoint(number, _numbered(number), _header(number)), 3) for number in (5, 10)]
    module = nn.Linear(3, 2)
    (folder / "model.safetensors").write_bytes(model_file(module))
    named = {"newest": paths[-1], "model": folder / "model.safetensors"}
    try:
        if damage in ("flip", "head", "cut", "kind"):
            globals()[f"_{damage}"](named[how[0]], *how[1:])
        elif damage == "model":
            named["model"].write_bytes(MODELS[how])
        else:
            globals()[f"_{damage}"](named["newest"], how)
        read = outcome(lambda: newest_checkpoint(folder))
        loaded = outcome(lambda: load_model(module, folder / "model.safetensors"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if read is None or isinstance(read, str):
        raise Finding("neither the newest nor the one before was found")
    if damage not in ("signed", "metadata") or read.next_round == 5:
        if read.next_round not in (5, 10) or read.header != _header(read.next_round):
            raise Finding(f"the header is another one: {read.header}")
        if any(not torch.equal(read.tensors[name], value) for name, value in _numbered(read.next_round).items()):
            raise Finding("a tensor is another one")
    return REFUSED if read.next_round == 5 or loaded == REFUSED else "unharmed"


def _numbered(number: int) -> dict[str, torch.Tensor]:
    return {name: value + number for name, value in TENSORS.items()}


def _header(number: int) -> dict[str, Any]:
    return {"settled": number - 1, "unsettled": {"round": number - 1}, "data": "d"}


def _flip(path: Path, where: float, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)


def _head(path: Path, place: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content)


def _cut(path: Path, where: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(where * len(content))])


def _kind(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()


def _signed(path: Path, entries: dict[str, Any]) -> None:
    """A checkpoint whose checksum agrees with a header of junk."""
    try:
        written = json.dumps({"next_round": 10, **_header(10), **entries})
    except ValueError:
        written = "{}"
    _metadata(path, written)


def _metadata(path: Path, written: str) -> None:
    zeros = "0" * 64
    content = save(_numbered(10), {"fedmpi": written, "checksum": zeros})
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(content.replace(f'"checksum":"{zeros}"'.encode(), f'"checksum":"{digest}"'.encode(), 1))
