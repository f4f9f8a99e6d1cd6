"""Data that change during a run end it with a sentence, before anything of them is saved; the run can continue."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi.common.errors import RunFailure
from fedmpi.data import source
from fedmpi.data.opening import open_store
from tests.data_prep.command import main
from tests.end_to_end.runs import TIMINGS, curve

SETTINGS = {"logging.tensorboard": False, "local.engine": "sequential", "rounds": 6, "checkpoint.every": 2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched") / "digits"
    words = "digits --partition iid --clients 6 --shards 2 --seed 0 --out"
    assert main([*words.split(), str(folder)]) == 0
    return folder


def overwrite(path: Path) -> None:
    """Other bytes of the same number, in place; the last ones are no part of the file's structure."""
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        content = file.read()
        file.seek(-8, os.SEEK_END)
        file.write(bytes(255 - byte for byte in content))


def prepare_anew(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    overwrite(other)
    other.replace(path)


CHANGES = {
    "was changed since": overwrite,
    "was changed since this run began:": prepare_anew,
    r"\(\d+ bytes, \d+ before\)": lambda path: os.truncate(path, path.stat().st_size - 100),
    "can no longer be read": Path.unlink,
}


@pytest.fixture(scope="module")
def whole(prepared: Path) -> fedmpi.Run:
    """Return the result of a run whose data do not change."""
    return fedmpi.run("fedavg", SETTINGS, data=prepared)


@pytest.mark.parametrize(("words", "seconds"), list(zip(CHANGES, (0.0, 1e9, 1e9, 0.0), strict=True)))
def test_changed_data_end_a_run_which_continues_when_they_are_back(
    prepared: Path, whole: fedmpi.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, seconds: float
):
    """Seen when the files are looked at next, at the latest before anything is saved."""
    monkeypatch.setattr(source, "SECONDS", seconds)
    data, run = tmp_path / "digits", tmp_path / "RUN"
    shutil.copytree(prepared, data)
    shard = data / "train-00001.h5"

    def change(record: dict[str, Any]) -> None:
        if record["round"] == 2:
            CHANGES[words](shard)

    with pytest.raises(RunFailure, match=rf"{shard} .*{words}"):
        fedmpi.run("fedavg", SETTINGS, data=data, out=run, on_round=change)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["round-00000002.safetensors"]
    shutil.copyfile(prepared / shard.name, shard)
    again = fedmpi.run("fedavg", SETTINGS, data=data, out=run, resume=True)
    assert curve(run) == [{k: v for k, v in record.items() if k not in TIMINGS} for record in whole.records]
    pairs = zip(again.model.parameters(), whole.model.parameters(), strict=True)
    assert all((one == other).all() for one, other in pairs)


def test_files_that_are_touched_or_copied_back_have_not_changed(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = tmp_path / "digits"
    shutil.copytree(prepared, data)
    seen = source.DataWatch(open_store(data))
    (data / "train-00000.h5").touch()
    shutil.copyfile(data / "test.h5", data / "copy")
    (data / "copy").replace(data / "test.h5")
    read: list[Path] = []
    digest = source._digest
    monkeypatch.setattr(source, "_digest", lambda path: (read.append(path), digest(path))[1])
    seen.check()
    seen.check()
    assert sorted(path.name for path in read) == ["test.h5", "train-00000.h5"]  # once each
