"""Shared frame of the benchmarks: variants in alternation, process trees with their memory, and Markdown tables."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

Result = TypeVar("Result")
SAMPLED_EVERY = 0.4  # reading a tree's memory takes milliseconds from the tree
LAST_LINES = 15
CPU = torch.device("cpu")


@dataclass(frozen=True)
class TreeUse:
    """Resources used by a process tree."""

    peak_bytes: int  # Largest proportional set size (shared pages counted once) of all its processes together
    others_cores: float  # Mean number of cores used by processes outside the tree


class ContestantFailed(RuntimeError):
    """A contestant failed or did not end; contains the last lines it printed."""


def in_turns(ways: Sequence[Callable[[], Result]], passes: int) -> list[list[Result]]:
    """Return the result of each way in each pass, (passes, ways); every second pass runs the ways in reverse."""
    found = []
    for number in range(passes):
        places = range(len(ways)) if number % 2 == 0 else reversed(range(len(ways)))
        row = {place: ways[place]() for place in places}
        found.append([row[place] for place in range(len(ways))])
    return found


def spread(ratios: Sequence[float], digits: int = 2) -> str:
    """Return median, lowest and highest of the ratios as text."""
    middle = f"{statistics.median(ratios):.{digits}f}"
    return f"{middle} ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})" if len(ratios) > 1 else middle


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(way: Callable[[], object], device: torch.device = CPU) -> float:
    """Return CPU seconds on the CPU, which other programs disturb less; else the seconds until all work is done."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    began = clock()
    way()
    wait_for(device)
    return clock() - began


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
        while process.poll() is None and time.monotonic() - started <= seconds:
            tree = _tree(process.pid)
            used, spent = _use(tree)
            peak, own = max(peak, used), max(own, spent)
            time.sleep(SAMPLED_EVERY)
        overdue = process.poll() is None
        for one in _tree(process.pid) if overdue else tree:
            with suppress(psutil.Error):
                one.kill()
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


def _busy_seconds() -> float:
    """Return the CPU seconds of the machine since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0) + getattr(times, "softirq", 0))
