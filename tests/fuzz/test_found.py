"""Inputs that once ended in a traceback, a hang, a crash or a wrong result: each is refused in a sentence now."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import Tensor, nn

import fedmpi
from data_prep.__main__ import run as data_prep
from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.imported import load
from fedmpi.config import load_config
from fedmpi.config.layers import LARGEST_FILE
from fedmpi.core.placement import check_threads
from fedmpi.data.opening import open_store
from fedmpi.describe.data import inspect_store
from fedmpi.process.exit_codes import run_guarded
from fedmpi.records.recorder import WRITTEN
from fedmpi.records.run_log import ended_by
from tests.fuzz import checkpoints, parts, places, raw, readers, runs, shards, texts

FEDAVG = ("preset=fedavg", "data.source=digits:clients=6")
ROWS = ("samples.sampler=bernoulli", "samples.budget=50", "samples.size.estimate=duchi")
NOISE = ("clients.sampler=all", "privacy.clip_norm=1", "server.weights=uniform")
CLOCK = ("devices=true", "devices.speed=lognormal")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((*ROWS, "samples.size.epsilon=5e-324"), "range of single precision"),
        ((*ROWS, "samples.size.epsilon=1e-9"), "say nothing of the sizes"),
        ((*ROWS, "samples.size.epsilon=600"), "they tell them"),
        ((*NOISE, "privacy.noise_multiplier=1e-300"), "at least 1e-30 is possible"),
        ((*NOISE, "privacy.noise_multiplier=1e-9"), "hides nothing"),
        ((*NOISE, "privacy.noise_multiplier=1e9"), "leaves nothing of the updates"),
        ((*NOISE, "privacy.noise_multiplier=1e308"), "at most 1e+30 is possible"),
        ((*NOISE, "privacy.delta=1e-300"), "no account is that fine"),
        ((*CLOCK, "clients.over_selection=1e308"), "at most 1e+06"),
        ((*CLOCK, "devices.speed.sigma=1e3"), "orders of magnitude"),
        ((*CLOCK, "devices.bandwidth_sigma_XXX=51"), "orders of magnitude"),
        (("server.optimizer=adam", "server.optimizer.tau=1e308"), "single precision"),
        (("server.optimizer=adam", "server.optimizer.tau=1e20"), "its square"),
        (("topology=mediators", "topology.epochs=1_000_000_000_000"), "planned before it begins"),
        (("cluster.threads=2000",), "no node has as many cores"),
        (("cluster.state_memory=1e9",), "more than any node has"),
        (("local.steps=18446744073709551616",), "not told apart"),
        (("local.steps=1_000_001",), "laid out before it trains"),
        (("local.epochs=100_001",), "laid out before it trains"),
        (("rounds=1_000_000_000_000",), "eight digits"),
        (("local.lr=1e308",), "single precision"),
        (("local.schedule=step", "local.schedule.factor=1e20", "local.schedule.every=1"), "nearer 1"),
        (("local.schedule=step", "local.schedule.factor=1e-30", "local.schedule.every=2"), "nearer 1"),
        (("rebalance=true", "rebalance.rotation=1e9"), "every angle"),
        (("rebalance=true", "rebalance.shift=3"), "leaves nothing of the image"),
        (("server.weights=q-ffl", "server.weights.q=1e6"), "server.weights.q"),
        (("seed=" + "9" * 5000,), "seed"),
        (("data.source=2020-01-01",), "give a name"),
        (("a" + ".a" * 3000 + "=1",), "write part.key=value"),
        (("local.lr=" + "'''x\ny'''" + "z" * 9000,), "local.lr"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_reason(settings: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, [*FEDAVG, *settings])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2100


@pytest.mark.parametrize(
    "settings",
    [
        (*ROWS, "samples.size.epsilon=1e-6"),
        (*ROWS, "samples.size.epsilon=500"),
        (*NOISE, "privacy.noise_multiplier=0"),
        (*NOISE, "privacy.noise_multiplier=1e-6"),
        (*CLOCK, "devices.speed.sigma=50"),
        ("rounds=99_999_999", "local.steps=1_000_000"),
        ("server.optimizer=adam", "server.optimizer.tau=1e-15"),
        ("cluster.threads=1024", "local.proximal_mu=0"),
    ],
)
def test_the_bounds_themselves_are_allowed(settings: tuple[str, ...]) -> None:
    load_config(None, [*FEDAVG, *settings])


def test_more_threads_than_a_system_starts_are_refused() -> None:
    check_threads(os.cpu_count() or 1)
    with pytest.raises(UserError, match="cluster.threads = 100000"):
        check_threads(100_000)


def test_a_run_starts_no_more_threads_than_a_system_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(UserError, match="cluster.threads = 17, but this node .* has 2 cores: choose at most 16"):
        fedmpi.run("fedavg", {"rounds": 1, "cluster.threads": 17}, data="digits:clients=4")


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "link to itself", "link to a device"])
def test_a_configuration_is_a_plain_file(kind: str, tmp_path: Path) -> None:
    runs.make_kind(tmp_path / "c.toml", kind)
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


def test_a_configuration_of_endless_brackets_is_no_toml(tmp_path: Path) -> None:
    for content in ("a = " + "[" * 100_000, "seed = " + "1" * 5000):
        (tmp_path / "c.toml").write_text(content)
        with pytest.raises(UserError, match="is not valid TOML"):
            load_config(tmp_path / "c.toml")


FOUND: list[tuple[ModuleType, tuple[Any, ...], str]] = [
    (shards, ("uint8", "dataset", ("train-00000.h5", "x", "external link")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "y", "soft link")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "x", "dangling link")), "refused"),
    (shards, ("uint8", "dataset", ("test.h5", "x", "external storage")), "refused"),
    (shards, ("uint8", "dataset", ("test.h5", "x", "virtual")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "y", "compact")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "y", "float")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "offsets", "float")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "class_counts", "float")), "refused"),
    (shards, ("uint8", "dataset", ("train-00000.h5", "x", "empty")), "refused"),
    (shards, ("float32", "dataset", ("train-00000.h5", "x", "big-endian")), "refused"),
    (shards, ("uint8", "value", ("train-00000.h5", "y", 0.5, 3)), "refused"),
    (shards, ("uint8", "value", ("test.h5", "y", 0.5, -100)), "refused"),
    (shards, ("uint8", "value", ("val.h5", "y", 0.0, 255)), "refused"),
    (shards, ("uint8", "value", ("train-00000.h5", "offsets", 0.5, -(2**63))), "refused"),
    (shards, ("uint8", "value", ("train-00001.h5", "offsets", 0.5, 2**63 - 1)), "refused"),
    (shards, ("float32", "value", ("train-00000.h5", "x", 0.5, np.nan)), "read"),
    (shards, ("uint8", "kind", ("train-00000.h5", "fifo")), "refused"),
    (shards, ("uint8", "kind", ("manifest.json", "fifo")), "refused"),
    (shards, ("uint8", "kind", ("manifest.json", "folder")), "refused"),
    (shards, ("uint8", "kind", ("test.h5", "link to a device")), "refused"),
    (shards, ("uint8", "kind", ("val.h5", "link to itself")), "refused"),
    (shards, ("uint8", "text", (0.0, b"[" * 3)), "refused"),
    (checkpoints, ("metadata", "[" * 50_000), "refused"),
    (checkpoints, ("metadata", "5"), "refused"),
    (checkpoints, ("signed", {"next_round": "7"}), "refused"),
    (checkpoints, ("signed", {"next_round": 10**400}), "refused"),
    (checkpoints, ("signed", {"settled": -1}), "refused"),
    (checkpoints, ("signed", {"unsettled": []}), "refused"),
    (checkpoints, ("kind", ("newest", "fifo")), "refused"),
    (checkpoints, ("kind", ("model", "fifo")), "refused"),
    (checkpoints, ("model", "another type"), "refused"),
    (checkpoints, ("model", "a huge header"), "refused"),
    (raw, ("npz", "arrays", ([("y", "floats")], None)), "refused"),
    (raw, ("npz", "arrays", ([("x", "scalar")], None)), "refused"),
    (raw, ("npz", "arrays", ([("x", "no columns")], None)), "refused"),
    (raw, ("npz", "arrays", ([("x", "ids")], "text")), "refused"),
    (raw, ("npz", "arrays", ([("y", "empty texts")], None)), "refused"),
    (readers, ("own", ("x", "meta tensor"), {}), "refused"),
    (readers, ("own", ("x_test", "text"), {}), "refused"),
    (raw, ("npz", "header", raw.HEADERS[0]), "refused"),
    (raw, ("npz", "header", raw.HEADERS[1]), "refused"),
    (raw, ("npz", "header", raw.HEADERS[4]), "refused"),
    (raw, ("npz", "header", raw.HEADERS[7]), "refused"),
    (raw, ("npz", "bomb", 0), "read"),
    (raw, ("csv", "column", (0, "Bob")), "refused"),
    (raw, ("csv", "ends", "\r"), "refused"),
    (raw, ("csv", "cells", [(0.5, "x" * 200_000)]), "read"),
    (raw, ("mnist", "shape", [20, 0, 0]), "refused"),
    (raw, ("mnist", "shape", [0, 4, 4]), "refused"),
    (raw, ("mnist", "shape", [20, 2, 8]), "refused"),
    (raw, ("mnist", "shape", [2**32 - 1] * 3), "refused"),
    (raw, ("images", "png", (60_000, 60_000)), "read"),
    (raw, ("images", "sizes", [4, 5]), "refused"),
    (raw, ("cifar", "pickle", "objects"), "refused"),
    (raw, ("cifar", "pickle", "a call"), "refused"),
    (raw, ("cifar", "pickle", "deep"), "refused"),
    (raw, ("femnist", "json", (0.0, "[" * 100_000)), "refused"),
    (raw, ("femnist", "json", (0.6, '{"users": ["a"], "user_data": {"a": 5}}')), "refused"),
    (raw, ("amazon", "lines", "[" * 100_000), "read"),
    (raw, ("amazon", "kind", (0.0, "fifo")), "refused"),
    (parts, ("aggregator", "tensor with a gradient", "nothing"), "run"),
    (parts, ("aggregator", "meta tensor", "nothing"), "refused"),
    (parts, ("server", "meta tensor", "nothing"), "refused"),
    (parts, ("server", "tensor with a gradient", "gradients off"), "run"),
    (parts, ("scheduling", "sparse tensor", "default type"), "refused"),
    (runs, ("stopped", "kind", ("run.log", "socket")), "refused"),
    (runs, ("stopped", "junk", ("config.toml", "rounds = 1" + "0" * 5000)), "refused"),
    (runs, ("finished", "junk", ("summary.json", "[" * 50_000)), "gone on"),
    (runs, ("finished", "junk", ("summary.json", '{"final": 3}')), "gone on"),
    (parts, ("loss", "tensor with a gradient", "nothing"), "refused"),
    (parts, ("forward", "leaves", "nothing"), "refused"),
    (parts, ("forward", "meta tensor", "nothing"), "refused"),
    (parts, ("forward", "unspeakable", "nothing"), "refused"),
    (parts, ("forward", "no exception", "nothing"), "refused"),
    (parts, ("rows", "tensor with a gradient", "nothing"), "refused"),
    (parts, ("correction", "sparse tensor", "nothing"), "refused"),
    (places, ("out", "x" * 5000, "gone", ""), "refused"),
    (places, ("out", "\0", "gone", ""), "refused"),
    (places, ("scripts", "\0", "gone", ""), "refused"),
    (places, ("load_run", "x" * 5000, "gone", ""), "refused"),
    (places, ("site", "x", "link to itself", ""), "refused"),
    (places, ("config", "", "gone", "/dev/full"), "refused"),
    (places, ("reference", "", "gone", "/dev/zero"), "refused"),
    (places, ("plot", "", "gone", "/dev/full"), "refused"),
    (texts, ("config", ([b"a = " + b"[" * 10_000], (0.0, b""))), "refused"),
    (texts, ("site", {"launcher": "{a.b}"}), "refused"),
    (texts, ("good job", ("", "a\nb", {})), "refused"),
]


@pytest.mark.parametrize(
    ("kind", "case", "expected"), FOUND, ids=[f"{kind.__name__[11:]}-{case[:2]}"[:60] for kind, case, _ in FOUND]
)
def test_what_was_found_once_is_refused_or_used_rightly(kind: ModuleType, case: Any, expected: str) -> None:
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


def _leaves(*given: Any, **options: Any) -> Any:
    sys.exit(0)


def _another_signature() -> None:
    pass


@pytest.mark.parametrize("part", [_leaves, _another_signature])
@pytest.mark.parametrize("key", ["clients.sampler", "server.weights", "model.name"])
def test_a_part_that_leaves_ends_the_run_as_a_failure(part: Callable[..., Any], key: str) -> None:
    with pytest.raises((ComponentFailure, UserError), match="_leaves|_another_signature"):
        fedmpi.run("fedavg", {key: part, "rounds": 1}, data="digits:clients=4")


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


def test_clients_that_diverge_together_are_a_failure_that_names_one() -> None:
    with pytest.raises(ClientFailure, match="client [0-3] on rank 0: .*training diverged"):
        fedmpi.run("fedavg", {"server.optimizer.lr": 1e9, "rounds": 3, "evaluation.every": 3}, data="digits:clients=4")


def test_names_that_look_like_markup_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    folder = shards.original("uint8").parent / "[" / "x] [bold]"
    shards.copy("uint8", folder)
    inspect_store(open_store(folder)).render(Console(width=200))
    assert "[/x] [bold]" in capsys.readouterr().out


def test_a_folder_without_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="is empty"):
        data_prep(["digits", "--partition", "iid", "--clients", "4", "--out", ""])
    with pytest.raises(UserError, match="is empty"):
        fedmpi.run("fedavg", {"rounds": 1}, out="")
    assert not list(tmp_path.iterdir())


def test_what_is_no_utf8_is_printed_all_the_same(capfdbinary: Any) -> None:
    def show() -> int:
        print("drawn to \udcff")
        return 0

    with pytest.raises(SystemExit) as ended, capfdbinary.disabled():
        run_guarded(show)
    assert ended.value.code == 0
