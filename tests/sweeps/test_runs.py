"""Outcomes of a sweep's runs: finished ones are left alone, others continue, a failed one stops no other; shards are
prepared once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tomli_w

from fedmpi import UserError, api, sweep
from fedmpi.common.errors import MissingFiles, RunFailure
from fedmpi.data.schema import PREPARING, read_manifest
from fedmpi.mpi.device import MOST_THREADS
from fedmpi.records.hold import Hold
from fedmpi.results.comparison import compare_runs
from fedmpi.results.loading import find_runs, read_runs
from fedmpi.sweeps import run as runner
from fedmpi.sweeps.plan import plan_sweep
from fedmpi.sweeps.run import Started, check_runs, command, exit_code, look, look_over, run_sweep, write_notes
from fedmpi.sweeps.shards import Preparation, Stopped, ensure_shards
from tests.end_to_end.runs import curve, records
from tests.mpi.commands import run_commands
from tests.mpi.launch import LIMIT, end_job, run_alone, start_job

COMMON = {
    "rounds": 3,
    "clients": {"count": 5},
    "logging": {"tensorboard": False},
    "cluster": {"threads": 1},
    "checkpoint": {"every": 1},
}
TWO_SEEDS = {**COMMON, "sweep": {"seed": [0, 1]}}
DIGITS = ("digits", "--partition", "iid", "--clients", "6", "--shards", "2")


def test_a_folder_shows_how_far_its_run_is(tmp_path: Path) -> None:
    run, other = plan_sweep(TWO_SEEDS, tmp_path).runs
    assert look(run).state == "new"
    api.run(run.config, {"rounds": 2}, out=run.folder)
    assert (look(run).state, look(run).rounds) == ("begun", 2), "as many rounds as the file asks for are not done"
    api.run(run.config, out=run.folder, resume=True)
    assert look(run).state == "finished"
    hold = Hold(run.folder)
    assert look(run).state == "busy"
    hold.release()
    whole = (run.folder / "summary.json").read_text()
    for damaged in ('{"final": null}', '{"final": {"round": "2"}}'):
        (run.folder / "summary.json").write_text(damaged)
        with pytest.raises(UserError, match=r"run seed=0: .*summary.json does not say how many rounds there were"):
            look(run)
    (run.folder / "summary.json").write_text(whole)
    fewer = plan_sweep({**TWO_SEEDS, "rounds": 2}, tmp_path).runs[0]
    with pytest.raises(UserError, match=r"run seed=0: .* has done 3 rounds already, more than rounds = 2"):
        look(fewer)
    another = plan_sweep({**TWO_SEEDS, "local": {"lr": 0.5}}, tmp_path)
    with pytest.raises(UserError, match=r"run seed=0: .*config.toml differs .*local.lr: 0.\d+ there, 0.5 here"):
        run_sweep(another, another.runs)
    assert not other.folder.exists(), "rejected before anything was started"


def test_a_sweep_of_finished_runs_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path)
    for run in planned.runs:
        api.run(run.config, out=run.folder)
    monkeypatch.setattr("subprocess.Popen", None)
    outcomes = run_sweep(planned, planned.runs)
    assert [one.ending for one in outcomes] == ["finished"] * 2 and exit_code(outcomes) == 0
    assert [run.config.seed for run in sweep(TWO_SEEDS, tmp_path)] == [0, 1]


def test_what_finished_runs_were_trained_on_is_not_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": {"dataset": "digits", "partition": "iid", "clients": 6}}, tmp_path)
    for run in planned.runs:
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text('{"final": {"round": 2}}')
    monkeypatch.setattr("subprocess.Popen", None)
    assert [one.ending for one in run_sweep(planned, planned.runs)] == ["finished"] * 2


def test_a_sweep_asked_to_stop_starts_nothing_and_says_so(tmp_path: Path) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": {"dataset": "digits", "partition": "iid", "clients": 6}}, tmp_path)
    outcomes = run_sweep(planned, planned.runs, stop=lambda: True)
    assert [one.ending for one in outcomes] == ["stopped"] * 2 and exit_code(outcomes) == 75
    assert not (tmp_path / "shards" / "digits").exists()
    with pytest.raises(Stopped):
        ensure_shards(Preparation("digits", tmp_path / "elsewhere", DIGITS), print, lambda: True)


def test_shards_are_found_from_any_folder_however_the_way_to_them_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {**COMMON, "prepare": {"dataset": "digits", "partition": "iid", "clients": 6}, "sweep": {"seed": [0]}}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    [run] = plan_sweep(tables, Path("out")).runs
    assert run.data is not None
    ensure_shards(run.data, print, lambda: False)
    api.run(run.config, {"rounds": 1}, out=run.folder)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for out in (tmp_path / "out", Path("../out")):
        [again] = plan_sweep(tables, out).runs
        assert again.data is not None and again.data.ready() and (look(again).state, look(again).rounds) == ("begun", 1)
    (tmp_path / "out/shards/digits" / PREPARING).touch()
    assert not run.data.ready(), "who prepared was killed before the end"
    (tmp_path / "out/shards/digits" / PREPARING).unlink()
    monkeypatch.chdir(tmp_path)
    within = "out/shards/digits"
    (run.folder / "config.toml").write_text(
        (run.folder / "config.toml").read_text().replace(str(run.data.folder), within)
    )
    assert api.run(run.config, out=run.folder, resume=True).ending == "finished", "two ways to write one folder"


def test_runs_are_started_as_a_user_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_sweep(TWO_SEEDS, tmp_path).runs[1]
    monkeypatch.chdir(tmp_path)
    assert command(run, 1)[1:] == [
        *("-P", "-m", "fedmpi", "train", f"{tmp_path}/seed=1/sweep.toml"),
        *("--out", f"{tmp_path}/seed=1", "--resume"),
    ]
    assert command(run, 3)[1:3] == ["-n", "3"] and command(run, 3)[0].endswith("mpiexec")


def test_another_fedmpi_in_the_current_folder_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedmpi").mkdir()
    (tmp_path / "fedmpi" / "__init__.py").write_text("raise SystemExit('another fedmpi')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(runner.__file__).parents[2]))
    done = sweep({**TWO_SEEDS, "sweep": {"seed": [0]}}, out=tmp_path / "runs")
    assert [run.finished for run in done] == [True]


def test_ranks_that_nothing_could_start_are_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for ranks in (1, 2):
        planned = plan_sweep(TWO_SEEDS, tmp_path / "out", ranks=ranks)
        with pytest.raises(UserError, match="ranks = 2, but there is no mpiexec") if ranks == 2 else nullcontext():
            check_runs(planned, planned.runs)
    assert not any(tmp_path.iterdir())


DYING = """
import os, subprocess, sys
from fedmpi.process.children import ends_with_parent

told_how = ends_with_parent(at_once=sys.argv[1] == "at once")
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=told_how)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["at once", "saved"])
def test_what_a_sweep_has_started_ends_when_it_is_killed(how: str) -> None:
    died = run_alone(["-c", DYING, how])
    assert died.returncode == -9
    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(int(died.stdout)).wait(60)


@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        ({"dataset": "digitz", "partition": "iid"}, "did you mean digits?"),
        ({"dataset": "digits", "partition": "idd"}, "did you mean 'iid'?"),
        ({"dataset": "digits", "partition": "iid", "alhpa": 3}, "did you mean --alpha?"),
        ({"dataset": "digits", "partition": "iid", "alpha": 3}, "--alpha is an option of"),
        ({"dataset": "digits", "partition": "iid", "clients": 0}, "--clients 0 is impossible"),
        ({"dataset": "digits", "partition": "iid"}, "needs the number of clients"),
        ({"dataset": "digits", "partition": "iid", "clients": 5, "shards": 0}, "--shards 0 is impossible"),
        ({"dataset": "digits", "partition": "iid", "clients": 5, "val": 7.0}, "--val 7.0 is impossible"),
        ({"dataset": "digits", "partition": "dirichlet", "clients": 5, "alpha": -1}, "--alpha = '-1'"),
        ({"dataset": "mnist", "partition": "iid", "clients": 5, "raw": "nowhere"}, "--raw nowhere does not exist"),
    ],
)
def test_shards_that_cannot_be_prepared_are_rejected_before_anything_starts(
    prepared: dict[str, object], said: str, tmp_path: Path
) -> None:
    planned = plan_sweep({**TWO_SEEDS, "prepare": prepared}, tmp_path)
    with pytest.raises(UserError) as raised:
        check_runs(planned, planned.runs)
    assert f"[prepare] for {prepared['dataset']}: " in str(raised.value) and said in str(raised.value)
    assert isinstance(raised.value, MissingFiles) == ("raw" in prepared), "all else stops --dry-run too"
    assert not any(tmp_path.iterdir())


def test_missing_data_are_named_below_the_plan_and_rejected_by_the_sweep(tmp_path: Path) -> None:
    here, there, held = tmp_path / "here", tmp_path / "there", tmp_path / "held"
    for folder in (here, held):
        folder.mkdir()
    (held / "something").touch()
    common = {"dataset": "mnist", "partition": "iid", "clients": 5, "seed": "{seed}"}
    data = {path.name: {**common, "raw": str(path)} for path in (held, here, there)}
    sweep = {**COMMON, "prepare": data, "sweep": {"seed": [0, 1], "data.source": list(data)}}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(sweep))
    words = ["sweep", tmp_path / "mine.toml", "--out", tmp_path / "out"]
    asked = {"listed": [*words, "--dry-run"], "prepared": [*words, "--prepare"], "started": words}
    (commands := tmp_path / "commands").mkdir()
    done = run_commands(asked, commands, LIMIT)
    listed = done["listed"]
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.count("to be prepared") == 6
    _, *missing = (" ".join(one.split()) for one in listed.stdout.split("missing "))
    first, other = (f"[prepare] for here: --raw {here} is empty", f"[prepare] for there: --raw {there} does not exist")
    for said, sentence in zip(missing, (first, other), strict=True):  # once, though each seed has other shards
        assert said.startswith(f"{sentence}; it must name ")
    for refused in (done["prepared"], done["started"]):
        assert refused.returncode == 2 and first in " ".join(refused.stderr.split())
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.toml", "here", "held", "out", "commands"}
    assert not list(tmp_path.glob("out/*/*.toml")), "nothing was started"
    planned = plan_sweep(tmp_path / "mine.toml", tmp_path / "out")
    for run in planned.runs:
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text('{"final": {"round": 2}}')
    assert look_over(planned, planned.runs)[1] == [], "finished runs need no data"


def test_a_file_that_occupies_a_runs_folder_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        planned = plan_sweep(TWO_SEEDS, out)
        with pytest.raises(UserError, match=rf"cannot write {out} \(.*/file is no folder\): choose another --out"):
            check_runs(planned, planned.runs)


def test_folders_of_runs_that_cannot_be_made_or_written_are_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(TWO_SEEDS))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "seed=1").touch()
    words = ["sweep", tmp_path / "mine.toml", "--out", tmp_path / "out"]
    (commands := tmp_path / "commands").mkdir()
    asked = {"listed": [*words, "--dry-run"], "prepared": [*words, "--prepare"]}
    for done in run_commands(asked, commands, LIMIT).values():
        assert done.returncode == 2 and "out/seed=1 is no folder): choose another --out" in done.stderr
        assert not (tmp_path / "out" / "seed=0").exists()
    planned = plan_sweep(TWO_SEEDS, tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=rf"cannot write .*/new/seed=0 \({tmp_path} may not be written\): choose"):
        check_runs(planned, planned.runs)
    for run in planned.runs:
        run.folder.mkdir(parents=True)
        (run.folder / "summary.json").write_text('{"final": {"round": 2}}')
    assert [one.state for one in check_runs(planned, planned.runs)] == ["finished"] * 2, "nothing has to be written"


def test_damaged_files_in_a_runs_folder_are_repaired_or_rejected(tmp_path: Path) -> None:
    planned = plan_sweep({**COMMON, "sweep": {"seed": [0]}}, tmp_path)
    [run] = planned.runs
    write_notes(planned, planned.runs)
    note = (run.folder / "sweep.json").read_bytes()
    (run.folder / "sweep.json").write_bytes(b"\xff\xfe")
    write_notes(planned, planned.runs)
    assert (run.folder / "sweep.json").read_bytes() == note
    file = (run.folder / "sweep.json").stat().st_ino
    write_notes(planned, planned.runs)
    assert (run.folder / "sweep.json").stat().st_ino == file, "what is right is not written again"
    os.mkfifo(run.folder / "metrics.jsonl")
    assert look(run).rounds == 0, "no process waits for a fifo"
    (run.folder / "config.toml").mkdir()
    with pytest.raises(UserError, match=r"^run seed=0: .*config.toml is damaged \(.*no plain file.*: choose another"):
        look(run)


def test_what_another_sweep_puts_there_at_the_same_moment_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, replace = plan_sweep({**COMMON, "sweep": {"seed": [0]}}, tmp_path), os.replace

    def by_another(source: Path, target: Path) -> None:
        replace(source, target)
        raise FileNotFoundError(2, "the file is no longer there")

    def by_nobody(source: Path, target: Path) -> None:
        raise FileNotFoundError(2, "the folder is no longer there")

    monkeypatch.setattr(os, "replace", by_nobody)
    with pytest.raises(UserError, match=r"cannot write .*seed=0 \(the folder is no longer there\)"):
        write_notes(planned, planned.runs)
    monkeypatch.setattr(os, "replace", by_another)
    write_notes(planned, planned.runs)
    assert (planned.runs[0].folder / "sweep.toml").exists() and (planned.runs[0].folder / "sweep.json").exists()


def test_shards_that_cannot_be_prepared_keep_no_others_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    failing: list[str] = []

    def fails(wanted: Preparation, *others: object) -> None:
        asked.append(wanted.title)
        if wanted.title in failing:
            raise (UserError if wanted.title == "b" else RunFailure)(f"{wanted.title} failed")

    monkeypatch.setattr(runner, "ensure_shards", fails)
    part = {"dataset": "digits", "partition": "iid", "clients": 6}
    tables = {
        **COMMON,
        "prepare": dict.fromkeys("abc", part),
        "sweep": {"data.source": ["a", "b", "c"], "seed": [0, 1]},
    }
    planned = plan_sweep(tables, tmp_path)
    for name, said in (("a", "^a failed$"), ("b", "^2 of 3 cannot be prepared: a failed; b failed$")):
        failing.append(name)
        asked.clear()
        with pytest.raises(RunFailure, match=said):
            runner.prepare_shards(planned.runs, print, lambda: False)
        assert asked == ["a", "b", "c"]


@pytest.mark.parametrize(("kind", "ending"), [(UserError, "wrong input"), (RunFailure, "a failure")])
def test_what_failed_to_be_prepared_before_a_stop_is_said(
    kind: type[Exception], ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(wanted: Preparation, *others: object) -> None:
        raise Stopped if wanted.title == "c" else kind(f"{wanted.title}: {ending}")

    monkeypatch.setattr(runner, "ensure_shards", fails)
    part = {"dataset": "digits", "partition": "iid", "clients": 6}
    tables = {**COMMON, "prepare": dict.fromkeys("abc", part), "sweep": {"data.source": ["a", "b", "c"]}}
    planned = plan_sweep(tables, tmp_path)
    with pytest.raises(kind, match=f"^2 of 3 cannot be prepared: a: {ending}; b: {ending}$") as raised:
        runner.prepare_shards(planned.runs, print, lambda: False)
    assert raised.type is kind, "a failure has another exit code than wrong input"
    outcomes = run_sweep(planned, planned.runs, stop=lambda: True)
    assert [(one.ending, one.why) for one in outcomes] == [
        ("failed", f"a: {ending}"),
        ("failed", f"b: {ending}"),
        ("stopped", ""),
    ]
    assert exit_code(outcomes) == 1
    assert runner.prepare_shards(planned.runs[2:], print, lambda: False) == 75


def test_runs_follow_one_another_without_a_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, popen = plan_sweep(TWO_SEEDS, tmp_path), subprocess.Popen
    lines: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr("subprocess.Popen", lambda words, stdout, **further: popen(["true"], stdout=stdout))
    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    outcomes = run_sweep(
        planned, planned.runs, show_line=lines.append, working=lambda all: [one.process.wait() for one in all]
    )
    assert [one.ending for one in outcomes] == ["failed"] * 2 and lines == []
    assert set(slept) == {runner.POLLED}


def test_a_failure_is_not_reported_in_the_words_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, popen = plan_sweep({**COMMON, "sweep": {"seed": [0]}}, tmp_path), subprocess.Popen
    said = iter(("echo 'error: the disk is full'; exit 1", "echo killed; exit 137"))
    monkeypatch.setattr(
        "subprocess.Popen", lambda words, stdout, **further: popen(["sh", "-c", next(said)], stdout=stdout)
    )
    assert [run_sweep(planned, planned.runs)[0].why for _ in range(2)] == ["the disk is full", "killed"]


def test_a_run_whose_process_ended_well_without_all_rounds_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, popen = plan_sweep({**COMMON, "sweep": {"seed": [0]}}, tmp_path), subprocess.Popen
    [run] = planned.runs
    said = iter(
        ("echo all is well", f"echo '{{}}' >> '{run.folder}/metrics.jsonl'; echo no > '{run.folder}/summary.json'")
    )
    monkeypatch.setattr(
        "subprocess.Popen", lambda words, stdout, **further: popen(["sh", "-c", next(said)], stdout=stdout)
    )
    [outcome] = run_sweep(planned, planned.runs)
    assert (outcome.ending, outcome.why) == ("failed", f"its process ended well, but {run.folder} has 0 of 3 rounds")
    [outcome] = run_sweep(planned, planned.runs)
    assert outcome.ending == "failed" and "summary.json cannot be read" in outcome.why


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_cannot_be_started_stops_no_other_and_a_removed_folder_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_sweep({**COMMON, "sweep": {"seed": [0, 1, 2]}}, tmp_path)
    started = []

    def taken(waiting: Any, settle: Any, first: Any = runner._next) -> Any:
        run = first(waiting, settle)
        if run is not None and run.config.seed < 2:
            shutil.rmtree(run.folder)
        if run is not None and run.config.seed == 1:
            run.folder.write_text("something else is here now")
        return run

    def start(words: list[str], **further: Any) -> Any:
        started.append(words)
        assert (planned.runs[2 * (len(started) - 1)].folder / "sweep.toml").exists()
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(runner, "_next", taken)
    monkeypatch.setattr("subprocess.Popen", start)
    outcomes = run_sweep(planned, planned.runs)
    assert [one.ending for one in outcomes] == ["failed"] * 3 and len(started) == 2
    assert "cannot be started" in outcomes[0].why and "no more processes" in outcomes[0].why
    assert "choose another --out" in outcomes[1].why


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
    assert f"b: the shard folder {tmp_path}/no does not exist" in done.stdout
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_killed_at_any_moment_and_started_again_ends_with_the_same_records(tmp_path: Path) -> None:
    """Once by signal 9, once by SIGTERM, at random moments; several runs at once, one of three on two ranks."""
    file = Path(__file__).parent / "killed.toml"
    words = ["fedmpi", "sweep", str(file), "--out", str(tmp_path / "out"), "--jobs", "2"]
    moments = random.Random()
    for number in (signal.SIGKILL, signal.SIGTERM):
        job = start_job([sys.executable, "-m", *words])
        first = moments.uniform(0, 12)
        time.sleep(first)
        job.send_signal(number)
        job.communicate()
        assert job.returncode in ({-9, 0} if number == signal.SIGKILL else {75, 0, -15}), (first, job.returncode)
    done = run_alone(["-m", *words], timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = plan_sweep(file, tmp_path / "out")
    for run in planned.runs:
        undisturbed = api.run(run.config, out=tmp_path / "whole" / run.name)
        assert undisturbed.folder is not None
        assert curve(run.folder) == curve(undisturbed.folder), run.name


def test_a_finished_run_that_another_process_takes_at_once_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start the child of a second sweep that was started before the run was finished, and arrives afterwards."""
    planned = plan_sweep({**TWO_SEEDS, "sweep": {"seed": [0]}}, tmp_path)
    folder, holds = planned.runs[0].folder, []
    lines: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr(runner, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))

    def take_it_when_it_ends(started: Sequence[Started]) -> None:
        for one in started:
            one.process.wait()
            holds.append(Hold(folder))
        if len(slept) == 2:  # it has been waited for once
            holds[0].release()

    [outcome] = run_sweep(planned, planned.runs, show_line=lines.append, working=take_it_when_it_ends)
    assert (outcome.ending, len(holds), len(records(folder))) == ("finished", 1, 3), outcome.why
    assert slept == [runner.POLLED, runner.POLLED_OTHERS, runner.POLLED_OTHERS]
    [line] = lines
    assert line.startswith(f"seed=0: waiting for process {os.getpid()} on ") and line.endswith(", which works on it")


@pytest.mark.parametrize(
    ("ended", "ending", "why"),
    [
        ("echo error: out is in use by process 7 on a; exit 2", "finished", ""),
        ("echo error: the port is in use by another; exit 1", "failed", "the port is in use by another"),
        ("echo error: no such key; exit 2", "failed", "no such key"),
        ("exit 75", "stopped", ""),
        ("kill -35 $$", "failed", "ended by signal 35"),
        ("kill -KILL $$", "failed", "ended by SIGKILL"),
    ],
)
def test_how_the_process_of_a_run_ends_says_what_became_of_it(
    ended: str, ending: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another run has its folder it is tried again, and succeeds here."""
    planned, popen = plan_sweep({**COMMON, "sweep": {"seed": [0]}}, tmp_path), subprocess.Popen
    done = f"echo '{{\"final\": {{\"round\": 2}}}}' > '{planned.runs[0].folder}/summary.json'"
    commands = iter((ended, done))
    monkeypatch.setattr(
        "subprocess.Popen", lambda words, stdout, **further: popen(["sh", "-c", next(commands)], stdout=stdout)
    )
    begun = time.monotonic()
    [outcome] = run_sweep(planned, planned.runs)
    assert (outcome.ending, outcome.why) == (ending, why) and 0 < outcome.seconds < time.monotonic() - begun


def test_a_stopped_sweep_says_of_each_run_that_others_hold_or_have_finished_how_far_it_is(tmp_path: Path) -> None:
    planned = plan_sweep(TWO_SEEDS, tmp_path)
    one, other = planned.runs
    for run in planned.runs:
        api.run(run.config, {"rounds": 2}, out=run.folder)
    holds, asked = [Hold(one.folder), Hold(other.folder)], []

    def stop() -> bool:
        asked.append(1)
        if len(asked) == 2:  # when both have been waited for
            holds.pop(0).release()
            api.run(one.config, out=one.folder, resume=True)
        return len(asked) > 1

    outcomes = run_sweep(planned, planned.runs, stop=stop)
    holds[0].release()
    assert [(run.ending, run.standing.rounds) for run in outcomes] == [("finished", 3), ("stopped", 2)]
    assert exit_code(outcomes) == 75


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_sweeps_of_one_file_share_its_runs(tmp_path: Path) -> None:
    file = str(Path(__file__).parent / "killed.toml")
    words = [sys.executable, "-m", "fedmpi", "sweep", file, "--set", "rounds=3", "--out", str(tmp_path)]
    jobs = [start_job(words), start_job(words)]
    try:
        ends = [job.communicate(timeout=400) for job in jobs]
    finally:
        for job in jobs:
            end_job(job)
    assert [job.returncode for job in jobs] == [0, 0], ends
    for out, _ in ends:
        assert "3 finished" in out and "failed" not in out
    for run in plan_sweep(file, tmp_path, ["rounds=3"]).runs:
        assert [record["round"] for record in records(run.folder)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_are_prepared_once_by_several_that_need_them_and_again_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        "rounds = 1\nclients.count = 5\n[prepare]\ndataset = 'digits'\npartition = 'iid'\nclients = 8\n"
        "[sweep]\nseed = [0, 1, 2]\n"
    )
    words = [
        sys.executable,
        "-m",
        "fedmpi",
        "sweep",
        str(tmp_path / "mine.toml"),
        "--out",
        str(tmp_path / "out"),
        "--prepare",
    ]
    shards = tmp_path / "out" / "shards" / "digits"
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
    assert read_manifest(shards).clients == 8 and not (shards / PREPARING).exists()
    other = plan_sweep(
        {**TWO_SEEDS, "prepare": {"dataset": "digits", "partition": "iid", "clients": 9}}, tmp_path / "out"
    )
    with pytest.raises(UserError, match=r"prepared otherwise \(--clients: 8 there, 9 here\)"):
        check_runs(other, other.runs)


def test_shards_are_prepared_for_no_run_whose_folder_contains_another(tmp_path: Path) -> None:
    """`--prepare` leaves what a sweep notes in a run's folder, which must not be that of another configuration."""
    api.run({**COMMON, "rounds": 1, "seed": 0}, out=tmp_path / "out" / "seed=0")
    other = {**COMMON, "local": {"lr": 0.5}, "sweep": {"seed": [0]}}
    (tmp_path / "other.toml").write_text(tomli_w.dumps(other))
    words = ["-m", "fedmpi", "sweep", str(tmp_path / "other.toml"), "--out", str(tmp_path / "out"), "--prepare"]
    done = run_alone(words, timeout=60)
    assert done.returncode == 2 and "run seed=0" in done.stderr and "local.lr" in done.stderr
    assert not (tmp_path / "out" / "seed=0" / "sweep.json").exists()


def test_runs_at_work_at_once_share_the_cores_and_one_that_a_warning_ends_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 and SIGTERM end a process that does not heed signals yet."""
    planned, seen, popen = plan_sweep(TWO_SEEDS, tmp_path), [], subprocess.Popen

    def start(words: list[str], env: dict[str, str], **further: Any) -> Any:
        seen.append(env.get(MOST_THREADS))
        return popen(["sh", "-c", f"kill -{'TERM' if len(seen) == 1 else 'USR1'} $$"])

    monkeypatch.delenv(MOST_THREADS, raising=False)
    monkeypatch.setattr(runner, "cores_allowed", lambda: 7)
    monkeypatch.setattr("subprocess.Popen", start)
    assert [one.ending for one in run_sweep(planned, planned.runs, jobs=2)] == ["stopped"] * 2
    assert [one.ending for one in run_sweep(planned, planned.runs)] == ["stopped"] * 2
    assert seen == ["3", "3", None, None]
