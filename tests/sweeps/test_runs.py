"""Runs of a sweep: finished ones are left alone, others continue, a failed one stops no other; shards are prepared
once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from fedmpi import UserError, api, sweep
from fedmpi.common.errors import RunFailure
from fedmpi.common.files import lock_folder
from fedmpi.config.loading import given_config
from fedmpi.data.schema import PREPARING, read_manifest
from fedmpi.mpi.device import MOST_THREADS
from fedmpi.process.children import TAIL, last_words
from fedmpi.sweeps import run as runner
from fedmpi.sweeps.plan import PlannedRun, plan_sweep
from fedmpi.sweeps.run import command, exit_code, is_finished, run_sweep, unfinished
from fedmpi.sweeps.shards import Preparation
from tests.end_to_end.runs import curve
from tests.mpi.launch import run_alone, start_job

COMMON = {
    "rounds": 3,
    "clients": {"count": 5},
    "logging": {"tensorboard": False},
    "cluster": {"threads": 1},
    "checkpoint": {"every": 1},
}
ONE_SEED, TWO_SEEDS = ({**COMMON, "sweep": {"seed": seeds}} for seeds in ([0], [0, 1]))
DIGITS = ("digits", "--partition", "iid", "--clients", "6", "--shards", "2")
PREPARED = {"dataset": "digits", "partition": "iid", "clients": 6}


def finished(*runs: PlannedRun) -> None:
    """Make the runs look finished."""
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text('{"final": {"round": 2}}')


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Start these shell commands instead of runs; return the environments of the starts, and how many were running."""
    popen, seen, processes = subprocess.Popen, [], []

    def replace(*commands: str) -> list[Any]:
        waiting = iter(commands)

        def start(words: list[str], stdout: Any, env: dict[str, str], **further: Any) -> Any:
            seen.append(env | {"running": sum(one.poll() is None for one in processes)})
            processes.append(popen(["sh", "-c", next(waiting)], stdout=stdout))
            return processes[-1]

        monkeypatch.setattr("subprocess.Popen", start)
        return seen

    return replace


def test_a_folder_shows_whether_its_run_is_finished_and_finished_runs_are_only_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path)
    run, other = planned.runs
    assert not is_finished(run)
    api.run(run.config, {"rounds": 2}, out=run.folder)
    assert not is_finished(run), "there are fewer rounds than the file asks for"
    api.run(run.config, out=run.folder, resume=True)
    assert is_finished(run)
    another = plan_sweep({**TWO_SEEDS, "local": {"lr": 0.5}}, tmp_path)
    with pytest.raises(UserError, match=r"run seed=0: .*config.toml differs .*local.lr: 0.\d+ there, 0.5 here"):
        run_sweep(another, another.runs)
    assert not other.folder.exists() and not (run.folder / "sweep.json").exists(), "rejected before anything starts"
    api.run(other.config, out=other.folder)
    prepared = plan_sweep({**TWO_SEEDS, "prepare": PREPARED}, tmp_path / "prepared")
    finished(*prepared.runs)
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr(Preparation, "ensure", None)
    outcomes = run_sweep(planned, planned.runs)
    assert [outcome.ending for outcome in outcomes] == ["finished"] * 2 and exit_code(outcomes) == 0
    assert [run.config.seed for run in sweep(TWO_SEEDS, tmp_path)] == [0, 1]


def test_a_run_that_its_patience_ended_is_finished_until_the_patience_grows(tmp_path: Path) -> None:
    common = {**COMMON, "rounds": 20, "local": {"lr": 0.5}}
    [run] = plan_sweep({**common, "sweep": {"evaluation.patience": [2]}}, tmp_path).runs
    assert api.run(run.config, out=run.folder).ending == "ended" and is_finished(run)
    assert not is_finished(replace(run, config=given_config(run.config, {"evaluation.patience": 9})))


def test_a_stopped_sweep_starts_nothing(tmp_path: Path) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": PREPARED}, tmp_path)
    outcomes = run_sweep(planned, planned.runs, stop=lambda: True)
    assert [one.ending for one in outcomes] == ["stopped"] * 2 and exit_code(outcomes) == 75
    assert not (tmp_path / "shards" / "digits").exists()


def test_shards_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {**ONE_SEED, "prepare": PREPARED}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    [run] = plan_sweep(tables, Path("out")).runs
    assert run.data is not None and run.data.ensure(print, lambda: False)
    api.run(run.config, {"rounds": 1}, out=run.folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for out in (tmp_path / "out", Path("../out")):
        [again] = plan_sweep(tables, out).runs
        assert again.data is not None and again.data.ready() and not is_finished(again)
    (tmp_path / "out/shards/digits" / PREPARING).touch()
    assert not run.data.ready(), "a preparation was killed before its end"
    other = plan_sweep({**tables, "prepare": PREPARED | {"clients": 9}}, tmp_path / "out")
    assert run.data.ensure(print, lambda: False) and run.data.ready()
    with pytest.raises(UserError, match=r"shards with other options \(digits --partition iid --clients 6"):
        unfinished(other.runs)


def test_runs_are_started_as_a_user_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_sweep(TWO_SEEDS, tmp_path).runs[1]
    monkeypatch.chdir(tmp_path)
    train = ["-P", "-m", "fedmpi", "train", f"{tmp_path}/seed=1/sweep.toml", "--out", f"{tmp_path}/seed=1", "--resume"]
    assert command(run, 1)[1:] == train
    assert command(run, 3)[1:3] == ["-n", "3"] and command(run, 3)[0].endswith("mpiexec")
    (tmp_path / "fedmpi").mkdir()
    (tmp_path / "fedmpi" / "__init__.py").write_text("raise SystemExit('another fedmpi')")
    monkeypatch.setenv("PYTHONPATH", str(Path(runner.__file__).parents[2]))
    assert [run.finished for run in sweep(ONE_SEED, out=tmp_path / "runs")] == [True]


DYING = """
import os, subprocess
from fedmpi.process.children import ends_with_parent

nowhere = subprocess.DEVNULL
child = subprocess.Popen(["sleep", "600"], stdout=nowhere, stderr=nowhere, preexec_fn=ends_with_parent())
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_children_of_a_killed_sweep_end() -> None:
    died = run_alone(["-c", DYING])
    assert died.returncode == -9
    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(int(died.stdout)).wait(60)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": "digitz"}, "did you mean digits?"),
        ({"partition": "idd"}, "did you mean iid?"),
        ({"partition": "dirichlet", "alhpa": 3}, "did you mean --alpha?"),
        ({"clients": 0}, "--clients 0 is impossible"),
        ({"dataset": "mnist", "raw": "nowhere"}, "--raw nowhere does not exist"),
    ],
)
def test_shards_that_cannot_be_prepared_are_rejected_before_anything_starts(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": PREPARED | changed}, tmp_path)
    with pytest.raises(UserError) as raised:
        unfinished(planned.runs)
    assert f"[prepare] for {(PREPARED | changed)['dataset']}: " in str(raised.value) and said in str(raised.value)
    assert not any(tmp_path.iterdir())
    finished(*planned.runs)
    assert unfinished(planned.runs) == [], "finished runs need no data"


def test_a_folder_that_cannot_be_written_is_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    planned = plan_sweep(TWO_SEEDS, tmp_path / "file")
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(UserError, match=r"cannot write .*/file/seed=0 \(Not a directory\). Choose another --out"):
        run_sweep(planned, planned.runs)


def test_a_preparation_fails_in_its_own_words_and_one_that_another_process_makes_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, said = Preparation(tmp_path / "even", DIGITS), []
    for kind in (UserError, RunFailure):
        monkeypatch.setattr("data_prep.__main__.run", lambda words, kind=kind: (_ for _ in ()).throw(kind("no room")))
        with pytest.raises(UserError, match=r"^\[prepare\] for even: no room") as failure:
            wanted.ensure(said.append, lambda: False)
        assert failure.type is kind, "a failure has another exit code than wrong input"
    monkeypatch.undo()
    said.clear()
    wanted.folder.mkdir()
    other = lock_folder(wanted.folder)

    def stop() -> bool:
        if len(said) == 2:
            other.release()
        return False

    assert wanted.ensure(said.append, stop) and read_manifest(wanted.folder).clients == 6
    assert [line.split()[1] for line in said] == ["preparing", "waiting", "prepared"]


@pytest.mark.parametrize(
    ("ended", "ending", "why"),
    [
        ("echo error: the port is in use by another; exit 1", "failed", "the port is in use by another"),
        ("echo error: no such key; exit 2", "failed", "no such key"),
        ("exit 0", "finished", ""),
        ("exit 75", "stopped", ""),
        ("kill -TERM $$", "stopped", ""),
        ("kill -USR1 $$", "stopped", ""),
        ("kill -35 $$", "failed", "ended by signal 35"),
        ("kill -KILL $$", "failed", "ended by SIGKILL"),
    ],
)
def test_how_the_process_of_a_run_ends_decides_its_outcome(
    ended: str, ending: str, why: str, tmp_path: Path, replaced: Callable[..., list[Any]]
) -> None:
    planned = plan_sweep(ONE_SEED, tmp_path)
    (tmp_path / "seed=0").mkdir()
    (tmp_path / "seed=0" / "output.log").write_text("error: of an earlier start, longer than the next ones\n")
    replaced(ended)
    lines: list[str] = []
    [outcome] = run_sweep(planned, planned.runs, say=lines.append)
    assert (outcome.ending, outcome.why) == (ending, why)
    assert lines == [f"1/1 seed=0: {ending}{': ' if why else ''}{why}"]


def test_runs_at_the_same_time_share_the_cores(
    tmp_path: Path, replaced: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path, ranks=3)
    monkeypatch.delenv(MOST_THREADS, raising=False)
    monkeypatch.setattr(runner, "cores_allowed", lambda: 9)
    seen = replaced("sleep 0.5", "sleep 0.5", "sleep 0.1", "exit 0")
    run_sweep(planned, planned.runs, jobs=2)
    run_sweep(planned, planned.runs)
    assert [env.get(MOST_THREADS) for env in seen] == ["1", "1", None, None]
    assert [env["running"] for env in seen] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("error: first\n" + "x" * TAIL + "\nlast\n", "last"),
        ("error: first\nerror: second (error: 5)\nlast\n", "second (error: 5)"),
        ("\udcff\nlast\n\n \n", "last"),
        (None, "it said nothing"),
    ],
)
def test_the_last_error_in_the_end_of_a_log_is_reported(tmp_path: Path, text: str | None, last: str) -> None:
    if text is not None:
        (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape"))
    assert last_words(tmp_path / "log") == last


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    """The shards of the second of three are not there at first."""
    shards = {"a": "digits", "b": f"{tmp_path}/no", "c": "digits:clients=6"}
    variants = [{"name": name, "data.source": where} for name, where in shards.items()]
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({**COMMON, "rounds": 2, "sweep": {"run": variants}}))
    words = ["-m", "fedmpi", "sweep", tmp_path / "mine.toml", "--out", tmp_path / "out", "--jobs", "2"]
    done = run_alone(words, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "2 finished, 1 failed" in done.stdout and "a: finished" in done.stdout and "compare" in done.stdout
    assert f"b: failed: the shard folder {tmp_path}/no does not exist" in done.stdout
    written = {name: (tmp_path / "out" / name / "summary.json").stat().st_mtime_ns for name in "ac"}
    assert Preparation(tmp_path / "no", DIGITS).ensure(print, lambda: False)
    again = sweep(tmp_path / "mine.toml", tmp_path / "out", ranks=2)
    assert [run.ending for run in again] == ["finished"] * 3 and again[1].summary["ranks"] == 2
    assert written == {name: (tmp_path / "out" / name / "summary.json").stat().st_mtime_ns for name in "ac"}
    (tmp_path / "no" / "train-00000.h5").unlink()
    with pytest.raises(RunFailure, match=r"1 of 1 runs failed: b \(.*train-00000.h5"):
        sweep({**COMMON, "sweep": {"run": variants[1:2]}}, tmp_path / "again")


KILLED = """
rounds = 24
clients.count = 5
cluster.threads = 1
local.engine = "sequential"
checkpoint.every = 3
[sweep]
preset = ["fedavg", "scaffold"]
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_killed_at_any_moment_and_started_again_ends_with_the_same_records(tmp_path: Path) -> None:
    """Once by signal 9, once by SIGTERM, at random moments; two runs at once."""
    (tmp_path / "killed.toml").write_text(KILLED)
    words = ["fedmpi", "sweep", str(tmp_path / "killed.toml"), "--out", str(tmp_path / "out"), "--jobs", "2"]
    moments = random.Random()
    for number in (signal.SIGKILL, signal.SIGTERM):
        job = start_job([sys.executable, "-m", *words])
        first = moments.uniform(0, 8)
        time.sleep(first)
        job.send_signal(number)
        job.communicate()
        assert job.returncode in ({-9, 0} if number == signal.SIGKILL else {75, 0, -15}), (first, job.returncode)
        time.sleep(2)  # the runs save and end
    done = run_alone(["-m", *words], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for run in plan_sweep(tmp_path / "killed.toml", tmp_path / "out").runs:
        undisturbed = api.run(run.config, out=tmp_path / "whole" / run.name)
        assert undisturbed.folder is not None
        assert curve(run.folder) == curve(undisturbed.folder), run.name
