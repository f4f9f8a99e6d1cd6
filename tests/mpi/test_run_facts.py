"""Ranks that were started with different files or options are refused before they train: one sentence, code 2, no hang.

Each job is started as several components of one mpiexec, every component with words of its own.
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
from fedmpi.data.opening import open_store
from fedmpi.records.provenance import plugin_files
from fedmpi.rounds.run_facts import _difference, _sources, facts_of_run
from tests.end_to_end.runs import TRAIN, choices
from tests.mpi.launch import REPOSITORY, find_mpiexec, finish_job, run_alone, start_job

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
    """What a job says whose ranks are started with these settings beside the common ones."""
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


SETTINGS = (
    "rounds=7",
    "checkpoint.every=7",
    "preset=fedprox",
    "local.batch_size=3",
    "local.engine=sequential",
    "data.shards=digits:seed=5",
    "seed=5",
    "aggregation.exact=true",
    "cluster.reduction=allreduce",
    "evaluation.every=3",
    "participation.count=3",
    "model.width=7",
)
CONNECTING = """
import json, sys
from fedmpi.config import load_config
from fedmpi import UserError
from fedmpi.rounds.assemble import Experiment

common, mine = map(json.loads, sys.argv[2:])
told = []
for setting in [None, *mine]:
    try:
        experiment = Experiment.connect(load_config(None, common + ([setting] if setting else [])))
        told.append("together")
    except UserError as error:
        told.append(str(error))
with open(sys.argv[1], "w") as file:
    json.dump(told, file)
"""
"""A rank that connects again and again, each time with another of its settings beside the common ones."""


@pytest.mark.slow
def test_any_key_that_differs_is_named(tmp_path: Path):
    """One job for all of them: every refusal leaves the ranks able to go on together."""
    unlike = ([""] * len(SETTINGS), SETTINGS)
    files = [tmp_path / "0.json", tmp_path / "1.json"]
    ranks = zip(files, unlike, strict=True)
    job = run_components(*(["-c", CONNECTING, path, json.dumps(COMMON), json.dumps(mine)] for path, mine in ranks))
    assert job.returncode == 0, job.stderr
    first, second = (json.loads(path.read_text()) for path in files)
    assert first == second and first[0] == "together"
    for setting, refusal in zip(SETTINGS, first[1:], strict=True):
        assert f"{setting.partition('=')[0]} is " in refusal, (setting, refusal)
        assert f"on rank 0 ({HOST})" in refusal and f"on rank 1 ({HOST})" in refusal


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards") / "digits"
    words = "-m data_prep digits --partition iid --clients 6 --shards 2 --seed 0 --out"
    made = run_alone([*words.split(), folder], timeout=SECONDS)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.slow
def test_data_that_differ_under_the_same_name_are_named_by_file(shards: Path, tmp_path: Path):
    """Two hosts with disks of their own: the same path, other shards; here two working folders."""
    for rank in (0, 1):
        shutil.copytree(shards, tmp_path / str(rank) / "shards")
    changed = tmp_path / "1" / "shards"
    manifest = json.loads((changed / "manifest.json").read_text())
    file = changed / manifest["train"][1]["name"]
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    manifest["train"][1]["sha256"] = "0" * 64
    (changed / "manifest.json").write_text(json.dumps(manifest))
    words = [*TRAIN, *choices(*COMMON, "data.shards=shards"), "--out", tmp_path / "RUN"]
    job = run_components(*(["-c", in_folder(tmp_path / str(rank)), *words[2:]] for rank in (0, 1)))
    assert job.returncode == 2, job.stderr
    assert f"manifest.json, {file.name} (sha256) is " in job.stderr and f"{'0' * 64} on rank 1" in job.stderr


@pytest.mark.slow
def test_data_that_one_rank_does_not_find_are_named(shards: Path, tmp_path: Path):
    shutil.copytree(shards, tmp_path / "0" / "shards")
    (tmp_path / "1").mkdir()
    words = [*TRAIN, *choices(*COMMON, "data.shards=shards"), "--out", tmp_path / "RUN"]
    job = run_components(*(["-c", in_folder(tmp_path / str(rank)), *words[2:]] for rank in (0, 1)))
    assert job.returncode == 2, job.stderr
    assert job.stderr.count("error: ") == 1
    assert f"the data is readable on rank 0 ({HOST}) and the shard folder shards does not exist" in job.stderr


def in_folder(folder: Path) -> str:
    return f"import os; os.chdir({str(folder)!r}); from fedmpi.__main__ import main; main()"


@pytest.mark.slow
def test_sources_of_a_model_that_differ_are_named(tmp_path: Path):
    for rank, width in enumerate((8, 9)):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "helper.py").write_text(f"WIDTH = 8\nUNUSED = {width}\n")
        (tmp_path / str(rank) / "mine.py").write_text(
            "import math\nfrom torch import nn\nfrom helper import WIDTH\n"
            "def net(d):\n    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(d.feature_shape), WIDTH), "
            "nn.Linear(WIDTH, d.classes))\n"
        )
    words = [*TRAIN, *choices(*COMMON, "model.name=mine:net"), "--out", tmp_path / "RUN"]
    job = run_components(*(["-c", in_folder(tmp_path / str(rank)), *words[2:]] for rank in (0, 1)))
    assert job.returncode == 2, job.stderr
    assert "helper.py (sha256) is " in job.stderr and "mine.py" not in job.stderr


@pytest.mark.slow
def test_another_version_of_fedmpi_on_one_rank_is_named(tmp_path: Path):
    copy = tmp_path / "other"
    shutil.copytree(REPOSITORY / "fedmpi", copy / "fedmpi")
    (copy / "fedmpi" / "metrics.py").open("a").write("\n# changed\n")
    words = [*TRAIN, *choices(*COMMON), "--out", tmp_path / "RUN"]
    first = f"import sys; sys.path.insert(0, {str(copy)!r}); from fedmpi.__main__ import main; main()"
    job = run_components(words, ["-c", first, *words[2:]])
    assert job.returncode == 2, job.stderr
    assert "fedmpi's own sources (sha256) is " in job.stderr


# What is compared, on one rank


def test_every_key_version_and_shard_is_among_the_facts(shards: Path):
    config = load_config(None, ["preset=fedavg", "local.lr=0.3", "rounds=9", f"data.shards={shards}"])
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
    assert open_store(copy).manifest.identity() == open_store(shards).manifest.identity()


@pytest.mark.parametrize("key", ["classes", "partition_options", "seed", "description"])
def test_whatever_else_the_manifest_says_counts(shards: Path, key: str):
    manifest = open_store(shards).manifest
    assert f"manifest.json, {key}" in manifest.identity()


def test_a_key_that_only_one_rank_has_is_named():
    assert _difference([0, 2], [encoded({"a": "1"}), encoded({}), encoded({"a": "1", "model.width": "3"})]) == (
        "the ranks do not run the same: model.width is unset on rank 0 (here) and 3 on rank 2 (here): give all ranks "
        "the same files and options"
    )


def test_at_most_three_of_the_differences_are_named():
    one, other = ({f"key{i}": str(value) for i in range(5)} for value in (1, 2))
    said = _difference([0, 1], [encoded(one), encoded(other)])
    assert said.count(" is ") == 3 and "key2 is 1" in said and "; 2 more differ" in said


def encoded(facts: dict[str, str]) -> np.ndarray:
    return np.frombuffer(json.dumps(["here", facts]).encode(), np.uint8)


def test_built_in_models_have_no_files_of_their_own():
    assert plugin_files("mlp") == {}


def test_the_files_of_a_model_are_its_module_and_what_it_loads_beside_itself(tmp_path: Path, monkeypatch):
    package = tmp_path / "nets_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("import torch\n")
    (package / "net.py").write_text("from nets_of_mine import parts\ndef net(d): ...\n")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = plugin_files("nets_of_mine.net:net")
    mine = {path for path in found if path.startswith("nets_of_mine")}
    assert mine == {"nets_of_mine/__init__.py", "nets_of_mine/net.py", "nets_of_mine/parts.py"}
    (package / "parts.py").write_text("import torch \n")
    again = plugin_files("nets_of_mine.net:net")
    assert {path for path in found if found[path] != again[path]} == {"nets_of_mine/parts.py"}


def test_what_a_model_loads_from_another_folder_is_among_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    made = ("net_in_one_folder", "helper_in_another", "installed_somewhere")
    request.addfinalizer(lambda: [sys.modules.pop(name, None) for name in made])  # Hypothesis reads every __file__
    (tmp_path / "nets").mkdir()
    (tmp_path / "library" / "site-packages").mkdir(parents=True)
    (tmp_path / "nets" / "net_in_one_folder.py").write_text(
        "import helper_in_another, installed_somewhere\ndef net(d): ...\n"
    )
    (tmp_path / "library" / "helper_in_another.py").write_text(
        "import pathlib\n__file__ = pathlib.Path(__file__)\nWIDTH = 8\n"  # no text, as of some made by hand
    )
    (tmp_path / "library" / "site-packages" / "installed_somewhere.py").write_text("")
    for folder in ("nets", "library", "library/site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = plugin_files("net_in_one_folder:net")
    assert {"net_in_one_folder.py", "helper_in_another.py"} <= found.keys()
    assert "installed_somewhere.py" not in found and not any("fedmpi" in path for path in found)
    (tmp_path / "library" / "helper_in_another.py").write_text("WIDTH = 9\n")
    again = plugin_files("net_in_one_folder:net")
    assert [path for path in found if found[path] != again[path]] == ["helper_in_another.py"]


def test_a_packages_digest_is_that_of_its_files_names_and_words(tmp_path: Path):
    packages = {"first": ("a.py", "1"), "again": ("a.py", "1"), "renamed": ("b.py", "1"), "changed": ("a.py", "2")}
    for folder, (name, words) in (packages | {"table": ("a.toml", "1")}).items():
        (tmp_path / folder / "room").mkdir(parents=True)
        (tmp_path / folder / "room" / name).write_text(words)
        (tmp_path / folder / "notes.txt").write_text(folder)
    first, again, *others = (_sources(tmp_path / folder) for folder in (*packages, "table"))
    assert first == again and len({first, *others}) == 4


def test_a_model_that_cannot_be_imported_is_a_fact_like_others():
    assert "failed with ModuleNotFoundError" in plugin_files("nowhere_at_all:net")["nowhere_at_all:net"]
