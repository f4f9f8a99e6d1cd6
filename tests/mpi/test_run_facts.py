"""Ranks started with different files or options are rejected before they train: one sentence, code 2, no hang.

Each job is started as several components of one mpiexec, each with other arguments.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from fedmpi.config import load_config
from fedmpi.core.experiment import _difference, facts_of_run
from fedmpi.data.opening import open_store
from fedmpi.records.provenance import digests, part_sources
from tests.end_to_end.runs import TRAIN, choices
from tests.mpi.launch import find_mpiexec, finish_job, run_alone, start_job

pytestmark = pytest.mark.timeout(600)
SECONDS = 200
HOST = socket.gethostname()
COMMON = ("preset=fedavg", "rounds=100000", "logging.tensorboard=false")


def run_components(*components: Sequence[str | Path], env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """One rank for each list of words, `python WORDS`."""
    words: list[str] = [find_mpiexec()]
    for component in components:
        words += [*([":"] if len(words) > 1 else []), "-n", "1", sys.executable, *map(str, component)]
    return finish_job(start_job(words, env), SECONDS)


def unlike(out: Path, *sets: Sequence[str]) -> str:
    """Return the output of a job whose ranks are started with these settings in addition to the common ones."""
    job = run_components(*([*TRAIN, *choices(*COMMON, *settings), "--out", out] for settings in sets))
    assert job.returncode == 2, job.stderr
    assert job.stderr.count("error: ") == 1 and "Traceback" not in job.stderr
    assert not out.exists()
    return next(line for line in job.stderr.splitlines() if line.startswith("error: "))


def test_the_key_that_differs_is_named_with_its_ranks_and_hosts(tmp_path: Path):
    said = unlike(tmp_path / "RUN", ["local.lr=0.1"], ["local.lr=0.1"], ["local.lr=0.1", "rounds=7"])
    assert said == (
        f"error: the ranks do not run the same: rounds is 100000 on rank 0 ({HOST}) and 7 on rank 2 ({HOST}): give all "
        "ranks the same files and options"
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "digits"
    words = "-m data_prep digits --partition iid --clients 6 --shards 2 --seed 0 --out"
    made = run_alone([*words.split(), folder], timeout=SECONDS)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_data_and_sources_that_differ_under_the_same_name_are_named_by_file(shards: Path, tmp_path: Path):
    """Two hosts with separate disks: the same path, other files; here two working folders."""
    for rank, width in enumerate((8, 9)):
        folder = tmp_path / str(rank)
        shutil.copytree(shards, folder / "shards")
        (folder / "helper.py").write_text(f"WIDTH = 8\nUNUSED = {width}\n")
        (folder / "mine.py").write_text(
            "import math\nfrom torch import nn\nfrom helper import WIDTH\n"
            "def net(d):\n    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(d.feature_shape), WIDTH), "
            "nn.Linear(WIDTH, d.classes))\n"
        )
    path = tmp_path / "1" / "shards" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["train"][1]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    words = [*TRAIN, *choices(*COMMON, "data.source=shards", "model.name=mine:net"), "--out", tmp_path / "RUN"]
    move = "import os; os.chdir({!r}); from fedmpi.__main__ import main; main()"
    job = run_components(*(["-c", move.format(str(tmp_path / str(rank))), *words[2:]] for rank in (0, 1)))
    assert job.returncode == 2, job.stderr
    assert f"manifest.json, {manifest['train'][1]['name']} (sha256) is " in job.stderr
    assert "helper.py (sha256) is " in job.stderr and "mine.py" not in job.stderr


# Compared facts, on one rank


def test_every_key_version_and_shard_is_among_the_facts(shards: Path):
    config = load_config(None, ["preset=fedavg", "local.lr=0.3", "rounds=9", f"data.source={shards}"])
    facts = facts_of_run(config, open_store(shards).manifest)
    assert facts["local.lr"] == "0.3" and facts["preset"] == "'fedavg'" and facts["rounds"] == "9"
    assert facts["fedmpi (version)"] == fedmpi.__version__
    assert facts["numpy (version)"] == np.__version__
    assert {"torch (version)", "python (version)", "fedmpi's own sources (sha256)"} <= facts.keys()
    for file in open_store(shards).manifest.files():
        assert facts[f"manifest.json, {file.name} (sha256)"] == file.sha256


def test_the_same_data_prepared_by_another_command_are_the_same(shards: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(shards, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["command"] = "another one"
    (copy / "manifest.json").write_text(json.dumps(manifest))
    identity = open_store(shards).manifest.identity()
    assert open_store(copy).manifest.identity() == identity
    counted = {f"manifest.json, {key}" for key in ("classes", "partition_options", "seed", "description")}
    assert counted <= identity.keys()


def test_a_key_that_only_one_rank_has_is_named():
    assert _difference([0, 2], [encoded({"a": "1"}), encoded({}), encoded({"a": "1", "model.width": "3"})]) == (
        "the ranks do not run the same: model.width is unset on rank 0 (here) and 3 on rank 2 (here): give all ranks "
        "the same files and options"
    )


def encoded(facts: dict[str, str]) -> np.ndarray:
    return np.frombuffer(json.dumps(["here", facts]).encode(), np.uint8)


def test_the_files_of_a_model_are_its_module_and_what_it_imports(tmp_path: Path, monkeypatch):
    package = tmp_path / "nets_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("import torch\n")
    (package / "net.py").write_text("from nets_of_mine import parts\ndef net(d): ...\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(None, ["preset=fedavg", "model.name=nets_of_mine.net:net"])
    found = digests(part_sources(config))
    assert found.keys() == {"nets_of_mine/__init__.py", "nets_of_mine/net.py", "nets_of_mine/parts.py"}
    (package / "parts.py").write_text("import torch \n")
    again = digests(part_sources(config))
    assert {path for path in found if found[path] != again[path]} == {"nets_of_mine/parts.py"}
