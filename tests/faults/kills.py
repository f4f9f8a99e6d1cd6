"""Runs killed by signal 9 at random moments, and resumed until they are done.

    python -m tests.faults.kills --runs 50

A process of the job dies: any rank, mpiexec, or the launcher's proxy; at any moment between the start and the end, or
while a file is being written. What comes out must be what an undisturbed run leaves: records, model, totals.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.end_to_end.runs import TRAIN, choices, curve
from tests.mpi.launch import Job, end_job, finish_job, start_mpi_job

COMMON = (
    "data.source=digits:clients=12,alpha=0.5",
    "model.name=tests.end_to_end.user_models:unhurried_mlp",
    "rounds=40",
    "checkpoint.every=3",
    "logging.tensorboard=false",
    "local.engine=sequential",
    "local.batch_size=40",
    "clients.count=4",
)
STALE_STRATA = (
    "clients.sampler=stratified",
    "clients.sampler.features=full-gradient",
    "clients.sampler.strata=3",
    "clients.sampler.refresh=2",
    "clients.sampler.refresh_clients=selected",
    "server.weights=stratified",
)
ADAM = ("server.optimizer=adam", "server.optimizer.lr=0.01")
FEEDBACK = ("compression=top-k", "compression.fraction=0.1", "compression.error_feedback=true")
SYSTEMS = {
    "error feedback": FEEDBACK,
    "server Adam, stale strata": (*STALE_STRATA, *ADAM),
    "SCAFFOLD": ("local.algorithm=scaffold",),
}
ALL_AT_ONCE = (*STALE_STRATA, *ADAM, *FEEDBACK)
NAP = {"NAP": "0.005"}
"""Seconds a training step, so that a run lasts long enough to be killed in every part of it."""
KILLS_OF_A_RUN = 4
SECONDS = 600
LINGER = 120.0
"""Seconds in which all processes of a job must be gone once one was killed, on very busy machines too."""


@dataclass
class Report:
    """What was tried."""

    kills: Counter[str] = field(default_factory=Counter)  # By victim
    rounds: list[int] = field(default_factory=list)  # Records in the folder when it was struck
    moments: Counter[str] = field(default_factory=Counter)  # Start-up, training, writing
    slowest: float = 0.0  # Most seconds from a kill to the end of the last process of the job
    runs: int = 0  # Finished
    wrong: list[str] = field(default_factory=list)  # What went wrong, if anything

    def __str__(self) -> str:
        return (
            f"{self.kills.total()} kills of {self.runs} runs; victims: {dict(self.kills)}; moments: "
            f"{dict(self.moments)}; after {sorted(self.rounds)} records; all gone within "
            f"{self.slowest:.1f} s; wrong: {self.wrong or 'nothing'}"
        )


def left_by(run: Path) -> tuple[Any, ...]:
    """Curve, model, and of the summary what does not depend on time and starts."""
    summary = json.loads((run / "summary.json").read_text())
    for name in ("wall_seconds", "mpi_bytes", "git_commit"):
        del summary[name]
    return curve(run), (run / "model.safetensors").read_bytes(), summary


def start(run: Path, settings: tuple[str, ...], ranks: int) -> Job:
    """Start or resume: the same line for both."""
    return start_mpi_job(ranks, [*TRAIN, *choices(*COMMON, *settings), "--out", run, "--resume"], env=NAP)


def undisturbed(run: Path, settings: tuple[str, ...], ranks: int) -> tuple[Any, ...]:
    """What nobody disturbs."""
    job = finish_job(start(run, settings, ranks), SECONDS)
    assert job.returncode == 0, job.stderr
    return left_by(run)


def strike(job: Job, run: Path, dice: random.Random, report: Report) -> bool:
    """Wait for a random moment and kill a random process of the job; false when the job ended before."""
    moment = dice.choices(["start-up", "training", "writing"], [1, 3, 1])[0]
    begun, path = recorded(run), run / "metrics.jsonl"
    if moment == "start-up":
        time.sleep(dice.uniform(0, 3))
    else:
        before = path.stat().st_mtime_ns if path.exists() else 0
        while job.poll() is None and not (path.exists() and path.stat().st_mtime_ns > before and recorded(run) > begun):
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 1.5))
    if moment == "writing":
        until = time.monotonic() + 2
        while not list((run / "checkpoints").glob(".*.partial")) and job.poll() is None and time.monotonic() < until:
            pass
    struck = kill_one(job, run, dice, report)
    report.moments[moment] += struck
    return struck


def kill_one(job: Job, run: Path, dice: random.Random, report: Report) -> bool:
    """Kill a random process of the job, and see that all others are gone soon; false when the job ended before."""
    members = members_of(job)
    if job.poll() is not None or not members:
        return False
    victim = dice.choice(sorted(members))
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    report.rounds.append(recorded(run))
    try:
        members[victim].kill()
    except psutil.NoSuchProcess:
        return False
    report.kills[victim] += 1
    struck = time.monotonic()
    try:
        job.wait(LINGER)
    except subprocess.TimeoutExpired:
        report.wrong.append(f"the job did not end after {victim} was killed")
    _, alive = psutil.wait_procs([process for process in processes if process.pid != job.pid], timeout=LINGER)
    report.slowest = max(report.slowest, time.monotonic() - struck)
    if alive:
        report.wrong.append(f"{len(alive)} processes went on after {victim} was killed")
        for process in alive:
            process.kill()
    end_job(job)
    job.communicate()
    return True


def recorded(run: Path) -> int:
    """Rounds that the run has recorded so far."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def members_of(job: Job) -> dict[str, psutil.Process]:
    """The processes of a job: mpiexec, its proxy, and the ranks, as far as they have come up."""
    try:
        launcher = psutil.Process(job.pid)
        members = {"mpiexec": launcher}
        for process in launcher.children(recursive=True):
            environ = process.environ()
            rank = environ.get("PMI_RANK") or environ.get("OMPI_COMM_WORLD_RANK")
            members[f"rank {rank}" if rank else "proxy"] = process
    except psutil.Error:
        return {}
    return members


def tortured(run: Path, settings: tuple[str, ...], ranks: int, kills: int, dice: random.Random, report: Report) -> None:
    """One run, killed so many times unless it is done before, and then let go on to its end."""
    for _ in range(kills):
        job = start(run, settings, ranks)
        if not strike(job, run, dice, report):
            ended = finish_job(job, SECONDS)
            if ended.returncode:
                report.wrong.append(f"ended with {ended.returncode}: {ended.stderr[-500:]}")
            return
    ended = finish_job(start(run, settings, ranks), SECONDS)
    if ended.returncode:
        report.wrong.append(f"cannot go on ({ended.returncode}): {ended.stderr[-500:]}")


def main() -> int:
    """Kill runs of all systems in turn until so many kills have struck."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="how many kills")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills-of-a-run", type=int, default=KILLS_OF_A_RUN)
    asked = parser.parse_args()
    dice, folder = random.Random(asked.seed), Path(tempfile.mkdtemp(prefix="kills-"))
    whole = {
        name: undisturbed(folder / name.replace(" ", "-"), system, asked.ranks) for name, system in SYSTEMS.items()
    }
    reports = {name: Report() for name in SYSTEMS}
    number = 0
    while (left := asked.runs - sum(report.kills.total() for report in reports.values())) > 0:
        name = list(SYSTEMS)[number % len(SYSTEMS)]
        report, run = reports[name], folder / f"run-{number}"
        tortured(run, SYSTEMS[name], asked.ranks, min(left, asked.kills_of_a_run), dice, report)
        report.runs += 1
        if not (run / "summary.json").exists() or left_by(run) != whole[name]:
            report.wrong.append(f"{run} differs from the undisturbed run")
        else:
            shutil.rmtree(run)
        print(f"{name}: {report}", flush=True)
        number += 1
    for name, report in reports.items():
        print(f"{name:26} {report}")
    wrong = any(report.wrong for report in reports.values())
    if not wrong:
        shutil.rmtree(folder)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
