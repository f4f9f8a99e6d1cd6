"""Two runs never write to one folder; who holds it is named, and a dead holder is recognised."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.common.errors import RunFailure
from fedmpi.common.processes import start_time
from fedmpi.records import hold
from fedmpi.records.hold import FOLDER, LAPSES, Hold, Holder, refuse_held


def in_child(work: Callable[[], int]) -> int:
    """The id of a forked process that does the work and ends with its result, without any cleaning up."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def altered(run: Path, age: float = 0.0, **facts: Any) -> Path:
    """Let the holder's file say something else, last renewed so many seconds ago."""
    (path,) = (run / FOLDER).glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_folder_in_use_is_refused_with_the_name_of_its_holder_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    refuse_held(tmp_path / "nowhere")
    first = Hold(tmp_path)
    said = (
        rf"{tmp_path} is in use by process {os.getpid()} on \S+, SLURM job 4711, there since 20\d\d-.* UTC, last heard"
    )
    for attempt in (refuse_held, Hold):
        with pytest.raises(UserError, match=said):
            attempt(tmp_path)
    first.check()
    first.release()
    second = Hold(tmp_path)
    assert (second.before, second.path.name) == (None, "000002.json")
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["000002.json"]
    second.release()


def test_the_folder_of_a_killed_process_of_this_machine_is_free_at_once(tmp_path: Path):
    def hold_and_die() -> int:
        Hold(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    child = in_child(hold_and_die)
    assert ended(child) == -signal.SIGKILL
    second = Hold(tmp_path)
    assert second.before is not None and f"process {child} on " in str(second.before)
    second.release()


def test_a_process_that_got_the_id_of_a_dead_one_is_not_taken_for_it(tmp_path: Path):
    Hold(tmp_path)
    altered(tmp_path, pid=os.getppid())
    with pytest.raises(UserError, match=f"process {os.getppid()} on"):
        altered(tmp_path, began=start_time(os.getppid())[0])
        Hold(tmp_path)
    altered(tmp_path, began=1)  # that process began at another time
    Hold(tmp_path).release()


def test_a_folder_that_could_not_be_released_is_free_for_the_process_that_held_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = Hold(tmp_path)
    monkeypatch.setattr("os.utime", lambda *where: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    first.release()
    assert first.path.stat().st_mtime > 0
    Hold(tmp_path).release()


@pytest.mark.parametrize(
    "facts", [{"machine": "another boot"}, {"machine": None}, None], ids=["elsewhere", "unknown", "empty"]
)
def test_a_holder_that_cannot_be_looked_at_is_believed_until_it_gives_no_sign_for_a_minute(tmp_path: Path, facts: Any):
    first = Hold(tmp_path)
    first._released.set()  # no further signs
    path = altered(tmp_path, **(facts or {}))
    if facts is None:
        path.write_bytes(b"")  # killed between making the file and writing it
    with pytest.raises(UserError, match=r"is in use by .*given up 60 s after its last sign of life\): choose another"):
        Hold(tmp_path)
    os.utime(path, (time.time() - LAPSES / 2, time.time() - LAPSES / 2))
    with pytest.raises(UserError, match="is in use by .*last heard of [345][0-9] s ago"):
        refuse_held(tmp_path)
    os.utime(path, (time.time() - LAPSES - 1, time.time() - LAPSES - 1))
    second = Hold(tmp_path)
    assert second.before is not None
    with pytest.raises(RunFailure, match=rf"was taken over by process {os.getpid()} on .*this one ends"):
        first.check()
    second.check()
    second.release()


@pytest.mark.parametrize("content", [None, b"[1]", b"[" * 100_000], ids=["fifo", "list", "brackets"])
def test_a_holders_file_that_names_nobody_is_read_without_waiting_and_believed(tmp_path: Path, content: bytes | None):
    path = tmp_path / FOLDER / "000001.json"
    path.parent.mkdir()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    holder = Holder.of(tmp_path)
    assert holder is not None and holder.facts == {} and holder.alive()


def test_where_no_file_can_be_made_time_is_that_of_the_clock_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    Hold(tmp_path)._released.set()
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    for age, held in ((0.0, True), (LAPSES + 5, False)):
        altered(tmp_path, age, machine="another boot")
        holder = Holder.of(tmp_path)
        assert holder is not None and holder.alive() == held


def test_a_holder_that_lives_gives_signs_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hold, "RENEWED", 0.01)
    first = Hold(tmp_path)
    os.utime(first.path, (1, 1))
    while first.path.stat().st_mtime < time.time() - LAPSES / 2:
        time.sleep(0.01)
    first.release()
    time.sleep(0.05)
    assert first.path.stat().st_mtime == 0


def test_a_job_that_slurm_queued_again_takes_its_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "big")
    Hold(tmp_path)._released.set()
    altered(tmp_path, machine="the lost node")
    with pytest.raises(UserError, match="in use"):  # a second step of the same turn
        refuse_held(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for other in ({"SLURM_JOB_ID": "8"}, {"SLURM_CLUSTER_NAME": "small"}):
        with monkeypatch.context() as elsewhere, pytest.raises(UserError, match="SLURM job 7"):
            for name, value in other.items():
                elsewhere.setenv(name, value)
            refuse_held(tmp_path)
    again = Hold(tmp_path)
    assert again.before is not None
    again.release()


def test_a_copy_of_a_folder_in_use_is_free(tmp_path: Path):
    (tmp_path / "RUN").mkdir()
    first = Hold(tmp_path / "RUN")
    shutil.copytree(tmp_path / "RUN", tmp_path / "COPY")
    Hold(tmp_path / "COPY").release()
    first.check()
    first.release()


def test_of_many_that_start_together_one_wins(tmp_path: Path):
    """Six processes, 8 times on a folder, half the times one that a dead process holds."""
    for turn in range(8):
        run = tmp_path / str(turn)
        run.mkdir()
        if turn % 2:
            ended(in_child(lambda run=run: Hold(run).path.exists()))
        started, start = os.pipe()  # read by all children, closed by the parent once all are there
        over, end = os.pipe()
        lost_reader, lost_writer = os.pipe()

        def compete(run: Path = run, pipes: tuple[int, ...] = (started, start, over, end, lost_writer)) -> int:
            started, start, over, end, lost_writer = pipes
            os.close(start)
            os.close(end)
            os.read(started, 1)
            try:
                won = Hold(run)
            except UserError as error:
                won = None
                assert re.search("is in use by|is being taken by", str(error))
            os.write(lost_writer, b".")
            os.read(over, 1)
            if won is not None:
                won.check()
            return int(won is not None)

        children = [in_child(compete) for _ in range(6)]
        os.close(start)
        for _ in children:
            os.read(lost_reader, 1)
        os.close(end)
        codes = [ended(child) for child in children]
        assert sorted(codes) == [0, 0, 0, 0, 0, 1], codes
        for descriptor in (started, over, lost_reader, lost_writer):
            os.close(descriptor)


def test_a_number_that_was_outdated_when_it_was_made_wins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another run took a higher number between the look at the folder and the making of ours."""
    made = hold._made

    def slow(path: Path) -> bool:
        monkeypatch.setattr(hold, "_made", made)
        path.with_name("000009.json").touch()
        return made(path)

    monkeypatch.setattr(hold, "_made", slow)
    with pytest.raises(UserError, match="in use"):
        Hold(tmp_path)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["000009.json"]


@pytest.mark.parametrize(("gone", "words"), [(".", "has vanished"), (FOLDER, "was removed while the run went on")])
def test_a_folder_or_sign_that_is_gone_is_said_in_a_sentence(tmp_path: Path, gone: str, words: str):
    run = tmp_path / "RUN"
    run.mkdir()
    first = Hold(run)
    shutil.rmtree(run / gone)
    with pytest.raises(RunFailure, match=words):
        first.check()
    first.release()
    assert Holder.of(run) is None


def test_a_run_from_python_holds_its_folder_while_it_lasts_and_no_longer(tmp_path: Path):
    run, quick = tmp_path / "RUN", {"rounds": 2, "logging.tensorboard": False, "local.engine": "sequential"}
    refused = []

    def second(record: dict[str, Any]) -> bool:
        for resume in (False, True):
            with pytest.raises(UserError, match=f"is in use by process {os.getpid()}") as info:
                fedmpi.run("fedavg", quick, out=run, resume=resume)
            refused.append(info)
        return False

    fedmpi.run("fedavg", quick, out=run, on_round=second)
    assert len(refused) == 4
    with pytest.raises(UserError, match="holds a run already"):
        fedmpi.run("fedavg", quick, out=run)
    assert fedmpi.run("fedavg", quick, out=run, resume=True).ending == "finished"
