"""Runs killed by signal 9 at random moments, and resumed until they are done.

    python -m tests.faults.kills --runs 50

A process of the job dies: any rank, mpiexec, or the launcher's proxy; at any moment between the start and the end, or
while a file is being written. What comes out must be what an undisturbed run leaves: records, model, totals.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

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
ADAM = ("server.optimizer=adam", "server.optimizer.lr=0.01")
FEEDBACK = ("compression=top-k", "compression.fraction=0.1", "compression.error_feedback=true")
SYSTEMS = {
    "error feedback": FEEDBACK,
    "server Adam, stale strata": (*STALE_STRATA, *ADAM),
    "SCAFFOLD": ("local.algorithm=scaffold",),
    "all but SCAFFOLD": (*STALE_STRATA, *ADAM, *FEEDBACK),
}
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


def start(run: Path, settings: tuple[str, ...], ranks: int) -> Job:
    """Start or resume: the same line for both."""
    return start_mpi_job(ranks, [*TRAIN, *choices(*COMMON, *settings), "--out", run, "--resume"], env=NAP)


def finish(job: Job) -> None:
    ended = finish_job(job, SECONDS)
    assert ended.returncode == 0, ended.stderr


def undisturbed(run: Path, settings: tuple[str, ...], ranks: int) -> tuple[Any, ...]:
    finish(start(run, settings, ranks))
    return left_by(run)


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


def tortured(run: Path, settings: tuple[str, ...], ranks: int, kills: int, dice: random.Random) -> list[str]:
    """Kill one run so many times unless it is done before, and then let it end."""
    struck = []
    for _ in range(kills):
        job = start(run, settings, ranks)
        if not (said := killed(job, run, dice)):
            finish(job)
            return struck
        struck.append(said)
    finish(start(run, settings, ranks))
    return struck


def main() -> int:
    """Kill runs of all systems in turn until so many kills have struck."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="how many kills")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    dice, folder, kills = random.Random(asked.seed), Path(tempfile.mkdtemp(prefix="kills-")), 0
    whole = {name: undisturbed(folder / f"whole {name}", system, asked.ranks) for name, system in SYSTEMS.items()}
    while kills < asked.runs:
        for name, system in SYSTEMS.items():
            run = folder / f"{name} {kills}"
            struck = tortured(run, system, asked.ranks, kills=4, dice=dice)
            assert left_by(run) == whole[name], f"{run} differs from the undisturbed run"
            kills += len(struck)
            print(f"{name}: {'; '.join(struck)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
