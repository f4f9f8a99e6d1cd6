"""One run at a time writes to a folder, whatever hosts they are on; the folder of a dead one can be taken over.

RUN/.holder holds one small file, named by a number that only grows. The file with the highest number is the holder's:
it says who that is, and its time of modification is renewed every few seconds. Taking the folder is making the next
number, which the file system grants to one process only (O_CREAT | O_EXCL: so on local disks, NFS from version 3 on and
Lustre); no lock of the file system's is needed. A run that ends in order sets the time to 0.

A holder on this machine is dead when its process is gone. So is an earlier turn of the same SLURM job. Of any other
one only the time of its last sign of life is known, by the clock of the file system: after `LAPSES` seconds without
one it has lost its hold. Should it live after all (a stopped process, a node that was cut off), it notices that before
it writes anything, and ends.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.common.files import read_plain
from fedmpi.common.processes import Process, name_space

FOLDER = ".holder"
RENEWED, LAPSES = 5.0, 60.0
"""Seconds between two signs of life, and without one until the hold is lost."""
ATTEMPTS = 5
"""To make the next number, while others do so too."""
_held: set[tuple[int, int]] = set()
"""The files of the folders that this process holds, by device and inode."""


@dataclass(frozen=True)
class Holder:
    """Who holds a folder, or held it last."""

    path: Path  # Of the file that says so
    number: int
    # `host`, `pid`, `since`, … as in `_own_facts`; empty where the process has not come to writing them
    facts: Mapping[str, Any]
    # Time of its last sign of life, in seconds by the file system's clock; 0 when it has let go of the folder
    last_heartbeat: float

    @classmethod
    def of(cls, run: Path) -> Holder | None:
        """The one with the highest number; None where nobody ever held the folder."""
        for number, path in reversed(_numbered(run)):
            with suppress(FileNotFoundError):  # the next holder has just removed it
                # Opened first: NFS then asks its server, also for the time.
                return cls(path, number, _facts(path), path.stat().st_mtime)
        return None

    def alive(self) -> bool:
        """Whether it must be taken to write to the folder still."""
        if not self.last_heartbeat or self._is_copy():
            return False
        if self._here() and self.facts.get("pid") == os.getpid():
            return _identity(self.path) in _held  # not one that a full or lost disk kept from being released
        if self._here():
            return bool(Process("", self.facts.get("pid", 0), self.facts.get("began", 0)).seen)
        if self._earlier_turn():
            return False
        return _clock(self.path.parent) - self.last_heartbeat < LAPSES

    def _here(self) -> bool:
        return self.facts.get("machine") is not None and self.facts["machine"] == _machine()

    def _is_copy(self) -> bool:
        """Whether the file came here with a copy of the whole folder; told apart on the machine of the original."""
        with suppress(OSError):
            return self._here() and self.facts.get("file") != list(_identity(self.path))
        return False

    def _earlier_turn(self) -> bool:
        """Whether it was this very job before SLURM queued it again, which ends all its processes first."""
        own, its = _own_facts(), self.facts
        same = own["job"] is not None and all(its.get(key) == own[key] for key in ("job", "cluster"))
        return same and isinstance(its.get("restarts"), int) and its["restarts"] < own["restarts"]

    def __str__(self) -> str:
        if not self.facts:
            return "another run"
        job = f", SLURM job {self.facts['job']}" if self.facts.get("job") else ""
        return (
            f"process {self.facts.get('pid')} on {self.facts.get('host')}{job}, there since {self.facts.get('since')}"
        )


def refuse_held(run: Path) -> Holder | None:
    """Refuse a folder that another run holds."""
    try:
        holder = Holder.of(run)
    except OSError as error:
        raise UserError(f"the folder {run} cannot be used ({error.strerror}): choose another --out") from error
    if holder is not None and holder.alive():
        since = max(0.0, _clock(holder.path.parent) - holder.last_heartbeat)
        ends = "" if holder._here() else f" (one that has died is given up {LAPSES:.0f} s after its last sign of life)"
        raise UserError(
            f"{run} is in use by {holder}, last heard of {since:.0f} s ago{ends}: choose another --out, or end that "
            "run first"
        )
    return holder


class Hold:
    """This process's hold on a run's folder, from the making of the object until `release`."""

    def __init__(self, run: Path):
        self.run = run
        self.before: Holder | None = None
        (run / FOLDER).mkdir(exist_ok=True)
        self.path = self._take()
        self._file = _identity(self.path)
        _held.add(self._file)
        self._released = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="fedmpi-hold", daemon=True)
        self._renewing.start()

    def _take(self) -> Path:
        for _ in range(ATTEMPTS):
            before = refuse_held(self.run)
            number = before.number + 1 if before else 1
            path = self.run / FOLDER / f"{number:06d}.json"
            if not _made(path):
                continue  # another was quicker: look who
            now = Holder.of(self.run)
            if now is None or now.number != number:  # what was looked at had been outdated
                path.unlink(missing_ok=True)
                continue
            self.before = before if before is not None and before.last_heartbeat else None
            for outdated, other in _numbered(self.run):
                if outdated < number:
                    with suppress(OSError):
                        other.unlink()
            return path
        raise UserError(f"{self.run} is being taken by several runs at once: choose another --out for each")

    def check(self) -> None:
        """Make sure that the folder is still this run's, before anything is written there."""
        try:
            # NFS asks its server when a file is opened, not when it is looked up.
            os.close(os.open(self.path, os.O_RDONLY))
            return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
        if not self.run.is_dir():
            raise RunFailure(
                f"the run folder {self.run} has vanished: what was not copied is lost; put a copy back and go on with "
                f"--resume --out {self.run}, or start anew"
            )
        holder = Holder.of(self.run)
        if holder is None:
            raise RunFailure(
                f"{self.path} was removed while the run went on, so another one may write to {self.run} too: go on "
                f"with --resume --out {self.run}"
            )
        raise RunFailure(
            f"{self.run} was taken over by {holder}, when this run had given no sign of life for {LAPSES:.0f} s: this "
            "one ends, the other goes on"
        )

    def release(self) -> None:
        """Let others have the folder."""
        self._released.set()
        self._renewing.join()
        _held.discard(self._file)
        with suppress(OSError):
            os.utime(self.path, (0, 0))

    def _renew(self) -> None:
        while not self._released.wait(RENEWED):
            with suppress(OSError):  # a folder that is gone is noticed by `check`
                os.utime(self.path)


def _numbered(run: Path) -> list[tuple[int, Path]]:
    """All holders' files by number."""
    return sorted((int(path.stem), path) for path in (run / FOLDER).glob("*.json") if path.stem.isdigit())


def _made(path: Path) -> bool:
    """Whether this process has made the file; false when another did."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        found = os.fstat(handle)
        os.write(handle, json.dumps({**_own_facts(), "file": [found.st_dev, found.st_ino]}, indent=1).encode())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return True


def _own_facts() -> dict[str, Any]:
    restarts, process = os.environ.get("SLURM_RESTART_COUNT", "0"), Process.of(os.getpid())
    return {
        "host": process.host,
        "pid": process.pid,
        "began": process.started,
        "machine": _machine(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "restarts": int(restarts) if restarts.isdigit() else 0,
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }


def _facts(path: Path) -> Mapping[str, Any]:
    try:
        facts = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


@cache
def _machine() -> str | None:
    """What process ids mean something on: a boot of a host, and a name space of processes; None where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {name_space()}"
    except OSError:
        return None


def _clock(folder: Path) -> float:
    """The time by the clock of the file system, which several hosts share."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
