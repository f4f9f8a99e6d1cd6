"""Jobs under a real SLURM: they end as fedmpi ends, resume after requeues, preemptions, time limits and kills, and stay
canceled. `.ci/slurm` starts a SLURM on this machine for them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.runs import RICH, TRAIN, Record, assert_same_curve_to_rounding, choices, curve, records, staying
from tests.mpi.launch import REPOSITORY, run_alone

pytestmark = [
    pytest.mark.skipif(os.environ.get("FEDMPI_SLURM") != "1", reason="needs a SLURM on this machine: run .ci/slurm"),
    pytest.mark.timeout(700),
]
SECONDS = 240
"""Limit of one wait on a busy machine."""
REQUEUE_SECONDS = 2.5
"""SLURM does not start a job again within the second in which it was killed ("Job credential revoked")."""
LAUNCHERS = {"srun": "srun --kill-on-bad-exit=1", "mpiexec": "mpiexec"}


@dataclass(frozen=True)
class SlurmJob:
    """A job by its number, with the folder of its run and its log."""

    number: str
    run: Path
    log: Path

    def facts(self) -> dict[str, str]:
        """Return the output of `scontrol show job`."""
        shown = command("scontrol", "show", "job", self.number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_until(self, what: str, reached: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Poll until `reached()`; fails with the log after the time limit or when the job ends otherwise."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"not {what} in time: {self.facts()}\n{self.words()}"
            time.sleep(0.2)

    def wait_for_rounds(self, rounds: int) -> None:
        """Wait until the run has recorded this many rounds."""
        path = self.run / "metrics.jsonl"
        self.wait_until(f"at round {rounds}", lambda: path.exists() and path.read_bytes().count(b"\n") >= rounds)

    def wait_for_end(self, seconds: float = SECONDS) -> dict[str, str]:
        """Wait until the job is over; a requeued one is started at once instead of after SLURM's two minutes."""
        self.wait_until("over", self._over, seconds)
        return self.facts()

    def _over(self) -> bool:
        facts = self.facts()
        if facts["JobState"] == "PENDING" and facts["Restarts"] != "0":
            time.sleep(REQUEUE_SECONDS)
            command("scontrol", "update", f"jobid={self.number}", "StartTime=now")
        return facts["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def wait_for_array(self) -> None:
        """Wait until all tasks are over; all must have ended well."""

        def states() -> list[str]:
            return re.findall(r"JobState=(\S+)", command("scontrol", "show", "job", self.number).stdout)

        self.wait_until("over", lambda: bool(states()) and not {"PENDING", "RUNNING", "COMPLETING"} & set(states()))
        assert set(states()) == {"COMPLETED"}, f"{states()}\n{self.words()}"

    def words(self) -> str:
        """Return the log."""
        return self.log.read_text() if self.log.exists() else ""


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=30)


def submit(
    folder: Path, words: Sequence[str | Path], launcher: str = "srun", sbatch: Sequence[str] = (), **environ: str
) -> SlurmJob:
    """`sbatch jobs/job.sbatch` from the repository, with this environment's Python."""
    chosen = {"FEDMPI_COMMAND": f"{sys.executable} -m fedmpi", "PYTHONPATH": str(REPOSITORY), **environ}
    chosen |= {"FEDMPI_VENV": sys.prefix, "FEDMPI_LAUNCH": LAUNCHERS[launcher]}
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={folder}/job.log", *sbatch, "jobs/job.sbatch", *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **chosen},
        timeout=30,
    )
    assert submitted.returncode == 0, submitted.stderr
    return SlurmJob(submitted.stdout.strip().split(";")[0], folder / "RUN", folder / "job.log")


def train(folder: Path, config: Path, *options: str, **more: Any) -> SlurmJob:
    return submit(folder, ["train", config, "--out", folder / "RUN", *options], **more)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for the job; what is left of the job is cancelled in the end."""
    yield tmp_path
    command("scancel", "--name=fedmpi", f"--user={os.getuid()}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The curve of rich.toml without SLURM, in one process."""
    run = tmp_path_factory.mktemp("undisturbed") / "RUN"
    done = run_alone([*TRAIN, RICH, "--out", run], timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return curve(run)


def test_wrong_input_fails_with_2_and_one_sentence_in_the_log(folder: Path):
    job = train(folder, RICH, *choices("local.lrr=1"))
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0")
    assert job.words().count("error: unknown key local.lrr") == 1
    assert "Traceback" not in job.words()


def warned(job: SlurmJob) -> None:
    """Send the signal that SLURM sends some time before the limit of `--time`."""
    command("scancel", "--batch", "--signal=USR1", job.number)


def requeued(job: SlurmJob) -> None:
    assert command("scontrol", "requeue", job.number).returncode == 0


def preempted(job: SlurmJob) -> None:
    assert command("sbatch", "--partition=urgent", "--ntasks=4", "--output=/dev/null", "--wrap=true").returncode == 0


@pytest.mark.parametrize(
    ("strike", "launcher", "words"),
    [
        (warned, "srun", ["asking for the job to be queued again", "stopped after saving"]),
        (preempted, "srun", ["SLURM queues the job again"]),
        (requeued, "mpiexec", []),
    ],
)
def test_a_job_that_is_queued_again_continues_where_it_was(
    strike: Callable[[SlurmJob], None], launcher: str, words: list[str], folder: Path, undisturbed: list[Record]
):
    job = train(folder, RICH, launcher=launcher, NAP="0.02")
    job.wait_for_rounds(7)
    strike(job)
    facts = job.wait_for_end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), f"{facts}\n{job.words()}"
    assert all(said in job.words() for said in words), job.words()
    assert_same_curve_to_rounding(curve(job.run), undisturbed)
    resumed = re.findall(r"resumed at round (\d+)", (job.run / "run.log").read_text())
    assert len(resumed) == 1 and int(resumed[0]) >= 5  # at the latest checkpoint at least


def test_cancelled_killed_and_submitted_again_the_run_is_that_of_an_undisturbed_one(
    folder: Path, undisturbed: list[Record]
):
    def cancel(job: SlurmJob) -> None:
        command("scancel", job.number)

    def kill_rank(job: SlurmJob) -> None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                words = process.cmdline()
                of_run = str(job.run) in words and Path(words[0]).name.startswith("python")
                if of_run and process.environ().get("SLURM_PROCID") == "2":
                    process.kill()

    def cancel_step(job: SlurmJob) -> None:
        command("scancel", f"{job.number}.0")

    for rounds, strike, state in ((3, cancel, "CANCELLED"), (7, kill_rank, "FAILED"), (12, cancel_step, "FAILED")):
        job = train(folder, RICH, **staying(folder / "RUN", rounds))
        job.wait_for_rounds(rounds)
        strike(job)
        facts = job.wait_for_end()
        assert (facts["JobState"], facts["Restarts"]) == (state, "0"), f"{facts}\n{job.words()}"
        assert "asking for the job" not in job.words()
    assert "the job was canceled and stays so" in job.words()
    done = train(folder, RICH)
    assert done.wait_for_end()["JobState"] == "COMPLETED", done.words()
    assert_same_curve_to_rounding(curve(done.run), undisturbed)


def test_a_submitted_array_runs_each_task_in_its_folder(folder: Path):
    words = ["--set", "preset=fedavg", "--set", "rounds=3", "--set", "seed=%a", "--array", "0-1", "--time", "10"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CONFIG_HOME": str(folder / "none")}
    submitted = subprocess.run(
        [sys.executable, "-m", "fedmpi", "submit", *words, "--out", folder / "two runs"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
    )
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.split(":")[0].removeprefix("job ")
    SlurmJob(number, folder, folder / "none.log").wait_for_array()
    logs = "\n".join(path.read_text() for path in (folder / "two runs").glob("job-*.log"))
    assert (folder / "two runs" / "job.sbatch").exists()
    for task in range(2):
        run = folder / "two runs" / str(task)
        assert [record["round"] for record in records(run)] == [0, 1, 2], logs
        assert f"seed = {task}" in (run / "config.toml").read_text()


@pytest.mark.parametrize("written", [True, False], ids=["fedmpi submit --write", "job.sbatch"])
def test_a_sweep_as_an_array_prepares_its_shards_once_and_trains_each_run_on_two_ranks(written: bool, folder: Path):
    (folder / "mine.toml").write_text(
        'preset = "fedavg"\nrounds = 3\nclients.count = 5\nlogging.tensorboard = false\n'
        '[prepare]\ndataset = "digits"\npartition = "iid"\nclients = 8\n'
        "[sweep]\nseed = [0, 1]\n"
    )
    if written:
        words = ["mine.toml", "--out", "out", "--ranks-per-node", "2", "--array", "%1", "--time", "10", "--mem", "1M"]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "XDG_CONFIG_HOME": str(folder / "none")}
        run = partial(subprocess.run, check=True, capture_output=True, text=True, env=environ)
        run([sys.executable, "-m", "fedmpi", "submit", *words, "--write"], cwd=folder)
        number = run(["sbatch", "--parsable", folder / "out" / "job.sbatch"], cwd="/").stdout.strip()
        SlurmJob(number, folder, folder / "none.log").wait_for_array()
        logs = "\n".join(path.read_text() for path in (folder / "out").glob("job-*.log"))
    else:
        options = ["--array=0-1", "--ntasks=2", "--time=10"]
        job = submit(folder, ["sweep", folder / "mine.toml", "--out", folder / "out"], sbatch=options)
        job.wait_for_array()
        logs = job.words()
    for name in ("seed=0", "seed=1"):
        assert [record["round"] for record in records(folder / "out" / name)] == [0, 1, 2], logs
        summary = json.loads((folder / "out" / name / "summary.json").read_text())
        assert (summary["ranks"], summary["clients"]) == (2, 8)
    assert logs.count(": prepared in ") == 1, logs
