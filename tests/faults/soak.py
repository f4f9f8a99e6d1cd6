"""Thousands of rounds on several ranks over hosts that this machine emulates, killed at random and resumed each time.

    python -m tests.faults.soak --rounds 2000 --ranks 8 --hosts 2 --kills 20

Takes root. A process of the job (a rank, mpiexec, a host's proxy) dies by signal 9 at random rounds, and the next start
resumes. Sums are exact: model and participants must be those of one process that nobody disturbs. Printed besides: what
the ranks hold in memory at the end of each start against after its first rounds, and how long rounds take.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests.end_to_end.runs import TRAIN, Record, choices, records
from tests.faults.kills import Report, kill_one, members_of, recorded
from tests.mpi.hosts import NoHosts, emulated_hosts
from tests.mpi.launch import Job, finish_job, start_job

SETTINGS = (
    "preset=fedavg",
    "data.shards=digits:clients=32",
    "participation.count=8",
    "model.hidden=[32]",
    "cluster.threads=1",
    "aggregation.exact=true",
    "aggregation.optimizer=adam",
    "aggregation.lr=0.01",
    "transport.kind=topk",
    "transport.fraction=0.1",
    "transport.error_feedback=true",
    "evaluation.every=50",
    "checkpoint.every=20",
    "logging.tensorboard=false",
)
COMPARED = ("round", "participants", "samples", "steps", "test_accuracy")
SETTLED = 100
"""Rounds of a start after which memory is held to stay what it is: caches are full, buffers made."""
MARGIN = 0.02
SECONDS = 36000


@dataclass
class Memory:
    """Resident bytes of the ranks over the rounds."""

    # (int, int): For every start of the job and rank: rounds recorded, and bytes
    starts: list[dict[str, list[tuple[int, int]]]] = field(default_factory=list)

    def watch(self, job: Job, run: Path) -> None:
        """Look at the ranks every other second until the job ends."""
        held: dict[str, list[tuple[int, int]]] = {}
        self.starts.append(held)
        while job.poll() is None:
            rounds = recorded(run)
            for name, process in members_of(job).items():
                try:
                    if name.startswith("rank"):
                        held.setdefault(name, []).append((rounds, process.memory_info().rss))
                except psutil.Error:
                    continue
            time.sleep(2)

    def growth(self) -> list[float]:
        """Of all ranks and starts that went on for long enough: memory at the end over that after the first rounds."""
        return [
            last / settled
            for held in self.starts
            for looks in held.values()
            for settled, last in [(_settled(looks), looks[-1][1])]
            if settled
        ]


def _settled(looks: Sequence[tuple[int, int]]) -> int:
    """The first look at least `SETTLED` rounds after the start began to record; 0 if it has not come twice as far."""
    after = [held for rounds, held in looks if rounds >= looks[0][0] + SETTLED]
    return after[0] if after and looks[-1][0] >= looks[0][0] + 2 * SETTLED else 0


def start(run: Path, rounds: int, command: Sequence[str]) -> Job:
    """Start or resume; `command` is what stands before Python."""
    words = [*TRAIN, *choices(*SETTINGS, f"rounds={rounds}"), "--out", str(run), "--resume"]
    return start_job([*command, sys.executable, *words])


def tortured(run: Path, rounds: int, command: Sequence[str], kills: int, dice: random.Random) -> tuple[Report, Memory]:
    """A run killed at so many rounds, and then left to its end."""
    report, memory = Report(runs=1), Memory()
    for target in [*sorted(dice.sample(range(1, rounds), kills)), None]:
        job = start(run, rounds, command)
        watcher = threading.Thread(target=memory.watch, args=(job, run))
        watcher.start()
        if target is None:
            ended = finish_job(job, SECONDS)
            if ended.returncode:
                report.wrong.append(f"ended with {ended.returncode}: {ended.stderr[-1000:]}")
        else:
            while job.poll() is None and recorded(run) < target:
                time.sleep(0.02)
            kill_one(job, run, dice, report)
            print(f"killed at round {report.rounds[-1]}: {dict(report.kills)}", flush=True)
        watcher.join()
    return report, memory


def seconds_by_part(found: Sequence[Record], parts: int = 5) -> list[float]:
    """Median seconds of a round in each part of the run, one after another."""
    seconds = np.array([record["seconds"] for record in found])
    return [float(np.median(part)) for part in np.array_split(seconds, parts)]


def soak(folder: Path, rounds: int, ranks: int, hosts: int, kills: int, seed: int) -> int:
    """Run both and print what was found; 1 if the results differ or memory grows."""
    alone, run = folder / "ALONE", folder / "RUN"
    with emulated_hosts(hosts) as places:
        job = finish_job(start(alone, rounds, []), SECONDS)
        if job.returncode:
            raise SystemExit(f"the run of one process failed: {job.stderr[-1000:]}")
        command = [*places.command(-(-ranks // hosts)), "-n", str(ranks)]
        report, memory = tortured(run, rounds, command, kills, random.Random(seed))
    print(report)
    one, many = records(alone), records(run)
    facts = [[[record.get(key) for key in COMPARED] for record in found] for found in (one, many)]
    if facts[0] != facts[1]:
        report.wrong.append("participants, samples or accuracies differ from those of one process")
    if (alone / "model.safetensors").read_bytes() != (run / "model.safetensors").read_bytes():
        report.wrong.append("the model differs from that of one process")
    growth = memory.growth()
    if growth:
        print(f"memory at the end of a start over that after {SETTLED} rounds, {len(growth)} ranks of starts: ", end="")
        print(f"{min(growth):.4f} to {max(growth):.4f}, median {np.median(growth):.4f}")
        if max(growth) > 1 + MARGIN:
            report.wrong.append(f"memory grew by {max(growth) - 1:.1%}")
    fifths = ", ".join(f"{1e3 * seconds:.1f}" for seconds in seconds_by_part(many))
    print(f"milliseconds a round in each fifth of the {rounds} rounds: {fifths}")
    print(f"model, participants, samples, accuracies of {len(many)} rounds: {report.wrong or 'those of one process'}")
    return int(bool(report.wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            return soak(Path(folder), asked.rounds, asked.ranks, asked.hosts, asked.kills, asked.seed)
    except NoHosts as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
