"""Paths of every kind, given to all that takes one: refused in a sentence or used, and nothing written elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from hypothesis import strategies as st

import fedmpi
from data_prep import __main__ as data_prep
from fedmpi.common.files import named_folder
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.describe.data import inspect_folder
from fedmpi.jobs.site import load_site
from fedmpi.jobs.submission import write_scripts
from tests.fuzz import shards
from tests.fuzz.runs import make_kind
from tests.fuzz.verdict import REFUSED, Finding, outcome

Case = tuple[str, str, str, str]
ROOT = Path(gettempdir()) / f"fedmpi-fuzz-places-{os.getpid()}"
NAMES = [
    "x",
    "[/x]",
    "[bold]",
    "\udcff",
    "é",
    "a b",
    "a\nb",
    "-x",
    "--out",
    "~",
    "%a",
    "$(id)",
    "x" * 255,
    "x" * 256,
    "x" * 5000,
]
NAMES += [
    ".",
    "..",
    "",
    "\0",
    "a\0b",
    "c.toml",
    "x.npz",
    "x.csv",
    "digits",
    "a:b",
    "*",
    "\x1b[2J",
    "CON",
    " ",
    "\u202e",
]
KINDS = (
    "gone",
    "folder",
    "fifo",
    "empty",
    "link to itself",
    "socket",
    "link to a device",
    "shards",
    "no rights",
    "link out",
)
DEVICES = [
    "/dev/full",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    "/proc/self/fd/0",
    "/dev/null/x",
    "/proc/x",
    "/",
    "/sys/x",
]


def _run(path: str) -> None:
    fedmpi.run(
        "fedavg", {"rounds": 1, "model.hidden": [4], "logging.tensorboard": False}, data="digits:clients=4", out=path
    )


def _prepared(path: str) -> None:
    data_prep.run(["digits", "--partition", "iid", "--clients", "3", "--out", path])


def _read(path: str) -> None:
    data_prep.run(
        ["arrays", "--raw", path, "--partition", "iid", "--clients", "2", "--out", str(ROOT / "out" / "read")]
    )


USERS: dict[str, Callable[[str], object]] = {
    "config": lambda path: load_config(Path(path)),
    "python config": lambda path: fedmpi.Config.load(path),
    "store": open_store,
    "data": lambda path: fedmpi.run("fedavg", {"rounds": 1}, data=path),
    "load_run": fedmpi.load_run,
    "load_runs": fedmpi.load_runs,
    "out": _run,
    "inspect": inspect_folder,
    "site": lambda path: load_site(Path(path)),
    "scripts": lambda path: write_scripts(named_folder(path)),
    "reference": lambda path: fedmpi.run("fedavg", {"rounds": 1, "logging.reference": path}, data="digits:clients=4"),
    "prepare out": _prepared,
    "prepare raw": _read,
    "plot": lambda path: inspect_folder("digits").plot(Path(path)),
}


def strategy() -> st.SearchStrategy[Case]:
    """(who takes the path, a name, what lies there, or a path outside)."""
    users = st.sampled_from(sorted(USERS))
    return st.tuples(users, st.sampled_from(NAMES), st.sampled_from(KINDS), st.just("")) | st.tuples(
        users, st.just(""), st.just("gone"), st.sampled_from(DEVICES)
    )


def attempt(case: Case) -> str:
    """Refused or used; what lay beside stays as it was."""
    user, name, kind, outside = case
    shutil.rmtree(ROOT, ignore_errors=True)
    for folder in ("in", "out", "beside"):
        (ROOT / folder).mkdir(parents=True)
    (ROOT / "beside" / "mine.txt").write_text("mine")
    os.chdir(ROOT / "in")
    if name == "..":
        return "not tried"  # who names the folder above means it
    path = outside or name
    if not outside:
        try:
            _make(ROOT / "in" / name, kind)
        except (OSError, ValueError):
            shutil.rmtree(ROOT / "in")
            (ROOT / "in").mkdir()
            os.chdir(ROOT / "in")
    try:
        result = outcome(lambda: USERS[user](path))
        found = sorted(str(each.relative_to(ROOT)) for each in ROOT.iterdir())
        if found != ["beside", "in", "out"] or os.listdir(ROOT / "beside") != ["mine.txt"]:
            raise Finding(f"something was written beside: {found}, {os.listdir(ROOT / 'beside')}")
        if (ROOT / "beside" / "mine.txt").read_text() != "mine":
            raise Finding("a file beside was changed")
    finally:
        os.chdir(gettempdir())
        shutil.rmtree(ROOT, ignore_errors=True)
    return REFUSED if result == REFUSED else "used"


def _make(path: Path, kind: str) -> None:
    if path in (ROOT / "in", ROOT, ROOT / "in" / ".."):
        return
    if kind == "shards":
        shards.copy("uint8", path)
    elif kind == "no rights":
        path.mkdir(0o000)
    elif kind == "link out":
        path.symlink_to(ROOT / "beside" / "mine.txt")
    else:
        make_kind(path, kind)
