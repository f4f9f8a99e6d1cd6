"""Shared memory that killed jobs leave behind: each process notes its own, and the next job of the user removes it.

MPI libraries keep files in /dev/shm (MPICH: `mpich_shm_*`, 1 to 4 MB a job; Open MPI: `sm_segment.*`, 16 MB), which
nobody removes when a job is killed. Their names do not tell whose they are. So every process that has started MPI
writes beside them a note, `fedmpi-USER-PID-START`, with the files that it has mapped. Where the process of a note is
gone, those files are removed, unless a living process has mapped them or has a note of them too.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedmpi.common.processes import Process, name_space

log = logging.getLogger("fedmpi")

SHARED_MEMORY = Path("/dev/shm")
NAMES = re.compile(r"(?:mpich_|sm_segment|vader_segment|ucx_shm_|psm)[\w.-]+")
"""What MPI libraries call their files; nothing else is ever removed."""
NOTE = re.compile(r"fedmpi-(\d+)-(\d+)-(\d+)")


def claim() -> None:
    """Note which files of the shared memory this process has mapped."""
    with suppress(OSError):  # without a note nothing of this process is ever removed
        note = _own_note()
        partial = note.with_name(f".{note.name}")
        partial.write_text("\n".join([name_space(), *sorted(_mapped("self"))]), encoding="utf-8")
        os.chmod(partial, stat.S_IRUSR | stat.S_IWUSR)
        partial.rename(note)


def release() -> None:
    """Remove this process's note: MPI itself removes the files as it ends."""
    with suppress(OSError):
        _own_note().unlink()


def remove_leftovers() -> None:
    """Remove what processes of this user have left behind that are gone."""
    notes = [*_notes()]
    dead = [(note, files) for note, files, alive in notes if not alive]
    if not dead:
        return
    used = {name for _, files, alive in notes if alive for name in files}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        used |= _mapped(pid)
    freed = 0
    for note, files in dead:
        for name in files - used:
            freed += _remove(SHARED_MEMORY / name)
        with suppress(OSError):
            note.unlink()
    if freed:
        log.info("removed %.1f MB of shared memory that killed jobs had left in %s", freed / 1e6, SHARED_MEMORY)


def _own_note() -> Path:
    process = Process.of(os.getpid())
    return SHARED_MEMORY / f"fedmpi-{os.getuid()}-{process.pid}-{process.started}"


def _notes() -> Iterator[tuple[Path, set[str], bool]]:
    """The notes of this user's processes, the files they name, and whether the process lives."""
    try:
        here = name_space()
        found = [(path, NOTE.fullmatch(path.name)) for path in SHARED_MEMORY.iterdir()]
    except OSError:
        return
    for path, match in found:
        if match is None or int(match[1]) != os.getuid():
            continue
        with suppress(OSError, UnicodeDecodeError):
            if not _is_own_file(path):
                continue
            processes, *files = path.read_text(encoding="utf-8").split("\n")
            if processes == here:
                alive = bool(Process("", int(match[2]), int(match[3])).seen)
                yield path, {name for name in files if NAMES.fullmatch(name)}, alive


def _mapped(pid: str) -> set[str]:
    """Names of the files of the shared memory that a process has mapped; none of those it does not show."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return {name for name in re.findall(rf"\s{SHARED_MEMORY}/([\w.-]+)", file.read()) if NAMES.fullmatch(name)}
    except OSError:
        return set()


def _is_own_file(path: Path) -> bool:
    facts = path.lstat()
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid()


def _remove(path: Path) -> int:
    """Bytes that removing a file of this user has freed."""
    with suppress(OSError):
        size = path.lstat().st_size
        if _is_own_file(path):
            path.unlink()
            return size
    return 0
