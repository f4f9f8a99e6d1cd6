"""Costs of a round on a GPU: kernels, launches, copies, waits of the host, and the lines of fedmpi that wait.

python -m benchmarks.gpu.waits                  every case of `benchmarks.gpu.rounds`, then whole runs
python -m benchmarks.gpu.waits W1 --device cpu --quick
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fedmpi
from benchmarks.gpu.rounds import CASES, gpu_parser, quick, rounds_of
from benchmarks.measure import table, wait_for

HEADS = ("case", "way", "ms", "busy ms", "kernels", "launches", "graphs", "copies", "waits")
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"local.engine": "batched"},
    "fedsampling": {},
    "scaffold": {},
    "fedavg, exact": {"server.exact": True},
}


def profiled(run: Callable[[], object], device: torch.device) -> list[str]:
    """Return the cells of one way, whose milliseconds are those without the profiler."""
    wait_for(device)
    began = time.perf_counter()
    run()
    wait_for(device)
    wall = time.perf_counter() - began
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        run()
        wait_for(device)
    events = found.events() or []
    on_device = [event for event in events if str(event.device_type).endswith("CUDA")]
    busy = sum(event.device_time_total for event in on_device)
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    calls = Counter(event.name for event in events if event.name.startswith("cu"))
    launches, waits = (sum(n for name, n in calls.items() if word in name) for word in ("LaunchKernel", "Synchronize"))
    whole = (kernels, launches, calls["cudaGraphLaunch"], calls["cudaMemcpyAsync"], waits)
    return [f"{1e3 * wall:.2f}", f"{busy / 1e3:.2f}", *map(str, whole)]


def waiting_lines(preset: str, keys: dict[str, Any], device: torch.device) -> tuple[float, Counter[str]]:
    """Return the milliseconds of the last round of a run, and how often each line of fedmpi waits in its fourth."""
    lines: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any) -> None:
        own = [frame for frame in traceback.extract_stack() if "/fedmpi/" in frame.filename]
        if "synchroniz" in str(message).lower() and own:
            lines[f"{own[-1].filename.split('/fedmpi/')[-1]}:{own[-1].lineno}"] += 1

    def watch(record: dict[str, Any]) -> None:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn" if record["round"] == 3 else "default")

    short = {"rounds": 6, "cluster.device": device.type, "logging.tensorboard": False, "checkpoint.every": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]
        run = fedmpi.run(preset, {**short, **keys}, data="digits", on_round=watch)
    return 1e3 * run.records[-1]["seconds"], lines


def main() -> None:
    asked = gpu_parser(__doc__, "cases", CASES).parse_args()
    torch.set_num_threads(1)
    until, rows = time.monotonic() + asked.budget, []
    for name in asked.cases or CASES:
        if time.monotonic() < until:
            found, _ = rounds_of(quick(CASES[name]) if asked.quick else CASES[name], asked.device)
            rows += [[name, way, *profiled(run, asked.device)] for way, run in found.items()]
    print(table(HEADS, rows), flush=True)
    for name, keys in RUNS.items():
        ms, lines = waiting_lines(name.split(",")[0], keys, asked.device)
        waits = ", ".join(f"{line} {count}" for line, count in lines.most_common())
        print(f"\nrun of {name}: {ms:.1f} ms per round; waits of round 4: {waits or 'none'}", flush=True)


if __name__ == "__main__":
    main()
