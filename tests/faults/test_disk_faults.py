"""A run that dies, writes half or meets a full disk at any one of its write calls resumes bit for bit.

Every case is a separate process, forked from this one, which then resumes the run. Only a full disk makes
a run print something: one sentence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.records.hold import FOLDER
from tests.end_to_end.runs import curve
from tests.faults.disk import DIED, Disk, Mode, faulty

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
FINISHED, REFUSED, BROKEN = 0, 2, 3
LATER = {**SETTINGS, "rounds": 6, "checkpoint.keep": 2}
"""Additional settings with which a finished run continues."""


@dataclass(frozen=True)
class Whole:
    """Files that an undisturbed run left, and its calls."""

    left: tuple[Any, ...]
    calls: list[str]


def left_by(run: Path) -> tuple[Any, ...]:
    """Curve, model, and all of the summary but the seconds and the commit, which may come meanwhile."""
    summary = json.loads((run / "summary.json").read_text())
    del summary["wall_seconds"], summary["git_commit"]
    return curve(run), (run / "model.safetensors").read_bytes(), summary


def undisturbed(folder: Path, settings: dict[str, Any], before: Callable[[Path], None]) -> Whole:
    before(folder)
    with faulty(Disk(folder)) as disk:
        fedmpi.run({}, settings, out=folder, resume=True)
    return Whole(left_by(folder), disk.calls)


def in_child(folder: Path, settings: dict[str, Any], mode: Mode, at: int) -> tuple[int, str]:
    """Exit code of a run on the faulty disk, and what it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code, said = BROKEN, b""
        try:
            with faulty(Disk(folder, mode, at)):
                fedmpi.run({}, settings, out=folder, resume=True)
            code = FINISHED
        except UserError as error:
            code, said = REFUSED, str(error).encode()
        except BaseException as error:
            said = repr(error).encode()
        finally:
            os.write(writer, said[:60_000])
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def resumed(folder: Path, settings: dict[str, Any]) -> None:
    """Continue; the lock of a process that died before it could name itself is removed, as the sentence says."""
    try:
        fedmpi.run({}, settings, out=folder, resume=True)
    except UserError as error:
        assert re.search(rf"in use by .* remove {folder / FOLDER}", str(error))
        (folder / FOLDER).unlink()
        fedmpi.run({}, settings, out=folder, resume=True)


def nothing(folder: Path) -> None:
    """A run from its beginning."""


def finished(folder: Path) -> None:
    """A run that was finished with fewer rounds and continues."""
    fedmpi.run({}, SETTINGS, out=folder)


def survives(whole: Whole, run: Path, settings: dict[str, Any], mode: Mode, at: int) -> None:
    """One case: the call goes wrong, and the run continues."""
    case = f"{mode} at call {at}, {whole.calls[at]}"
    code, said = in_child(run, settings, mode, at)
    if mode == "full":
        assert code in (FINISHED, REFUSED), f"{case}: {said}"
        if code == REFUSED:
            assert re.search(r"run folder \S+( failed)? \(No space left on device\)\. ", said), f"{case}: {said}"
            assert "\n" not in said
    else:
        assert code == DIED, f"{case}: {code} {said}"
    try:
        with faulty(Disk(run)):
            resumed(run, settings)
    except Exception as error:
        raise AssertionError(f"{case}: cannot continue: {error}") from error
    assert left_by(run) == whole.left, case
    shutil.rmtree(run)


@pytest.mark.parametrize("how", ["death", "full", "full, in a run that continues with more rounds"])
def test_a_run_survives_whatever_happens_at_any_of_its_calls(tmp_path: Path, how: str):
    """To die after a call is to die before the next: only after a write is that another case than "torn"."""
    continued = how.endswith("rounds")
    settings, before = (LATER, finished) if continued else (SETTINGS, nothing)
    whole = undisturbed(tmp_path / "WHOLE", settings, before)
    modes: tuple[Mode, ...] = ("torn", "crash") if how == "death" else ("full",)
    for mode in modes:
        for at in range(len(whole.calls)):
            if mode == "crash" and not whole.calls[at - 1].startswith("write"):
                continue
            run = tmp_path / f"{mode}-{at}"
            before(run)
            survives(whole, run, settings, mode, at)
    assert len(whole.calls) > 50


def test_what_is_renamed_is_on_the_disk_before_and_its_name_afterwards(tmp_path: Path):
    """Otherwise a power failure could leave a checkpoint whose name is there and whose content is not."""
    calls = undisturbed(tmp_path / "RUN", SETTINGS, nothing).calls
    renamed = [number for number, call in enumerate(calls) if call.startswith(("rename", "replace"))]
    for number in renamed:
        path = Path(calls[number].partition(" ")[2])
        synced = [call.partition(" ")[2] for call in calls[:number] if call.startswith("fsync")]
        assert Path(synced[-1]).parent == path.parent and path.stem in synced[-1], calls[: number + 1]
        assert f"fsync {path.parent}" in calls[number:], calls[number:]
        if path.name.startswith("round-"):  # a checkpoint counts on the records before it
            opened = calls.index(f"open checkpoints/.{path.name}.partial")
            before = [n for n, call in enumerate(calls[:opened]) if call == "fsync metrics.jsonl"]
            earlier = [n for n in renamed if n < opened and calls[n].endswith(".safetensors")]
            assert before and before[-1] > max(earlier, default=-1), calls[: number + 1]
    assert len(renamed) > 5
