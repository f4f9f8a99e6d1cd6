"""`mpiexec fedmpi train` when something is wrong: one sentence, the right exit code, no rank left waiting.

Exit codes: 2 the user's input is wrong, 1 a failure while working.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import h5py
import pytest

import fedmpi
from data_prep.__main__ import run as prepare
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from tests.end_to_end.runs import SECONDS, TRAIN, Record, choices, curve
from tests.mpi.commands import run_commands
from tests.mpi.launch import run_mpi

pytestmark = pytest.mark.timeout(600)  # seconds, with its fixtures, on a busy machine
ENDLESS = "rounds=1000000"
"""A job with so many rounds ends only because of the fault."""
FEDAVG = ("preset=fedavg", "logging.tensorboard=false")
WORDS_OF_LAUNCHERS = re.compile(
    r"^Abort\(\d+\) on node .*\n?"  # MPICH, after an abort
    r"|^-{60,}\n(?s:.*?)^-{60,}\n?"  # Open MPI: its frame around "exited with non-zero status" and aborts
    r"|^\[warn\] Epoll .*\n?",  # Open MPI's event library
    re.M,
)


def here(folder: Path, *settings: str, resume: bool = False) -> None:
    """The same run in this process, to its end."""
    assert fedmpi.run(load_config(None, list(settings)), out=folder, resume=resume).ending == "finished"


def the_sentence(job: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The only thing that the job said, after checking that it is one line and the exit code is right."""
    said = [line for line in WORDS_OF_LAUNCHERS.sub("", job.stderr).splitlines() if line.strip()]
    assert len(said) == 1, job.stderr
    assert job.returncode == code
    return said[0]


# Input that is rejected before anything is trained: one job of two ranks is given nearly all of it


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as a folder of three shards."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    words = "digits --partition iid --clients 6 --shards 3 --seed 0 --out"
    assert prepare([*words.split(), str(folder)]) == 0
    return folder


def damaged(shards: Path, folder: Path) -> Path:
    shutil.copytree(shards, folder)
    return folder / "train-00001.h5"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two rounds."""
    folder = tmp_path_factory.mktemp("run") / "RUN"
    here(folder, *FEDAVG, "rounds=2")
    return folder


@dataclass(frozen=True)
class Refused:
    """The folder of all cases, how each of them ended, and the curve of the finished run before them."""

    folder: Path
    ended: dict[str, subprocess.CompletedProcess[str]]
    before: list[Record]


@pytest.fixture(scope="module")
def refused(shards: Path, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Refused:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "malformed.toml").write_text("rounds = 3\n[participation\ncount = 3\n")
    (folder / "unknown.toml").write_text("preset = 'fedavg'\n[clients]\ncuont = 3\n")
    (folder / "file").write_text("a file, so nothing can be made below it")
    truncated, flipped = damaged(shards, folder / "truncated"), damaged(shards, folder / "flipped")
    truncated.write_bytes(truncated.read_bytes()[:-2000])
    with h5py.File(flipped, "r+") as opened:
        opened["x"][0] = 255 - opened["x"][0]
    out, two = ("--out", folder / "RUN"), choices(*FEDAVG, "rounds=2")
    commands: dict[str, list[str | Path]] = {
        "malformed": ["train", folder / "malformed.toml"],
        "unknown": ["train", folder / "unknown.toml"],
        "no shards": ["train", *choices(*FEDAVG, f"data.source={folder / 'nowhere'}"), *out],
        "truncated": ["train", *choices(*FEDAVG, f"data.source={folder / 'truncated'}"), *out],
        "flipped": ["train", *choices(*FEDAVG, f"data.source={folder / 'flipped'}", "data.verify=true"), *out],
        "unwritable": ["train", *choices(*FEDAVG), "--out", folder / "file" / "RUN"],
        "held": ["train", *two, "--out", run],
        "another": ["train", *two, *choices("local.lr=0.2"), "--out", run, "--resume"],
    }
    before = curve(run)
    (programs := folder / "commands").mkdir()
    return Refused(folder, run_commands(2, commands, programs, SECONDS), before)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("malformed", ("malformed.toml is not valid TOML", "line 2")),
        ("unknown", ("unknown key clients.cuont in ", "unknown.toml; did you mean clients.count?")),
        ("no shards", ("nowhere does not exist", "data_prep")),
        ("truncated", ("truncated/train-00001.h5",)),
        ("flipped", ("flipped/train-00001.h5",)),
        ("unwritable", ("cannot write the run folder", "file/RUN (Not a directory)")),
        ("held", ("RUN holds a run already", "--resume", "--out")),
        ("another", ("config.toml differs from the configuration given", "local.lr")),
    ],
)
def test_wrong_input_is_one_sentence_and_changes_nothing(
    refused: Refused, run: Path, case: str, words: tuple[str, ...]
):
    sentence = the_sentence(refused.ended[case])
    assert sentence.startswith("error: ") and all(word in sentence for word in words)
    assert curve(run) == refused.before and not (refused.folder / "RUN").exists()


# Failures while working


def test_a_model_that_fails_on_a_client_names_client_and_rank(tmp_path: Path):
    rows = 7
    model = ("model.name=tests.end_to_end.user_models:choosy", f"model.refused={rows}", "clients.fraction=1.0")
    job = run_mpi(3, [*TRAIN, *choices(*FEDAVG, *model, ENDLESS), "--out", tmp_path / "RUN"])
    assert job.returncode == 1
    said = re.findall(
        r"^rank (\d) on \S+: error: client (\d+) on rank (\d): ValueError: this model takes no batch of 7 "
        r"\(\S+user_models.py:\d+, round 0\)$",
        job.stderr,
        re.M,
    )
    assert re.search(r"^rank \d:   File .*user_models.py\", line \d+, in forward$", job.stderr, re.M)
    assert said and "Traceback" not in job.stderr
    sizes = open_store("digits").sizes
    for speaker, client, rank in said:
        assert speaker == rank != "0"
        assert sizes[int(client)] % 10 == rows  # the last batch of an epoch is the short one
