"""Many ranks without a cluster: a small run on 1 rank, and on more and more over hosts that this machine emulates.

    python -m tests.mpi.many_hosts --ranks 8 32 64 --hosts 4

Takes root. Participants, rows, coefficients and, sums being exact, the bits of the model must be those of one rank. The
table has, in milliseconds a round (medians): the round, what of it is not the busiest rank's work, planning, the sum
with its waiting; seconds for start and end of the job; memory of all ranks, shared pages counted once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.mpi.hosts import Hosts, NoHosts, emulated_hosts
from tests.mpi.launch import finish_job, start_job

TRACE = Path(__file__).parent / "trace.py"
SETTINGS = (
    "preset=fedavg data.shards=digits:clients=128 participation.count=64 model.hidden=[32] cluster.threads=1 "
    "aggregation.exact=true logging.tensorboard=false evaluation.every=5"
)
SECONDS = 3000
WARM = 2
BYTES_OF_A_RANK = 200e6
"""Measured: 190 MB, the libraries that all share divided among them."""
HEAD = "| ranks | hosts | round | not training | plan | sum | start and end, s | memory, MB | plans, rows, bits |"


@dataclass(frozen=True)
class Trace:
    """What `trace.py` left of one run, and the seconds from the start of the job to its end."""

    facts: dict[str, np.ndarray]
    wall: float

    def same(self, other: Trace) -> list[str]:
        """What differs, by name."""
        names = ("cohorts", "facts", "rows", "model")
        return [name for name in names if not np.array_equal(self.facts[f"{name}0"], other.facts[f"{name}0"])]

    def row(self, ranks: int, hosts: int, alone: Trace) -> str:
        """A row of the table."""
        seconds = self.facts["seconds0"]
        whole, busiest, plan, _, summed = 1e3 * np.median(seconds[WARM:], axis=0)
        others = 1e3 * np.median(seconds[WARM:, 0] - seconds[WARM:, 1])
        start, held = self.wall - seconds[:, 0].sum(), self.facts["held0"].sum() / 1e6
        same = "the same" if not self.same(alone) else "OTHER: " + ", ".join(self.same(alone))
        assert busiest <= whole * 1.01
        return (
            f"| {ranks} | {hosts} | {whole:.1f} | {others:.1f} | {plan:.1f} | {summed:.1f} | {start:.1f} | {held:.0f} "
            f"| {same} |"
        )


def traced(command: list[str], ranks: int, rounds: int, folder: Path) -> Trace:
    """One run; `command` is empty for one process, else the beginning of an mpiexec."""
    out = folder / f"{ranks}.npz"
    started = time.monotonic()
    words = [*command, *(["-n", str(ranks)] if command else []), sys.executable, str(TRACE), str(out)]
    job = finish_job(start_job([*words, f"{SETTINGS} rounds={rounds}"]), SECONDS)
    wall = time.monotonic() - started
    if job.returncode:
        raise SystemExit(f"{ranks} ranks ended with {job.returncode}:\n{job.stderr[-2000:]}")
    with np.load(out) as facts:
        return Trace(dict(facts), wall)


def compare(hosts: Hosts, ranks: list[int], rounds: int) -> int:
    """Print the table; the number of runs that differ from one rank's, or that did not fit into memory."""
    wrong = 0
    print(f"{HEAD}\n|{'---:|' * 8}---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="many-hosts-") as folder:
        alone = traced([], 1, rounds, Path(folder))
        print(alone.row(1, 1, alone), flush=True)
        for count in ranks:
            needed, free = count * BYTES_OF_A_RANK, psutil.virtual_memory().available
            if needed > free:
                print(f"{count} ranks need some {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free: left out", flush=True)
                wrong += 1
                continue
            trace = traced(hosts.command(-(-count // len(hosts.names))), count, rounds, Path(folder))
            print(trace.row(count, len(hosts.names), alone), flush=True)
            wrong += bool(trace.same(alone))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args()
    try:
        with emulated_hosts(asked.hosts) as hosts:
            return int(compare(hosts, asked.ranks, asked.rounds) > 0)
    except NoHosts as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
