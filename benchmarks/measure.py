"""Run a contestant as a process tree and measure its peak memory and the load of other programs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLED_EVERY = 0.4  # reading a tree's memory takes milliseconds from the tree
LAST_LINES = 15


@dataclass(frozen=True)
class TreeUse:
    """Resources used by a process tree."""

    peak_bytes: int  # Largest proportional set size (shared pages counted once) of all its processes together
    others_cores: float  # Mean number of cores used by processes outside the tree


class ContestantFailed(RuntimeError):
    """A contestant failed or did not end; contains the last lines it printed."""


def run_tree(
    command: Sequence[str], log: Path, environment: Mapping[str, str], cwd: Path, seconds: float = 600
) -> TreeUse:
    """Run a command to its end."""
    started, busy = time.monotonic(), _busy_seconds()
    peak = own = 0.0
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            process_group=0,
        )
        tree: list[psutil.Process] = []
        while process.poll() is None:
            tree = _tree(process.pid)
            used, spent = _use(tree)
            peak, own = max(peak, used), max(own, spent)
            if time.monotonic() - started > seconds:
                break
            time.sleep(SAMPLED_EVERY)
        overdue = process.poll() is None
        _kill(_tree(process.pid) if overdue else tree)
        process.wait()
    if overdue or process.returncode:
        how = f"did not end within {seconds:.0f} s" if overdue else f"ended with code {process.returncode}"
        last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise ContestantFailed(f"{' '.join(command)} {how}:\n{last}")
    wall = time.monotonic() - started
    return TreeUse(int(peak), max(0.0, (_busy_seconds() - busy - own) / wall))


def _tree(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def _use(tree: list[psutil.Process]) -> tuple[float, float]:
    """Return the bytes of memory of the processes and the CPU seconds they have used."""
    held = spent = 0.0
    for process in tree:
        with suppress(psutil.Error):
            held += process.memory_full_info().pss
            times = process.cpu_times()
            spent += times.user + times.system
    return held, spent


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _busy_seconds() -> float:
    """Return the CPU seconds of the machine since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0))
