"""Folders of runs, of one that was stopped and one that is finished: damaged, then read and gone on with."""

from __future__ import annotations

import os
import shutil
import socket
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import fedmpi
from fedmpi import Run
from tests.fuzz.kept import kept_folder
from tests.fuzz.verdict import REFUSED, Finding, outcome

Case = tuple[str, str, Any]
WHERE = st.floats(0, 1, exclude_max=True)
ENDINGS = ("stopped", "finished")
FILES = ("metrics.jsonl", "config.toml", "summary.json", "model.safetensors", "run.log", "checkpoints")
JUNK = ["", "{", "[]", "null", "7", '{"round": -1}', "[" * 50_000, '{"final": 3}', "rounds = 1" + "0" * 5000, "\udcff"]
JUNK += ['{"engine": []}', '{"data": {}, "final": {"round": "x"}}', '{"a": NaN}', "preset = []", "\ufeff", "\0" * 100]
KINDS = ("folder", "fifo", "gone", "empty", "link to itself", "socket", "link to a device")
CONFIG = {
    "rounds": 3,
    "clients.count": 3,
    "model.hidden": [4],
    "logging.tensorboard": False,
    "checkpoint.every": 1,
    "local.epochs": 2,
}


def strategy() -> st.SearchStrategy[Case]:
    """(how the run ended, what is done to its folder, with what)."""
    named = st.sampled_from(FILES)
    damage = st.one_of(
        st.tuples(st.just("flip"), st.tuples(named, WHERE, st.integers(0, 7))),
        st.tuples(st.just("cut"), st.tuples(named, WHERE)),
        st.tuples(st.just("write"), st.tuples(named, WHERE, st.binary(min_size=1, max_size=20))),
        st.tuples(st.just("junk"), st.tuples(named, st.sampled_from(JUNK))),
        st.tuples(st.just("kind"), st.tuples(named, st.sampled_from(KINDS))),
        st.tuples(st.just("lines"), st.tuples(WHERE, st.sampled_from(["drop", "twice", "swap", "half"]))),
    )
    return st.tuples(st.sampled_from(ENDINGS), damage).map(lambda drawn: (drawn[0], *drawn[1]))


@cache
def original(ending: str) -> tuple[Path, Run]:
    """An undamaged folder, and what comes of it in the end."""
    folder = kept_folder(f"runs-{ending}")
    asked = iter([False] * (1 if ending == "stopped" else 99) + [True] * 99)
    fedmpi.run("fedavg", CONFIG, data="digits:clients=6", out=folder / ending, stop=lambda: next(asked))
    shutil.copytree(folder / ending, folder / "whole")
    return folder / ending, _went_on(folder / "whole")


def _went_on(folder: Path) -> Run:
    run = fedmpi.run("fedavg", CONFIG, data="digits:clients=6", out=folder, resume=True)
    assert run.model is not None and run.records is not None
    return run


def attempt(case: Case) -> str:
    """Read in a sentence or as it is; gone on with to the same model and the same rounds, or refused."""
    ending, damage, how = case
    whole, expected = original(ending)
    folder = whole.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    globals()[f"_{damage}"](folder, how)
    outcome(lambda: _read(folder))
    run = outcome(lambda: _went_on(folder))
    if isinstance(run, str):
        return REFUSED
    for name, value in expected.model.state_dict().items():
        if not torch.allclose(run.model.state_dict()[name], value, rtol=1e-4, atol=1e-6):
            raise Finding(f"gone on with after {damage} {how!r}, but {name} is another one")
    if [_kept(record) for record in run.records] != [_kept(record) for record in expected.records]:
        raise Finding(f"gone on with after {damage} {how!r}, but the records are others")
    return "gone on"


def _kept(record: dict[str, Any]) -> tuple[Any, ...]:
    return record.get("round"), record.get("participants"), round(record.get("test_accuracy", -1), 3)


def _read(folder: Path) -> None:
    """Everything of a run that can be asked for; each part may be refused for itself."""
    run = fedmpi.load_run(folder)
    repr(run)
    for name in ("config", "records", "model"):
        outcome(lambda name=name: getattr(run, name))


def _path(folder: Path, name: str) -> Path:
    """The file of that name; of the checkpoints the newest. One that the run did not write is written first."""
    if name == "checkpoints":
        return max((folder / name).iterdir())
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    return folder / name


def _flip(folder: Path, how: Any) -> None:
    name, where, bit = how
    path = _path(folder, name)
    content = bytearray(path.read_bytes())
    if content:
        content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)


def _cut(folder: Path, how: Any) -> None:
    name, where = how
    path = _path(folder, name)
    path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])


def _write(folder: Path, how: Any) -> None:
    name, where, written = how
    path = _path(folder, name)
    content = path.read_bytes()
    place = int(where * len(content))
    path.write_bytes(content[:place] + written + content[place + len(written) :])


def _junk(folder: Path, how: Any) -> None:
    name, junk = how
    _path(folder, name).write_bytes(junk.encode("utf-8", "surrogateescape"))


def _kind(folder: Path, how: Any) -> None:
    name, kind = how
    path = _path(folder, name)
    path.unlink()
    make_kind(path, kind)


def make_kind(path: Path, kind: str) -> None:
    """Something else than a file in the place of one."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))


def _lines(folder: Path, how: Any) -> None:
    """Whole lines of the records, gone, twice or exchanged."""
    where, what = how
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = int(where * len(lines))
    if what == "drop":
        del lines[place]
    elif what == "twice":
        lines.insert(place, lines[place])
    elif what == "swap":
        lines[0], lines[place] = lines[place], lines[0]
    else:
        lines[place] = lines[place][: len(lines[place]) // 2]
    path.write_bytes(b"".join(lines))
