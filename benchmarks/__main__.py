"""Time of a round of every contestant: naive loop, fedmpi on 1, 2 and 3 ranks, installed peers.

    python -m benchmarks                     W1, W2, W3, S4 and S6
    python -m benchmarks lstm LeNet          single models (`benchmarks.workloads`)
    python -m benchmarks --quick             tiny sizes, a smoke test
    python -m benchmarks --device cuda       one process each, on that device

A peer in a separate environment is included by --peer NAME=PYTHON, e.g. --peer pfl=/opt/pfl/bin/python. The
machine's speed varies with time and with other programs. Ratios are therefore taken within a pass. The table shows the
median over the passes and the range; `!` marks rows during which other programs used more than 0.3 cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.contestants import REPOSITORY, Contestant, contestants, find_peers, versions
from benchmarks.measure import ContestantFailed, in_turns, run_tree, spread, table
from benchmarks.workloads import MODELS, QUICK, WARM_UP, WORKLOADS, Workload, prepare
from fedmpi import UserError

BUSY_ELSEWHERE = 0.3
"""Number of cores used by other programs above which a row is marked as disturbed."""
HEADS = ("contestant", "ms per round", "against the first", "clients/s", "samples/s", "peak MB", "steps", "test loss")


@dataclass
class Measured:
    """One run of a contestant."""

    seconds: float  # Median seconds of a round
    samples: float  # Samples per round
    steps: int  # Steps of the last round; equal among contestants that do the same work
    loss: float | None  # Test loss after the last round
    peak_bytes: int
    others: float  # Cores used by other programs


def measure(workload: Workload, entrant: Contestant, data: Path, work: Path) -> Measured | str:
    """Run a contestant once; return its measurements, or the reason why it failed."""
    out = Path(tempfile.mkdtemp(dir=work))
    try:
        used = run_tree(entrant.command(data, out), out / "log.txt", entrant.environment, REPOSITORY)
    except ContestantFailed as error:
        print(error, file=sys.stderr, flush=True)
        return str(error).strip().splitlines()[-1]
    result = entrant.read(out)
    seconds = float(statistics.median(result["seconds"][WARM_UP:]))
    print(f"{workload.name}  {entrant.name:45s} {1e3 * seconds:9.1f} ms", file=sys.stderr, flush=True)
    samples = float(np.mean(result["samples"][WARM_UP:]))
    return Measured(seconds, samples, result["steps"][-1], result["loss"][1], used.peak_bytes, used.others_cores)


def race(workload: Workload, entrants: Sequence[Contestant], data: Path, work: Path, passes: int) -> str:
    """Run the entrants once per pass, the reference first; return the table."""
    prepare(workload, data)
    work.mkdir(parents=True, exist_ok=True)
    ways = [lambda one=one: measure(workload, one, data, work) for one in entrants]
    found = in_turns(ways, passes)
    rows = [line(entrant.name, workload, found, place) for place, entrant in enumerate(entrants)]
    return f"### {title(workload)}\n\n{table(HEADS, rows)}"


def line(name: str, workload: Workload, found: Sequence[Sequence[Measured | str]], place: int) -> list[str]:
    """Return the row of the contestant at this place; the ratios are to the first one in the same pass."""
    reasons = [row[place] for row in found if isinstance(row[place], str)]
    if reasons:
        return [name, f"failed: {str(reasons[0])[:100]}", *[""] * (len(HEADS) - 2)]
    runs = [one for row in found if isinstance(one := row[place], Measured)]
    pairs = zip((row[0] for row in found), runs, strict=True)
    ratios = [run.seconds / first.seconds for first, run in pairs if isinstance(first, Measured)]
    seconds = statistics.median(run.seconds for run in runs)
    disturbed = " !" if max(run.others for run in runs) > BUSY_ELSEWHERE else ""
    return [
        name + disturbed,
        f"{1e3 * seconds:.1f}",
        spread(ratios) if ratios else "",
        f"{(workload.cohort or workload.clients) / seconds:,.0f}",
        f"{runs[-1].samples / seconds:,.0f}",
        f"{max(run.peak_bytes for run in runs) / 1e6:.0f}",
        f"{runs[-1].steps}",
        "" if runs[-1].loss is None else f"{runs[-1].loss:.4f}",
    ]


def title(workload: Workload) -> str:
    """Return one line that describes a round."""
    if workload.wanted:
        return f"{workload.name}: FedSampling, K = {workload.wanted:,} of {workload.clients:,} clients' samples"
    return f"{workload.name}: {workload.cohort} of {workload.clients:,} clients per round, B = {workload.batch}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS, *MODELS], metavar="WORKLOAD")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one pass")
    parser.add_argument("--passes", type=int, default=3, help="how often every contestant runs (3)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="where a peer is installed")
    parser.add_argument("--device", help="where the contestants compute, e.g. cuda; by default on the CPU")
    parser.add_argument("--folder", type=Path, help="keep the generated shards here for another time")
    asked = parser.parse_args()
    try:
        pythons = find_peers(asked.peer)
    except UserError as error:
        parser.error(str(error))
    chosen = QUICK if asked.quick else WORKLOADS | MODELS
    if unknown := set(asked.workloads) - set(chosen):
        parser.error(f"--quick has no {', '.join(unknown)}. Its workloads are {', '.join(QUICK)}")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, {machine}; {versions(pythons)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedmpi-benchmarks-") as temporary:
        data = asked.folder or Path(temporary)
        for name in asked.workloads or (list(WORKLOADS) if not asked.quick else list(QUICK)):
            entrants = contestants(chosen[name], asked.quick, pythons, asked.device)
            passes = 1 if asked.quick else asked.passes
            print(f"\n{race(chosen[name], entrants, data, Path(temporary), passes)}", flush=True)


if __name__ == "__main__":
    main()
