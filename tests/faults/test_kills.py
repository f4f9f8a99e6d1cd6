"""A run killed by signal 9 at random moments leaves, once it was resumed, what an undisturbed one leaves.

A process of the job dies: any rank, mpiexec, or the launcher's proxy; at any moment between the start and the end, or
while a file is being written.
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.runs import TRAIN, choices, curve
from tests.mpi.launch import Job, end_job, finish_job, start_mpi_job

COMMON = (
    *("data.source=digits:clients=12,alpha=0.5", "model.name=tests.end_to_end.user_models:unhurried_mlp"),
    *("rounds=40", "checkpoint.every=3", "logging.tensorboard=false"),
    *("local.engine=sequential", "local.batch_size=40", "clients.count=4"),
)
STALE_STRATA = (
    *("clients.sampler=stratified", "clients.sampler.features=full-gradient", "clients.sampler.strata=3"),
    *("clients.sampler.refresh=2", "clients.sampler.refresh_clients=selected", "server.weights=stratified"),
)
FEEDBACK = ("compression=top-k", "compression.fraction=0.1", "compression.error_feedback=true")
SETTINGS = (*COMMON, *STALE_STRATA, *FEEDBACK, "server.optimizer=adam", "server.optimizer.lr=0.01")
NAP = {"NAP": "0.005"}
"""Seconds a training step, so that a run lasts long enough to be killed in every part of it."""
SECONDS = 600
LINGER = 120.0
"""Seconds in which all processes of a job must be gone once one was killed, on very busy machines too."""


def left_by(run: Path) -> tuple[Any, ...]:
    """Curve, model, and of the summary what does not depend on time and starts."""
    summary = json.loads((run / "summary.json").read_text())
    for name in ("wall_seconds", "mpi_bytes", "git_commit"):
        del summary[name]
    return curve(run), (run / "model.safetensors").read_bytes(), summary


def start(run: Path) -> Job:
    """Start or resume: the same line for both."""
    return start_mpi_job(2, [*TRAIN, *choices(*SETTINGS), "--out", run, "--resume"], env=NAP)


def finish(job: Job) -> None:
    ended = finish_job(job, SECONDS)
    assert ended.returncode == 0, ended.stderr


def killed(job: Job, run: Path, dice: random.Random) -> str:
    """Kill a random process of the job at a random moment; return which and when, "" if the job ended before."""
    moment = dice.choices(["start-up", "training", "writing"], [1, 3, 1])[0]
    if moment == "start-up":
        time.sleep(dice.uniform(0, 3))
    else:
        begun = recorded(run)
        while job.poll() is None and recorded(run) == begun:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 1.5))
    until = time.monotonic() + 2 * (moment == "writing")
    while not list((run / "checkpoints").glob(".*.partial")) and job.poll() is None and time.monotonic() < until:
        pass
    try:
        launcher = psutil.Process(job.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        victim = dice.choice(processes)
        name = " ".join(victim.cmdline()[:4])
        victim.kill()
    except psutil.Error:
        return ""
    if job.poll() not in (None, -signal.SIGKILL):  # the launcher may be the victim
        return ""
    job.wait(LINGER)
    _, alive = psutil.wait_procs([process for process in processes if process.pid != job.pid], timeout=LINGER)
    end_job(job)
    job.communicate()
    assert not alive, f"{alive} went on after {name} was killed"
    return f"{name} at {moment} after {recorded(run)} records"


def recorded(run: Path) -> int:
    """Rounds that the run has recorded so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_twice_is_the_undisturbed_one(tmp_path: Path):
    finish(start(tmp_path / "WHOLE"))
    run, dice, struck = tmp_path / "RUN", random.Random(3), []
    for _ in range(2):
        struck.append(killed(start(run), run, dice))
    finish(start(run))
    assert any(struck) and left_by(run) == left_by(tmp_path / "WHOLE")
