"""Runs of a sweep: finished ones are left alone, others continue, a failed one stops no other; shards are prepared
once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from fedmpi import UserError, api, sweep
from fedmpi.common.errors import MissingFiles, RunFailure
from fedmpi.data.schema import PREPARING, read_manifest
from fedmpi.mpi.device import MOST_THREADS
from fedmpi.process.children import TAIL, last_words
from fedmpi.results.comparison import compare_runs
from fedmpi.results.loading import find_runs, read_runs
from fedmpi.sweeps import run as runner
from fedmpi.sweeps.plan import PlannedRun, Sweep, plan_sweep
from fedmpi.sweeps.run import check_runs, command, exit_code, look, look_over, run_sweep
from fedmpi.sweeps.shards import Preparation, Stopped, ensure_shards
from tests.end_to_end.runs import curve
from tests.mpi.commands import run_commands
from tests.mpi.launch import LIMIT, end_job, run_alone, start_job

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
    """Start these shell commands instead of runs; return the environments of the starts."""
    popen, seen = subprocess.Popen, []

    def replace(*commands: str) -> list[Any]:
        waiting = iter(commands)

        def start(words: list[str], stdout: Any, env: dict[str, str], **further: Any) -> Any:
            seen.append(env)
            return popen(["sh", "-c", next(waiting)], stdout=stdout)

        monkeypatch.setattr("subprocess.Popen", start)
        return seen

    return replace


def test_a_folder_shows_the_state_of_its_run(tmp_path: Path) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path)
    run, other = planned.runs
    assert look(run) == "new"
    api.run(run.config, {"rounds": 2}, out=run.folder)
    assert look(run) == "begun", "there are fewer rounds than the file asks for"
    api.run(run.config, out=run.folder, resume=True)
    assert look(run) == "finished"
    another = plan_sweep({**TWO_SEEDS, "local": {"lr": 0.5}}, tmp_path)
    with pytest.raises(UserError, match=r"run seed=0: .*config.toml differs .*local.lr: 0.\d+ there, 0.5 here"):
        run_sweep(another, another.runs)
    (tmp_path / "other.toml").write_text(tomli_w.dumps({**TWO_SEEDS, "local": {"lr": 0.5}}))
    words = ["-m", "fedmpi", "sweep", str(tmp_path / "other.toml"), "--out", str(tmp_path), "--prepare"]
    done = run_alone(words, timeout=60)
    assert done.returncode == 2 and "run seed=0" in done.stderr and "local.lr" in done.stderr
    assert not other.folder.exists() and not (run.folder / "sweep.json").exists(), "rejected before anything starts"


def test_finished_runs_are_only_read_and_their_shards_are_not_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path)
    for run in planned.runs:
        api.run(run.config, out=run.folder)
    prepared = plan_sweep({**TWO_SEEDS, "prepare": PREPARED}, tmp_path / "prepared")
    finished(*prepared.runs)
    monkeypatch.setattr("subprocess.Popen", None)
    for one in (planned, prepared):
        outcomes = run_sweep(one, one.runs)
        assert [outcome.ending for outcome in outcomes] == ["finished"] * 2 and exit_code(outcomes) == 0
    assert [run.config.seed for run in sweep(TWO_SEEDS, tmp_path)] == [0, 1]


def test_a_stopped_sweep_starts_nothing(tmp_path: Path) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": PREPARED}, tmp_path)
    outcomes = run_sweep(planned, planned.runs, stop=lambda: True)
    assert [one.ending for one in outcomes] == ["stopped"] * 2 and exit_code(outcomes) == 75
    assert not (tmp_path / "shards" / "digits").exists()
    with pytest.raises(Stopped):
        ensure_shards(Preparation("digits", tmp_path / "elsewhere", DIGITS), print, lambda: True)


def test_shards_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {**ONE_SEED, "prepare": PREPARED}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    [run] = plan_sweep(tables, Path("out")).runs
    assert run.data is not None
    ensure_shards(run.data, print, lambda: False)
    api.run(run.config, {"rounds": 1}, out=run.folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for out in (tmp_path / "out", Path("../out")):
        [again] = plan_sweep(tables, out).runs
        assert again.data is not None and again.data.ready() and look(again) == "begun"
    (tmp_path / "out/shards/digits" / PREPARING).touch()
    assert not run.data.ready(), "a preparation was killed before its end"


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


def test_ranks_that_nothing_could_start_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for ranks in (1, 2):
        planned = plan_sweep(TWO_SEEDS, tmp_path / "out", ranks=ranks)
        with pytest.raises(UserError, match="ranks = 2, but there is no mpiexec") if ranks == 2 else nullcontext():
            run_sweep(planned, planned.runs, stop=lambda: True)
    with pytest.raises(UserError, match="jobs = 0"):
        run_sweep(planned, planned.runs, jobs=0)


DYING = """
import os, subprocess, sys
from fedmpi.process.children import ends_with_parent

told_how = ends_with_parent(at_once=sys.argv[1] == "at once")
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=told_how)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["at once", "saved"])
def test_children_of_a_killed_sweep_end(how: str) -> None:
    died = run_alone(["-c", DYING, how])
    assert died.returncode == -9
    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(int(died.stdout)).wait(60)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset": "digitz"}, "did you mean digits?"),
        ({"partition": "idd"}, "did you mean 'iid'?"),
        ({"partition": "dirichlet", "alhpa": 3}, "did you mean --alpha?"),
        ({"clients": 0}, "--clients 0 is impossible"),
        ({"partition": "dirichlet", "alpha": -1}, "--alpha = '-1'"),
        ({"dataset": "mnist", "raw": "nowhere"}, "--raw nowhere does not exist"),
    ],
)
def test_shards_that_cannot_be_prepared_are_rejected_before_anything_starts(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": PREPARED | changed}, tmp_path)
    with pytest.raises(UserError) as raised:
        check_runs(planned, planned.runs)
    assert f"[prepare] for {(PREPARED | changed)['dataset']}: " in str(raised.value) and said in str(raised.value)
    assert isinstance(raised.value, MissingFiles) == ("raw" in changed), "all else stops --dry-run too"
    assert not any(tmp_path.iterdir())


def test_missing_data_are_named_below_the_plan_and_rejected_by_the_sweep(tmp_path: Path) -> None:
    empty, absent = tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    common = {"dataset": "mnist", "partition": "iid", "clients": 5, "seed": "{seed}"}
    data = {path.name: {**common, "raw": str(path)} for path in (empty, absent)}
    (tmp_path / "mine.toml").write_text(
        tomli_w.dumps({**COMMON, "prepare": data, "sweep": {"seed": [0, 1], "data.source": list(data)}})
    )
    words = ["sweep", tmp_path / "mine.toml", "--out", tmp_path / "out"]
    asked = {"listed": [*words, "--dry-run"], "prepared": [*words, "--prepare"], "started": words}
    (commands := tmp_path / "commands").mkdir()
    done = run_commands(asked, commands, LIMIT)
    assert (done["listed"].returncode, done["listed"].stderr) == (0, "")
    assert done["listed"].stdout.count("to be prepared") == 4
    _, *missing = (" ".join(one.split()) for one in done["listed"].stdout.split("missing "))
    first, other = (f"[prepare] for empty: --raw {empty} is empty", f"[prepare] for absent: --raw {absent} does not")
    assert len(missing) == 2 and missing[0].startswith(first) and missing[1].startswith(other), "once for both seeds"
    for refused in (done["prepared"], done["started"]):
        assert refused.returncode == 2 and first in " ".join(refused.stderr.split())
    assert not list(tmp_path.glob("out/*/*.toml")), "nothing was started"
    planned = plan_sweep(tmp_path / "mine.toml", tmp_path / "out")
    finished(*planned.runs)
    assert look_over(planned, planned.runs)[1] == [], "finished runs need no data"


def test_folders_that_cannot_be_written_are_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "seed=1").touch()
    for out, said in ((tmp_path / "file", "file is no folder"), (tmp_path / "out", "out/seed=1 is no folder")):
        planned = plan_sweep(TWO_SEEDS, out)
        with pytest.raises(UserError, match=rf"cannot write .*{said}\). Choose another --out"):
            check_runs(planned, planned.runs)
        assert not (out / "seed=0").exists()
    planned = plan_sweep(TWO_SEEDS, tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may do all
    with pytest.raises(UserError, match=rf"cannot write .*/new/seed=0 \({tmp_path} may not be written\). Choose"):
        check_runs(planned, planned.runs)
    finished(*planned.runs)
    assert check_runs(planned, planned.runs) == ["finished"] * 2, "nothing has to be written"


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sweep, dict[str, Exception]]:
    """A sweep over three sets of shards, and the errors that their preparations raise."""
    errors: dict[str, Exception] = {}

    def prepare(wanted: Preparation, *others: object) -> None:
        if wanted.title in errors:
            raise errors[wanted.title]

    monkeypatch.setattr(runner, "ensure_shards", prepare)
    tables = {**COMMON, "prepare": dict.fromkeys("abc", PREPARED), "sweep": {"data.source": ["a", "b", "c"]}}
    return plan_sweep(tables, tmp_path), errors


@pytest.mark.parametrize("kind", [UserError, RunFailure])
def test_shards_that_cannot_be_prepared_keep_no_others_back(
    kind: type[Exception], failing: tuple[Sweep, dict[str, Exception]]
) -> None:
    planned, errors = failing
    errors |= {"a": kind("a failed"), "b": UserError("b failed"), "c": Stopped()}
    with pytest.raises(UserError, match="^a failed; b failed$") as raised:
        runner.prepare_shards(planned.runs, print, lambda: False)
    assert raised.type is kind, "a failure has another exit code than wrong input"
    outcomes = run_sweep(planned, planned.runs, stop=lambda: True)
    assert [(one.ending, one.why) for one in outcomes] == [
        ("failed", "a failed"),
        ("failed", "b failed"),
        ("stopped", ""),
    ]
    assert exit_code(outcomes) == 1
    assert runner.prepare_shards(planned.runs[2:], print, lambda: False) == 75


def test_a_failure_is_not_reported_in_the_words_of_an_earlier_one(
    tmp_path: Path, replaced: Callable[..., list[Any]]
) -> None:
    planned = plan_sweep(ONE_SEED, tmp_path)
    replaced("echo 'error: the disk is full'; exit 1", "echo killed; exit 137", "exit 0")
    for why in ("the disk is full", "killed", ""):
        assert run_sweep(planned, planned.runs)[0].why == why
        assert json.loads((tmp_path / "seed=0" / "sweep.json").read_text()).get("failure", "") == why


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
    replaced(ended)
    lines: list[str] = []
    [outcome] = run_sweep(planned, planned.runs, say=lines.append)
    assert (outcome.ending, outcome.why) == (ending, why) and outcome.seconds > 0
    [line] = lines
    assert line.startswith(f"1/1 seed=0: {ending}") and why in line


def test_runs_at_the_same_time_share_the_cores(
    tmp_path: Path, replaced: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path, ranks=3)
    monkeypatch.delenv(MOST_THREADS, raising=False)
    monkeypatch.setattr(runner, "cores_allowed", lambda: 9)
    seen = replaced("exit 0", "exit 0", "exit 0", "exit 0")
    run_sweep(planned, planned.runs, jobs=2)
    run_sweep(planned, planned.runs)
    assert [env.get(MOST_THREADS) for env in seen] == ["1", "1", None, None]


def test_a_run_that_cannot_be_started_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_sweep({**COMMON, "sweep": {"seed": [0, 1, 2]}}, tmp_path)
    started = []

    def start(words: list[str], **further: Any) -> Any:
        started.append(words)
        shutil.rmtree(planned.runs[1].folder, ignore_errors=True)
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr("subprocess.Popen", start)
    outcomes = run_sweep(planned, planned.runs)
    assert [one.ending for one in outcomes] == ["failed"] * 3 and len(started) == 2
    assert all("cannot be started" in one.why for one in outcomes) and "no more processes" in outcomes[0].why


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_is_tried_again(tmp_path: Path) -> None:
    """The shards of the second of three are not there at first."""
    shards = {"a": "digits", "b": f"{tmp_path}/no", "c": "digits:clients=6"}
    variants = [{"name": name, "data.source": where} for name, where in shards.items()]
    (tmp_path / "mine.toml").write_text(tomli_w.dumps({**COMMON, "rounds": 2, "sweep": {"run": variants}}))
    words = ["-m", "fedmpi", "sweep", tmp_path / "mine.toml", "--out", tmp_path / "out", "--jobs", "2"]
    done = run_alone(words, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "2 finished, 1 failed" in done.stdout and "a: finished in" in done.stdout
    assert f"b: failed: the shard folder {tmp_path}/no does not exist" in done.stdout
    written = {name: (tmp_path / "out" / name / "summary.json").stat().st_mtime_ns for name in "ac"}
    found = compare_runs(read_runs(find_runs([tmp_path / "out"], planned=True)))
    assert [run.failure.partition(" does")[0] for run in found.left_out] == [f"the shard folder {tmp_path}/no"]
    ensure_shards(Preparation("no", tmp_path / "no", DIGITS), print, lambda: False)
    again = sweep(tmp_path / "mine.toml", tmp_path / "out", ranks=2)
    assert [run.ending for run in again] == ["finished"] * 3
    assert written == {name: (tmp_path / "out" / name / "summary.json").stat().st_mtime_ns for name in "ac"}
    assert not compare_runs(read_runs(find_runs([tmp_path / "out"], planned=True))).left_out
    assert again[1].summary["ranks"] == 2
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
preset = ["fedavg", "fedadam", "scaffold"]
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_killed_at_any_moment_and_started_again_ends_with_the_same_records(tmp_path: Path) -> None:
    """Once by signal 9, once by SIGTERM, at random moments; several runs at once."""
    (tmp_path / "killed.toml").write_text(KILLED)
    words = ["fedmpi", "sweep", str(tmp_path / "killed.toml"), "--out", str(tmp_path / "out"), "--jobs", "2"]
    moments = random.Random()
    for number in (signal.SIGKILL, signal.SIGTERM):
        job = start_job([sys.executable, "-m", *words])
        first = moments.uniform(0, 12)
        time.sleep(first)
        job.send_signal(number)
        job.communicate()
        assert job.returncode in ({-9, 0} if number == signal.SIGKILL else {75, 0, -15}), (first, job.returncode)
        time.sleep(3)  # the runs save and end
    done = run_alone(["-m", *words], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    for run in plan_sweep(tmp_path / "killed.toml", tmp_path / "out").runs:
        undisturbed = api.run(run.config, out=tmp_path / "whole" / run.name)
        assert undisturbed.folder is not None
        assert curve(run.folder) == curve(undisturbed.folder), run.name


# Shards


def test_folders_that_hold_something_else_are_not_prepared(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").touch()
    for place, said in (("file", "no folder"), ("file/below", "no folder"), ("full", "something else")):
        with pytest.raises(UserError, match=rf"^\[prepare\] for digits: .*{said}"):
            Preparation("", tmp_path / place, DIGITS).check()
    Preparation("", tmp_path / "shards", DIGITS).check()
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("kill -KILL $$", "ended by SIGKILL"),
        ("kill -35 $$", "ended by signal 35"),
        ("exit 7", "exit code 7"),
        ("echo fedmpi: error: the disk is full; echo it ends; exit 1", "the disk is full"),
        ("echo error: no such option; exit 2", "no such option"),
    ],
)
def test_a_failed_preparation_says_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho cite: not stated\n{ending}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    wanted = Preparation("even", tmp_path / "shards", ("digits", "--partition", "iid"))
    with pytest.raises(UserError) as failure:
        ensure_shards(wanted, print, lambda: False)
    assert failure.type is (UserError if ending.endswith("exit 2") else RunFailure) and said in str(failure.value)


@pytest.mark.parametrize(
    ("text", "error", "last"),
    [
        ("error: first\n" + "x" * TAIL + "\nlast\n", "", "last"),
        ("error: first\nerror: second (error: 5)\nlast\n", "second (error: 5)", "second (error: 5)"),
        ("\udcff\nlast\n\n \n", "", "last"),
        (None, "", "it said nothing"),
    ],
)
def test_the_last_error_in_the_end_of_a_log_is_reported(
    tmp_path: Path, text: str | None, error: str, last: str
) -> None:
    if text is not None:
        (tmp_path / "log").write_bytes(text.encode(errors="surrogateescape"))
    assert last_words(tmp_path / "log") == error and last_words(tmp_path / "log", any_line=True) == last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_are_prepared_once_by_several_that_need_them_and_again_after_a_kill(tmp_path: Path) -> None:
    file, shards = tmp_path / "mine.toml", tmp_path / "out" / "shards" / "digits"
    tables = {**COMMON, "rounds": 1, "prepare": PREPARED, "sweep": {"seed": [0, 1, 2]}}
    file.write_text(tomli_w.dumps(tables))
    words = [sys.executable, "-m", "fedmpi", "sweep", str(file), "--out", str(tmp_path / "out"), "--prepare"]
    killed = start_job(words)
    while not (shards / PREPARING).exists() and killed.poll() is None:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    time.sleep(0.5)  # its preparation has died with it, or was quicker than the kill: then its mark is put back
    (shards / PREPARING).touch()
    jobs = [start_job([*words, "--index", str(index)]) for index in range(3)]
    try:
        ends = [job.communicate(timeout=300) for job in jobs]
    finally:
        for job in jobs:
            end_job(job)
    assert [job.returncode for job in jobs] == [0, 0, 0], ends
    assert sum("digits: preparing" in out for out, _ in ends) == 1, ends
    assert read_manifest(shards).clients == 6 and not (shards / PREPARING).exists()
    other = plan_sweep({**tables, "prepare": PREPARED | {"clients": 9}}, tmp_path / "out")
    with pytest.raises(UserError, match=r"shards with other options \(--clients: 6, but the sweep sets 9\)"):
        check_runs(other, other.runs)
