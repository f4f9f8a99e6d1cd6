"""What does not fit in memory is refused before it is taken, with the expected size and the key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedmpi
from fedmpi import UserError
from fedmpi.cluster import Cluster
from fedmpi.cluster.free_memory import address_space, free_memory
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.local.hooks import make_hooks
from fedmpi.local.traits import forward_traits, known_traits
from fedmpi.models.flat import FlatModel
from fedmpi.models.model_memory import BuiltWithin, NoRoom, asked_bytes, shown_bytes
from fedmpi.rounds.run_memory import _evaluated, refuse_large_run

GIB = 2**30
N, SIZES = 1000, np.full(1000, 200)


def room(tmp_path: Path, available: int, groups: dict[str, int | str], inside: str = "0::/job/step") -> int | None:
    """Free memory where a machine and control groups of version 2 say so."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available >> 10} kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(inside + "\n")
    for name, most in groups.items():
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("1000\n")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 600\n")
    return free_memory(tmp_path / "proc", tmp_path / "groups")


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, GIB),
        ({"job/step": "max"}, GIB),
        ({"job/step": 5000}, 5000 - 1000 + 600),  # what only holds copies of files is given back
        ({"job/step": "max", "job": 7000}, 6600),  # the group around it counts too
        ({"job/step": 9000, "job": 7000, "": 6500}, 6100),
        ({"job/step": 100}, 0),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, groups: dict[str, int | str], expected: int) -> None:
    assert room(tmp_path, GIB, groups) == expected


def test_control_groups_of_version_1_and_machines_that_say_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "groups" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8000\n")
    (folder / "memory.usage_in_bytes").write_text("3000\n")
    (folder / "memory.stat").write_text("total_inactive_file 50\n")
    assert room(tmp_path, GIB, {}, "4:cpu,memory:/a\n3:cpuset:/b") == 5050
    assert free_memory(tmp_path / "nowhere", tmp_path / "nowhere") is None


def test_a_limit_of_address_space_counts_less_what_is_held() -> None:
    program = (
        "import resource; from fedmpi.cluster.free_memory import *;"
        "held = address_space(); resource.setrlimit(resource.RLIMIT_AS, (held + 10**8,) * 2); print(free_memory())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert 0 < int(printed) <= 10**8


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.empty((3, 5)), 60),
        (lambda: torch.empty(3, 5, dtype=torch.float64), 120),
        (lambda: torch.zeros(size=(7,), dtype=torch.uint8), 7),
        (lambda: torch.full((2, 2), 1.0), 16),
        (lambda: torch.empty((3, 5), device="meta"), 0),
    ],
)
def test_the_bytes_of_a_tensor_are_known_before_it_is_made(
    call, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    guard = BuiltWithin(GIB, "it")
    monkeypatch.setattr(guard, "_look", seen.append)
    with guard:
        call()
    assert seen == [expected]
    assert asked_bytes((), {}) == asked_bytes(("x",), {}) == 0


def test_what_is_built_piece_by_piece_is_refused_when_the_pieces_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[nn.Module] = []
    monkeypatch.setattr("fedmpi.models.model_memory.address_space", lambda: 4_000_000 * len(layers))
    words = "it: at least .* held 3 times in training, but there is room for 100 MB"
    with pytest.raises(NoRoom, match=words), BuiltWithin(10**8, "it", vectors=3):
        for _ in range(100):
            layers.append(nn.Linear(1000, 1000))
    assert len(layers) == 8  # a ninth of 4 MB would make 108 MB in training


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model.hidden": [2**53]}, "model.hidden = [9007199254740992]: at least 2.31 EB"),
        ({"model.hidden": [20000, 20000000]}, "at least 1.6 TB"),
    ],
)
def test_a_model_beyond_all_memory_is_refused_before_it_is_taken(settings: dict[str, object], named: str) -> None:
    before = address_space()
    with pytest.raises(UserError) as caught:
        fedmpi.run("fedavg", settings, data="digits:clients=4")
    assert named in str(caught.value)
    assert address_space() - before < GIB


def planned(most: int | None, *settings: str) -> None:
    """Whether a run of a thousand clients of 200 digits each, with a model of 650 values, fits in so much memory."""
    config = load_config(None, ["preset=fedavg", "participation.fraction=0.5", *settings])
    description = open_store("digits").description
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    forward_traits(model, description)
    refuse_large_run(config, Cluster.connect(), model, description, SIZES, 400, 1, make_hooks(config, model, N), most)


MEDIATORS = ("topology.kind=mediators", "topology.mediator_epochs=10_000", "local.optimizer=adam")
SCAFFOLD = ("local.algorithm=scaffold", "participation.count=10", "cluster.state_memory=2")
BATCHED = ("local.engine=batched", "local.epochs=1000", "local.batch_size=20")


@pytest.mark.parametrize(
    ("settings", "needed", "named"),
    [
        (MEDIATORS, 500 * 10_000 * 100, "topology.mediator_epochs = 10,000"),
        (("aggregation.rule=median",), 500 * 650 * 4, 'aggregation.rule = "median"'),
        (SCAFFOLD, 1000 * 650 * 4, "lower cluster.state_memory"),
        (BATCHED, 1000 * 200 * 32, "local.epochs = 1,000"),
        (("local.engine=batched", "local.epochs=", "local.steps=5000"), 5000 * 10 * 32, "local.steps = 5,000"),
        (
            ("local.batch_size=9007199254740992", "local.epochs=2", "evaluation.batch_size=9"),
            200 * 64 * 4,
            "200 samples",
        ),
        (("evaluation.batch_size=9007199254740992",), 400 * 64 * 4, "400 samples evaluated at once"),
    ],
)
def test_what_clients_and_model_take_is_refused_where_it_does_not_fit(
    settings: tuple[str, ...], needed: int, named: str
) -> None:
    settings = tuple(setting for setting in settings if not setting.endswith("="))
    planned(needed, *settings)
    planned(None, *settings)
    with pytest.raises(NoRoom) as caught:
        planned(needed - 1, *settings)
    assert named in str(caught.value) and shown_bytes(needed) in str(caught.value)


def test_an_evaluation_by_default_needs_what_its_passes_need() -> None:
    """8 MiB of the widest layer of 65,536 values: 32 samples of it, not the 400 of the test part."""
    config = load_config(None, ["preset=fedavg"])
    description = open_store("digits").description
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 2**16), nn.ReLU(), nn.Linear(2**16, 10)))
    forward_traits(model, description)
    found = _evaluated(config, model, description, 400)
    assert found.bytes == 32 * 2**16 * 4 and found.what.startswith("32 samples evaluated at once")


def test_a_forward_pass_tells_what_it_keeps_of_a_sample() -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 10)))
    forward_traits(model, open_store("digits").description)
    found = known_traits(model)
    assert (found.bytes_kept, found.bytes_widest) == (4 * (64 + 300), 4 * 300)  # the input, and what the ReLU gives


def test_sizes_are_shown_in_a_unit_that_suits() -> None:
    assert [shown_bytes(n) for n in (7, 12_800, 36 * 2**40, 1e21)] == ["7 bytes", "12.8 kB", "39.6 TB", "1e+03 EB"]
