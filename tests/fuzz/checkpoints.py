"""Checkpoints and model files: damaged in any byte, cut short, or signed rightly around a header of junk."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from fedmpi.records.checkpoint import Checkpoint, load_model, model_file, newest_checkpoint, save_checkpoint
from tests.fuzz.damage import DAMAGE, REFUSED, Finding, damage, folder_of, outcome

Case = tuple[str, Any]
TENSORS = {"model": torch.arange(6.0), "server.m": torch.ones(6), "usage.clients": torch.arange(3)}
JUNK: list[Any] = [None, True, -1, 0, 7, 1.5, 10**400, "", "7", [], {}, [[[]]], {"round": "x"}, "\ud800"]
METADATA = ["", "{", "null", "[]", "5", '{"next_round": 1}', "[" * 50_000, '{"next_round": ' + "9" * 5000 + "}"]
MODELS: dict[str, bytes] = {
    "another shape": save({"weight": torch.ones(3, 3), "bias": torch.ones(2)}),
    "another type": save({"weight": torch.ones(2, 3, dtype=torch.int64), "bias": torch.ones(2)}),
    "another name": save({"heft": torch.ones(2, 3), "bias": torch.ones(2)}),
    "one missing": save({"weight": torch.ones(2, 3)}),
    "one more": save({"weight": torch.ones(2, 3), "bias": torch.ones(2), "more": torch.ones(1)}),
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
    "none": b"",
}


def strategy() -> st.SearchStrategy[Case]:
    """Damage to the newest checkpoint, or to a model's file."""
    keys = st.sampled_from(["next_round", "settled", "unsettled", "data", "x"])
    return st.one_of(
        st.tuples(st.sampled_from(["newest", "model"]), DAMAGE),
        st.tuples(st.just("signed"), st.dictionaries(keys, st.sampled_from(JUNK), max_size=3)),
        st.tuples(st.just("metadata"), st.sampled_from(METADATA)),
        st.tuples(st.just("another model"), st.sampled_from(sorted(MODELS))),
    )


def attempt(case: Case) -> str:
    """Accept the newest as it was written, the one before it, an error, or a model of the right shape."""
    what, how = case
    folder = folder_of("checkpoints")[0] / "run"
    shutil.rmtree(folder, ignore_errors=True)
    paths = [save_checkpoint(folder, Checkpoint(number, _numbered(number), _header(number)), 3) for number in (5, 10)]
    module, model = nn.Linear(3, 2), folder / "model.safetensors"
    model.write_bytes(model_file(module))
    if what in ("newest", "model"):
        damage(paths[-1] if what == "newest" else model, *how)
    elif what == "another model":
        model.write_bytes(MODELS[how])
    else:
        try:
            how = json.dumps({"next_round": 10, **_header(10), **how}) if what == "signed" else how
        except ValueError:
            how = "{}"
        _sign(paths[-1], how)
    read = outcome(lambda: newest_checkpoint(folder))
    loaded = outcome(lambda: load_model(module, model))
    if read is None or isinstance(read, str):
        raise Finding("neither the newest nor the one before was found")
    if what not in ("signed", "metadata") or read.next_round == 5:
        if read.next_round not in (5, 10) or read.header != _header(read.next_round):
            raise Finding(f"the header is another one: {read.header}")
        if any(not torch.equal(read.tensors[name], value) for name, value in _numbered(read.next_round).items()):
            raise Finding("a tensor is another one")
    return REFUSED if read.next_round == 5 or loaded == REFUSED else "unharmed"


def _numbered(number: int) -> dict[str, torch.Tensor]:
    return {name: value + number for name, value in TENSORS.items()}


def _header(number: int) -> dict[str, Any]:
    return {"settled": number - 1, "unsettled": {"round": number - 1}, "data": "d"}


def _sign(path: Path, written: str) -> None:
    """A checkpoint whose checksum agrees with any header."""
    zeros = "0" * 64
    content = save(_numbered(10), {"fedmpi": written, "checksum": zeros})
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(content.replace(f'"checksum":"{zeros}"'.encode(), f'"checksum":"{digest}"'.encode(), 1))
