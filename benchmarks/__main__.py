"""Benchmarks of fedmpi; run them in the repository, in the environment that fedmpi is installed in.

    python -m benchmarks                  one table: naive loop, floors, fedmpi on 1, 2, 3 ranks, installed peers
    python -m benchmarks --quick          tiny sizes, a smoke test
    python -m benchmarks --profile        time of fedmpi's rounds by phase and by rank
    python -m benchmarks --device cuda    one process each, on that device
    python -m benchmarks --scale          cost against clients, cohort, model size and ranks

A peer in an environment of its own is included by --peer NAME=PYTHON, e.g. --peer pfl=/opt/pfl/bin/python.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.compare import race, table
from benchmarks.contestants import find_peers, versions
from benchmarks.devices import refusing
from benchmarks.phases import profile
from benchmarks.scale import scale
from benchmarks.workloads import QUICK, WORKLOADS


def main() -> None:
    asked = _arguments()
    with refusing():
        pythons = find_peers(asked.peer)
    chosen = QUICK if asked.quick else WORKLOADS
    names = asked.workloads or list(chosen)
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedmpi-benchmarks-", dir=asked.folder) as temporary:
        work = Path(temporary)
        data = asked.folder or work
        print(_heading(pythons), flush=True)
        for name in names:
            if asked.profile:
                report = profile(chosen[name], data, work, asked.device)
            elif not asked.scale:
                passes = 1 if asked.quick else asked.passes
                rows = race(chosen[name], data, work, passes, asked.quick, pythons, asked.device)
                report = table(chosen[name], rows)
            else:
                continue
            print(f"\n{report}", flush=True)
        if asked.scale:
            print(f"\n{scale(work, asked.quick)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="some of the workloads; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one pass")
    parser.add_argument("--profile", action="store_true", help="where fedmpi's time goes")
    parser.add_argument("--scale", action="store_true", help="how cost grows")
    parser.add_argument("--passes", type=int, default=3, help="how often every contestant runs (3)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="where a peer is installed")
    parser.add_argument("--device", help="where the contestants compute, e.g. cuda; by default on the processor")
    parser.add_argument("--folder", type=Path, help="keep the generated shards here for another time")
    return parser.parse_args()


def _heading(pythons: dict[str, str]) -> str:
    cores, memory = os.cpu_count(), psutil.virtual_memory().total / 2**30
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.processor() or platform.machine()}, {cores} cores, "
        f"{memory:.0f} GiB, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; "
        + ", ".join(versions(pythons))
    )


if __name__ == "__main__":
    main()
