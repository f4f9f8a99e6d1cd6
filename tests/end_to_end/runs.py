"""Helpers of the end-to-end tests: start `fedmpi train`, wait for its progress, read the files that it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mpi.launch import REPOSITORY, Job, end_job

TRAIN = ("-m", "fedmpi", "train")
RICH = Path(__file__).parent / "rich.toml"
ROUNDS = 12
"""Rounds of rich.toml."""
SECONDS = 300
"""Limit of one job: sixty times what an idle machine needs, for very busy ones."""
TIMINGS = ("seconds", "phase_seconds", "busy_seconds")
"""Keys that differ between two runs of the same curve."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """A finished run: its folder, and what it printed."""

    folder: Path
    job: subprocess.CompletedProcess[str]


def choices(*settings: str) -> list[str]:
    """`--set` for each of the settings."""
    return [word for setting in settings for word in ("--set", setting)]


def records(run: Path) -> list[Record]:
    """The records of a run, every line checked to be one whole strict JSON object."""
    text = (run / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def curve(run: Path) -> list[Record]:
    """The records without the times."""
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records(run)]


def assert_same_curve_to_rounding(one: list[Record], other: list[Record]) -> None:
    """Same rounds, cohorts, rows and bytes; numbers to 1e-5, test scores to two of the 355 test images."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            slack = 2 / 355 if key in ("test_accuracy", "test_macro_f1") else 0.0
            near = pytest.approx(value, rel=1e-5, abs=slack) if isinstance(value, float) else value
            assert right[key] == near, (left["round"], key)


def staying(run: Path, rounds: int) -> dict[str, str]:
    """The environment in which an unhurried model stays at this many recorded rounds until it is stopped or killed."""
    return {"STAY_IN": str(run / "metrics.jsonl"), "STAY_AFTER": str(rounds)}


def wait_for_rounds(job: Job, run: Path, rounds: int) -> None:
    """Wait until the run has recorded this many rounds; fails when the job ends before."""
    path, deadline = run / "metrics.jsonl", time.monotonic() + SECONDS
    while not path.exists() or path.read_bytes().count(b"\n") < rounds:
        if job.poll() is not None or time.monotonic() > deadline:
            end_job(job)
            pytest.fail(f"no {rounds} rounds within {SECONDS} s, or ended too early: {job.communicate()}")
        time.sleep(0.01)


def rank_of_job(job: Job, rank: int) -> psutil.Process:
    """The process of a rank of an mpiexec job."""
    for process in psutil.Process(job.pid).children(recursive=True):
        environ = process.environ()
        if str(rank) in (environ.get("PMI_RANK"), environ.get("OMPI_COMM_WORLD_RANK")) and not process.children():
            return process
    raise AssertionError(f"no rank {rank} among the children of {job.args}")


def run_on_terminal(args: Sequence[str | Path], env: Mapping[str, str], columns: int = 120) -> tuple[int, str]:
    """Run `python ARGS` with standard output on a terminal of some columns; exit code and all that it printed."""
    primary, secondary = pty.openpty()
    without_size = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=secondary,
        stderr=subprocess.STDOUT,
        cwd=REPOSITORY,
        env={**without_size, "OMP_NUM_THREADS": "1", "TERM": "xterm", **env},
    )
    os.close(secondary)
    try:
        printed = _read_to_end(primary)
        return process.wait(SECONDS), printed
    finally:
        os.close(primary)
        process.kill()


def _read_to_end(descriptor: int) -> str:
    parts = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the last writer has gone
            part = b""
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
