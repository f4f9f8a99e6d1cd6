"""Processes of this host, told from later ones that have the same number."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

UNKNOWN = "?"


@dataclass(frozen=True)
class Process:
    """A rank's process: its host, its number there, and when it was started, which tells it from later ones."""

    host: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this host."""
        return cls(socket.gethostname(), pid, start_time(pid)[0])

    @property
    def seen(self) -> str:
        """The letter that Linux has for its state; "" where there is no such process, or only what is left of one.

        UNKNOWN where the system does not let this process look, such as for too many open files.
        """
        try:
            started, letter = start_time(self.pid)
        except OSError:
            return UNKNOWN
        return letter if started == self.started and letter not in "ZX" else ""


def name_space() -> str:
    """What numbers of processes refer to: in containers the same number is another process."""
    return os.readlink("/proc/self/ns/pid")


def start_time(pid: int) -> tuple[int, str]:
    """When a process was started, in ticks since the system was, and the letter of its state; (0, "") without one."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""
    return int(fields[19]), fields[0]
