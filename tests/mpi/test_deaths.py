"""`cluster.on_rank_failure = "shrink"`: ranks die by signal 9, and the others come to what an undisturbed run comes to.

With exact sums that is the same to the bit on any number of ranks, so one process makes what all is compared with.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi.cluster.launcher import library_version
from fedmpi.cluster.living import SET_BY_OPTION, why_fatal
from tests.end_to_end.runs import SECONDS, TIMINGS, TRAIN, curve, rank_of_job, wait_for_rounds
from tests.mpi.deaths import settings
from tests.mpi.launch import find_mpiexec, finish_job, run_mpi, start_job

Outcome = tuple[list[dict[str, Any]], bytes]
OPEN_MPI = library_version().startswith("Open MPI")
survivable = pytest.mark.skipif(not OPEN_MPI, reason="this MPI ends the job when a rank dies")
pytestmark = pytest.mark.timeout(1500)

RUNS = {
    "memory": ("combined", (7, "client", 2), {2}),
    "neighbour": ("strata", (1, "client", 3), {3}),
    "setup": ("window", (6, "start", -1), {0}),
    "relay": ("mediators", (5, "sum", 2), {2}),
    "server": ("window", (0, "evaluation", 3), {2, 3}),  # the checkpoint of round 3 may not have been written yet
    "checkpoint": ("feedback", (4, "checkpoint", 3), {2}),
    "state": ("scaffold", (3, "client", 5), {4}),
}
"""System, who of those launched dies when, and the round gone on from: one after the other on the ranks that are left.
"""
RANKS = len(RUNS) + 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What one process makes of a system."""
    folder, made = tmp_path_factory.mktemp("undisturbed"), {}

    def make(system: str) -> Outcome:
        if system not in made:
            fedmpi.run(settings(system), out=folder / system)
            made[system] = outcome(folder / system)
        return made[system]

    return make


def outcome(run: Path) -> Outcome:
    """Records without times, and the model's file."""
    return untimed(curve(run)), (run / "model.safetensors").read_bytes()


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what differs between numbers of ranks: times, and journeys between them."""
    left = (*TIMINGS, "idle_seconds", "hops")
    return [{key: value for key, value in record.items() if key not in left} for record in records]


def under_ulfm(ranks: int, *args: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [find_mpiexec(), "--with-ft", "ulfm", "-n", str(ranks), sys.executable, *map(str, args)]
    return start_job(command, env)


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all `RUNS`."""
    folder = tmp_path_factory.mktemp("deaths")
    runs = json.dumps([(name, system, [death]) for name, (system, death, _) in RUNS.items()])
    job = finish_job(under_ulfm(RANKS, "-m", "tests.mpi.deaths", folder, runs), SECONDS)
    assert job.returncode == 0, job.stderr
    return folder


@survivable
@pytest.mark.parametrize("name", RUNS)
def test_the_others_take_over_and_come_to_the_same(name: str, died: Path, undisturbed: Callable[[str], Outcome]):
    system, (rank, _, _), rounds = RUNS[name]
    if name == "memory":
        summary, records = json.loads((died / "memory.json").read_text())
        assert untimed(records) == undisturbed(system)[0]
    else:
        summary = json.loads((died / name / "summary.json").read_text())
        assert outcome(died / name) == undisturbed(system)
        log = (died / name / "run.log").read_text()
        assert f"rank {rank}" in log and "ended by" not in log
    (lost,) = summary["lost_ranks"]
    dead_before = [death[0] for _, death, _ in list(RUNS.values())[: list(RUNS).index(name) + 1]]
    assert lost["rank"] == rank and lost["ranks"] == [left for left in range(RANKS) if left not in dead_before]
    assert lost["resumed_at"] in rounds
    assert bool(lost["host"]) == (name != "setup")  # where the ranks do not know one another yet
    assert summary["ranks"] == len(lost["ranks"])


@survivable
def test_a_worker_and_then_the_servers_neighbour_killed_at_four_ranks(
    tmp_path: Path, undisturbed: Callable[[str], Outcome]
):
    run = tmp_path / "RUN"
    words = [f"{key}={value}" for key, value in settings("plain").items()] + ["cluster.on_rank_failure=shrink"]
    asked = [word for setting in words for word in ("--set", setting)]
    job = under_ulfm(4, *TRAIN, *asked, "--out", run, env={"NAP": "0.1"})
    for rank, rounds in ((2, 1), (1, 3)):
        wait_for_rounds(job, run, rounds)
        rank_of_job(job, rank).kill()
    ended = finish_job(job, SECONDS)
    assert ended.returncode == 0, ended.stderr
    assert outcome(run) == undisturbed("plain")
    summary = json.loads((run / "summary.json").read_text())
    assert [(lost["rank"], lost["ranks"]) for lost in summary["lost_ranks"]] == [(2, [0, 1, 3]), (1, [0, 3])]


@pytest.mark.slow
def test_a_job_that_would_not_outlive_a_rank_is_refused():
    code = "import fedmpi; fedmpi.run('fedavg', {'rounds': 1, 'cluster.on_rank_failure': 'shrink'}, data='digits')"
    job = run_mpi(2, ["-c", code])
    remedy = "start with `mpiexec --with-ft ulfm" if OPEN_MPI else "this is MPICH"
    assert job.returncode != 0 and "needs" in job.stderr and remedy in job.stderr, job.stderr


@pytest.mark.parametrize(
    ("library", "environ", "refused"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: …", {SET_BY_OPTION: "1"}, "this is MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: …", {}, "the option --with-ft ulfm"),
        ("Open MPI v5.0.11, package: …", {SET_BY_OPTION: "0"}, "the option --with-ft ulfm"),
        ("Open MPI v5.0.11, package: …", {SET_BY_OPTION: "1"}, None),
    ],
)
def test_what_a_job_lacks_to_outlive_a_rank(library: str, environ: dict[str, str], refused: str | None):
    why = why_fatal(library, environ)
    assert why is None if refused is None else refused in why
