"""A run that dies or meets a full disk whenever it changes its folder resumes bit for bit.

Python's audit events report every file that is opened for writing, renamed or removed, and every new folder.
Every case is a process that is forked from this one. A process that dies loses what it has not flushed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.common.files import LOCK
from tests.end_to_end.runs import curve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = {
    "data.source": "digits:clients=6",
    "model.hidden": [8],
    "rounds": 4,
    "checkpoint.every": 2,
    "checkpoint.keep": 1,
    "logging.tensorboard": False,
    "local.engine": "sequential",
    "local.algorithm": "scaffold",
    "local.batch_size": 50,
    "clients.count": 2,
    "server.optimizer": "adam",
    "cluster.threads": 1,
}
FINISHED, REFUSED, BROKEN, DIED = 0, 2, 3, 9
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def left_by(run: Path) -> tuple[Any, ...]:
    """Curve, model, and all of the summary but the seconds and the commit, which may come meanwhile."""
    summary = json.loads((run / "summary.json").read_text())
    del summary["wall_seconds"], summary["git_commit"]
    return curve(run), (run / "model.safetensors").read_bytes(), summary


def in_child(folder: Path, at: int = -1, full: bool = False) -> tuple[int, str]:
    """Exit code of a run whose disk fails at its change number `at`, and its words; those of a finished one are counts.

    Where the disk is `full`, it is so from then on; else the process dies.
    """
    reader, writer = os.pipe()
    changes = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal changes
        writes = event in ("os.rename", "os.remove", "os.mkdir")
        if event == "open" and isinstance(arguments[2], int):
            writes = bool(arguments[2] & WRITING) and arguments[2] & os.O_TMPFILE != os.O_TMPFILE
        if writes and isinstance(arguments[0], str | Path) and os.path.abspath(arguments[0]).startswith(str(folder)):
            changes += 1
            if full and changes > at >= 0 and event != "os.remove":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not full and changes == at + 1:
                os._exit(DIED)

    child = os.fork()
    if not child:
        code, said = BROKEN, ""
        try:
            sys.addaudithook(watch)
            fedmpi.run({}, SETTINGS, out=folder)
            code, said = FINISHED, str(changes)
        except UserError as error:
            code, said = REFUSED, str(error)
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(writer, said.encode()[:60_000])
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def resumed(folder: Path) -> None:
    """Continue; the lock of a process that died before it could name itself is removed, as the sentence says."""
    try:
        fedmpi.run({}, SETTINGS, out=folder, resume=True)
    except UserError as error:
        assert re.search(rf"in use by .* remove {folder / LOCK}", str(error))
        (folder / LOCK).unlink()
        fedmpi.run({}, SETTINGS, out=folder, resume=True)


@pytest.mark.parametrize("full", [False, True])
def test_a_run_survives_a_fault_at_any_change_of_its_folder(tmp_path: Path, full: bool):
    code, count = in_child(tmp_path / "WHOLE")
    assert code == FINISHED and int(count) > 30, count
    for at in range(int(full), int(count), 1 + full):
        code, said = in_child(tmp_path / "RUN", at, full)
        if full:
            assert code in (FINISHED, REFUSED), f"change {at}: {said}"
            assert code == FINISHED or re.search(r"run folder \S+( failed)? \(No space left on device\)\. ", said), said
            assert "\n" not in said
        else:
            assert code == DIED, f"change {at}: {code} {said}"
        resumed(tmp_path / "RUN")
        assert left_by(tmp_path / "RUN") == left_by(tmp_path / "WHOLE"), f"change {at}"
        shutil.rmtree(tmp_path / "RUN")
