"""How much memory this process may still take: of the machine, of its control group, of its own limit."""

from __future__ import annotations

import resource
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and what of the use is given back when asked for, of control groups of version 2 and of version 1."""
NO_LIMIT = 1 << 60
"""A control group of version 1 without a limit says a number above this one."""


def free_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes of memory that this process can take now; None where nobody says.

    The least of what the machine has available, what the control groups that the process is in leave it, and what its
    own limit of address space (`ulimit -v`) does.
    """
    readings = [_available(proc), _of_groups(proc, groups), _of_address_space(proc)]
    return min((max(0, free) for free in readings if free is not None), default=None)


def address_space(proc: Path = PROC) -> int:
    """Bytes of address space that this process holds, touched or not; 0 where nobody says."""
    try:
        return int((proc / "self" / "statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _available(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _of_groups(proc: Path, groups: Path) -> int | None:
    """What the tightest of the process's control groups, and of those around it, leaves."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        folder = top / name.strip("/")
        for around in (folder, *folder.parents):
            if (free := _of_group(around)) is not None:
                left.append(free)
            if around == top:
                break
    return min(left, default=None)


def _of_group(folder: Path) -> int | None:
    for most, used, spare in LIMITS:
        try:
            limit, use = (folder / most).read_text().strip(), int((folder / used).read_text())
            if limit == "max" or int(limit) > NO_LIMIT:
                return None
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return int(limit) - use + int(counts.get(spare, 0))
        except (OSError, ValueError):
            continue
    return None


def _of_address_space(proc: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit - address_space(proc)
