"""Two runs never write to one folder; the owner is named, and one that is dead on this host gives way."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.common.errors import RunFailure
from fedmpi.records.hold import FOLDER, Hold, owner_of, refuse_held


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
    """Return the exit code of a process, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hold_and_die(run: Path) -> int:
    """The id of a process that was killed while it held the folder."""

    def work() -> int:
        kept = Hold(run)
        os.kill(os.getpid(), signal.SIGKILL)
        return int(kept.path.exists())

    child = in_child(work)
    assert ended(child) == -signal.SIGKILL and (run / FOLDER).exists()
    return child


def test_a_folder_in_use_is_rejected_with_its_owner_until_it_is_released(tmp_path: Path) -> None:
    refuse_held(tmp_path / "nowhere")
    first = Hold(tmp_path)
    assert first.before is None and str(os.getpid()) in (owner_of(tmp_path) or "")
    said = rf"in use by process {os.getpid()} on \S+, there since 20\d\d-.* UTC. .* remove {tmp_path / FOLDER}$"
    for attempt in (refuse_held, Hold):
        with pytest.raises(UserError, match=said):
            attempt(tmp_path)
    first.check()
    first.release()
    assert owner_of(tmp_path) is None and not (tmp_path / FOLDER).exists()
    Hold(tmp_path).release()


def test_the_folder_of_a_killed_process_of_this_host_is_free_at_once(tmp_path: Path) -> None:
    child = hold_and_die(tmp_path)
    second = Hold(tmp_path)
    assert f"process {child} on " in str(second.before)
    second.release()
    hold_and_die(tmp_path)
    assert owner_of(tmp_path) is None
    refuse_held(tmp_path)


@pytest.mark.parametrize("content", ["4711\nanother-host\n", "", "no number\nx\n"])
def test_an_owner_of_another_host_or_that_is_not_named_is_believed(tmp_path: Path, content: str) -> None:
    (tmp_path / FOLDER).write_text(content)
    with pytest.raises(UserError, match=f"{'on another-host' if content[:1] == '4' else ''}.*remove"):
        Hold(tmp_path)
    (tmp_path / FOLDER).unlink()
    Hold(tmp_path).release()


@pytest.mark.parametrize(("gone", "words"), [(".", "has vanished"), (FOLDER, "was removed"), ("other", "was removed")])
def test_a_folder_or_lock_that_is_gone_is_said_in_a_sentence(tmp_path: Path, gone: str, words: str) -> None:
    run = tmp_path / "RUN"
    run.mkdir()
    first = Hold(run)
    if gone == ".":
        shutil.rmtree(run)
    else:
        (run / "later").write_text("2\nb\n")
        (run / "later").replace(run / FOLDER) if gone == "other" else (run / FOLDER).unlink()
    with pytest.raises(RunFailure, match=words):
        first.check()
    first.release()


def test_a_run_from_python_holds_its_folder_while_it_lasts_and_no_longer(tmp_path: Path) -> None:
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
