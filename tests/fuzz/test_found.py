"""Inputs that once ended in a traceback, a hang, a crash or a wrong result: each is rejected in a sentence now."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import fedmpi
from data_prep.__main__ import run as data_prep
from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.imports import load
from fedmpi.config import load_config
from fedmpi.config.layers import LARGEST_FILE
from fedmpi.data.opening import open_store
from fedmpi.records.progress import ended_by
from fedmpi.records.recorder import WRITTEN
from tests.fuzz import checkpoints, parts, raw, shards
from tests.fuzz.damage import make_kind


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to itself", "link to a device"])
def test_a_configuration_is_a_plain_file(kind: str, tmp_path: Path) -> None:
    make_kind(tmp_path / "c.toml", kind)
    with pytest.raises(UserError, match="cannot read the configuration"):
        load_config(tmp_path / "c.toml")


def test_a_configuration_has_an_end(tmp_path: Path) -> None:
    (tmp_path / "c.toml").touch()
    os.truncate(tmp_path / "c.toml", LARGEST_FILE + 1)
    with pytest.raises(UserError, match="it has more than 16,777,216 bytes"):
        load_config(tmp_path / "c.toml")


@pytest.mark.parametrize("file", WRITTEN)
def test_a_run_writes_to_plain_files_only(file: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / file)
    with pytest.raises(UserError, match=f"{file} is no plain file"):
        fedmpi.run("fedavg", {"rounds": 1}, data="digits:clients=4", out=tmp_path)


FOUND: list[tuple[ModuleType, tuple[Any, ...], str]] = [
    *(
        (shards, ("uint8", "dataset", ("train-00000.h5", name, kind)), "refused")
        for name, kind in (
            ("x", "external link"),
            ("x", "dangling link"),
            ("x", "empty"),
            ("y", "compact"),
            ("y", "float"),
            ("offsets", "float"),
            ("class_counts", "float"),
            ("x", "external storage"),
            ("x", "virtual"),
        )
    ),
    *(
        (shards, ("uint8", "value", how), "refused")
        for how in (
            ("train-00000.h5", "y", 0.5, 3),
            ("test.h5", "y", 0.5, -100),
            ("val.h5", "y", 0.0, 255),
            ("train-00000.h5", "offsets", 0.5, -(2**63)),
            ("train-00001.h5", "offsets", 0.5, 2**63 - 1),
        )
    ),
    *(
        (shards, ("uint8", "file", (name, ("kind", 0.0, kind))), "refused")
        for name, kind in (
            ("train-00000.h5", "fifo"),
            ("manifest.json", "fifo"),
            ("manifest.json", "folder"),
            ("test.h5", "link to a device"),
            ("val.h5", "link to itself"),
        )
    ),
    (shards, ("float32", "dataset", ("train-00000.h5", "x", "big-endian")), "refused"),
    (shards, ("float32", "value", ("train-00000.h5", "x", 0.5, np.nan)), "read"),
    (shards, ("uint8", "file", ("manifest.json", ("write", 0.0, b"[[["))), "refused"),
    *(
        (checkpoints, case, "refused")
        for case in (
            ("metadata", "[" * 50_000),
            ("metadata", "5"),
            ("signed", {"next_round": "7"}),
            ("signed", {"next_round": 10**400}),
            ("signed", {"settled": -1}),
            ("signed", {"unsettled": []}),
            ("newest", ("kind", 0.0, "fifo")),
            ("model", ("kind", 0.0, "fifo")),
            ("another model", "another type"),
            ("another model", "a huge header"),
        )
    ),
    *(
        (raw, ("arrays", how), "refused")
        for how in (
            ([("y", "floats")], None),
            ([("x", "scalar")], None),
            ([("x", "no columns")], None),
            ([("x", "ids")], "text"),
            ([("y", "empty texts")], None),
        )
    ),
    *((raw, ("header", raw.HEADERS[number]), "refused") for number in (0, 1, 4, 7)),
    (raw, ("table", ([(None, 0, "Bob")], "\n")), "refused"),
    (raw, ("table", ([], "\r")), "refused"),
    (raw, ("table", ([(10, 0, "x" * 200_000)], "\n")), "read"),
    (raw, ("bomb", 0), "read"),
    (raw, ("png", (60_000, 60_000)), "read"),
    *(
        (parts, case, "refused")
        for case in (
            ("aggregator", "meta tensor"),
            ("server", "meta tensor"),
            ("scheduling", "sparse tensor"),
            ("loss", "tensor with a gradient"),
            ("forward", "leaves"),
            ("forward", "meta tensor"),
            ("forward", "unspeakable"),
            ("forward", "no exception"),
            ("rows", "tensor with a gradient"),
            ("correction", "sparse tensor"),
        )
    ),
    (parts, ("aggregator", "tensor with a gradient"), "run"),
    (parts, ("server", "tensor with a gradient"), "run"),
]


@pytest.mark.parametrize(
    ("kind", "case", "expected"), FOUND, ids=[f"{kind.__name__[11:]}-{case}"[:60] for kind, case, _ in FOUND]
)
def test_what_was_found_once_is_rejected_or_used_rightly(kind: ModuleType, case: Any, expected: str) -> None:
    assert kind.attempt(case) == expected


def test_features_that_are_no_numbers_are_seen_by_verify_and_in_the_test_part(tmp_path: Path) -> None:
    folder = shards.original("float32").with_name("not finite")
    for name, verify in (("train-00000.h5", True), ("test.h5", False)):
        shards.copy("float32", folder)
        shards._value(folder, (name, "x", 0.5, np.nan))
        with pytest.raises(UserError, match="not finite|checksum"):
            if verify:
                open_store(folder, verify=True)
            fedmpi.run("fedavg", {"rounds": 1, "clients.fraction": 1.0}, data=folder)


@pytest.mark.parametrize("name", ["/etc/passwd", "../test.h5", "", ".", "a\0b", "sub/test.h5"])
def test_a_manifest_names_files_of_its_own_folder_only(name: str) -> None:
    folder = shards.original("uint8").with_name("named")
    shards.copy("uint8", folder)
    table = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(table.replace('"test.h5"', json.dumps(name)))
    with pytest.raises(UserError, match="all lie in the folder itself"):
        open_store(folder)


PLUGINS = {
    "raises": "raise RuntimeError('no')",
    "leaves": "import sys\nsys.exit(0)",
    "recurs": "def f():\n    f()\nf()",
    "raises what has no words": "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E",
    "raises what is no exception": "class E(BaseException):\n    pass\nraise E('\\n' * 9000)",
    "has no names": "def __getattr__(name):\n    raise OSError('gone')",
    "is no Python": "(((",
}


@pytest.mark.parametrize("source", PLUGINS.values(), ids=PLUGINS)
def test_a_module_that_misbehaves_when_imported_is_a_users_error(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "misbehaving.py").write_text(source)
    sys.modules.pop("misbehaving", None)
    with pytest.raises(UserError, match="importing the module") as caught:
        load("misbehaving:thing", "model.name")
    assert "\n" not in str(caught.value)


class _Leaves(nn.Module):
    """Calls sys.exit(0) in a training, or in an evaluation, of the run."""

    def __init__(self, description: Any, while_training: bool):
        super().__init__()
        self.inner, self.while_training = nn.Linear(64, 10), while_training

    def forward(self, x: Tensor) -> Tensor:
        leaves = len(x) == 7 if self.while_training else len(x) > 100
        return sys.exit(0) if leaves else self.inner(x.flatten(1))


@pytest.mark.parametrize("while_training", [True, False])
def test_a_model_that_leaves_does_not_end_the_run_as_if_it_were_done(while_training: bool, tmp_path: Path) -> None:
    settings = {"rounds": 1, "local.batch_size": 7, "local.engine": "sequential", "model.name": _Leaves}
    with pytest.raises(ClientFailure if while_training else ComponentFailure, match=r"SystemExit: 0") as raised:
        settings["model.while_training"] = while_training
        fedmpi.run("fedavg", settings, data="digits:clients=4", out=tmp_path)
    assert str(raised.value) in ended_by(tmp_path / "run.log")


def test_a_folder_without_a_name_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is empty"):
        data_prep(["digits", "--partition", "iid", "--clients", "4", "--out", ""])
    with pytest.raises(UserError, match="is empty"):
        fedmpi.run("fedavg", {"rounds": 1}, out="")
    assert not list(tmp_path.iterdir())
