"""Cost of sharing a machine: two single-process runs at the same time, against one run alone on one thread.

    python -m benchmarks.side_by_side                  the default threads; nothing else should run
    python -m benchmarks.side_by_side --threads 2      number of threads if runs ignored the load

A run's time is the median of its rounds after the first five. Runs are long enough to overlap except for their starts.
A pass runs one alone and then two; the ratio is taken within a pass, since machines drift. Prints one line per pass,
and one per case with the median ratio of the slower of the two. Exits with 1 if one is above --limit. The load of the
machine by other programs is printed too: above about 0.2 cores the ratios are unreliable.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fedmpi.mpi.device import Load, core_mask

WORKLOADS = {
    "small": ["preset=fedavg", "rounds=600"],
    "large": [
        *("preset=fedavg", "rounds=25", "model.hidden=[1500,1500]", "local.batch_size=40", "clients.count=10"),
        "local.engine=batched",
    ],
}
WARM = 5


def start(folder: Path, settings: list[str], threads: int) -> subprocess.Popen[bytes]:
    """Start one run, in a process that does not inherit a number of threads."""
    keys = [*settings, f"cluster.threads={threads}", "logging.tensorboard=false", "checkpoint.every=0"]
    words = [word for key in keys for word in ("--set", key)]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "fedmpi", "train", *words, "--out", str(folder)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)


def seconds(folder: Path) -> float:
    """Return the median time of a run's rounds after the first few."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return statistics.median(record["seconds"] for record in records[WARM:])


def together(folder: Path, count: int, settings: list[str], threads: int) -> list[float]:
    """Return the times of `count` simultaneous runs."""
    folders = [folder / f"{count}-{threads}-{number}" for number in range(count)]
    runs = [start(place, settings, threads) for place in folders]
    codes = [run.wait() for run in runs]
    if any(codes):
        raise SystemExit("a run failed")
    return [seconds(place) for place in folders]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="of each of the two runs; 0 = fedmpi's own choice")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, help="of a run, instead of the workload's own")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.3, help="times alone that each of the two may take (1.3)")
    asked = parser.parse_args()
    if asked.rounds is not None and asked.rounds <= WARM:
        parser.error(f"--rounds {asked.rounds}: the first {WARM} do not count")
    rounds = [f"rounds={asked.rounds}"] * (asked.rounds is not None)
    worst = 0.0
    load = Load(core_mask())
    passed, busy, own = load.seconds()
    print(f"{int(core_mask().sum())} cores, of which others use {(busy - own) / passed:.1f}")
    for name in asked.workload:
        settings = [*WORKLOADS[name], *rounds]
        ratios = []
        for _ in range(asked.passes):
            with tempfile.TemporaryDirectory() as folder:
                (alone,) = together(Path(folder), 1, settings, 1)
                times = together(Path(folder), 2, settings, asked.threads)
            ratios.append(max(times) / alone)
            listed = ", ".join(f"{1e3 * time:.1f} ms ({time / alone:.2f} x)" for time in times)
            print(f"{name}: alone on one thread {1e3 * alone:.1f} ms a round; two side by side {listed}", flush=True)
        middle = statistics.median(ratios)
        worst = max(worst, middle)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f}), {asked.passes} passes"
        print(f"{name}: the slower of the two {middle:.2f} x {spread}", flush=True)
    print(f"{worst:.2f} x at most, {asked.limit:.2f} x allowed")
    return int(worst > asked.limit)


if __name__ == "__main__":
    sys.exit(main())
