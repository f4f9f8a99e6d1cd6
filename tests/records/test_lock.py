"""Two runs never write to one folder; the owner is named, and one that is dead on this host gives way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.common.files import LOCK, is_locked, lock_folder


def test_a_folder_in_use_is_rejected_with_its_owner_until_it_is_released(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "nowhere")
    first = lock_folder(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+\. .* remove {tmp_path / LOCK}$"):
            fedmpi.run("fedavg", {"rounds": 1}, out=tmp_path, resume=resume)
    assert is_locked(tmp_path)
    first.release()
    assert not is_locked(tmp_path) and not (tmp_path / LOCK).exists()
    lock_folder(tmp_path).release()


def test_the_folder_of_a_killed_process_of_this_host_is_free_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        kept = lock_folder(tmp_path)
        os.kill(os.getpid() if kept.is_locked else 0, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL and (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)
    lock_folder(tmp_path).release()


@pytest.mark.parametrize(("content", "owner"), [("4711\nanother-host\n", "process 4711 on another-host"), ("", "")])
def test_an_owner_of_another_host_or_that_is_not_named_is_believed(tmp_path: Path, content: str, owner: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(UserError, match=f"{owner}.*remove"):
        lock_folder(tmp_path)
