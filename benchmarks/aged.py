"""Check that late rounds of a long run are as fast as early ones, by alternating an old and a young run.

    python -m benchmarks.aged --rounds 2000 --pairs 500

The old run is --rounds old when the measurement starts, and the young run starts then. Every client is selected in each
round, so a round is the same work at any age. The two alternate, ten rounds each, and never compute at the same time,
so that disturbances of the machine affect both. Prints the ratio of the old run's CPU time per round to the young
run's, with its 95 % confidence interval over the turns. Also prints the Python calls (functions, methods and built-in
ones) per round of each, which no machine disturbs. Exits with 1 if the ratio's interval or the calls are outside
--margin.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from scipy.stats import t as student

import fedmpi
from fedmpi.common.types import Floats

TURN = 10
"""Rounds per turn: as many as `evaluation.every` and `checkpoint.every`, so that each turn has one of each."""
WARM = 3
"""Turns before the timed ones, in which the young run imports, benchmarks engines and fills caches."""
COUNTED = 2
"""Turns after the timed ones, in which calls are counted; counting itself takes time."""
SETTINGS = {
    "data.source": "digits:clients=10,alpha=1",
    "clients.sampler": "all",
    "local.batch_size": 40,
    "evaluation.every": TURN,
    "checkpoint.every": TURN,
    "local.engine": "sequential",
    "cluster.threads": 1,
    "logging.tensorboard": False,
}


class Turns:
    """Callback per round: waits for a message before each turn, sends measurements, and stops after the last turn."""

    def __init__(self, before: int, turns: int, connection: Connection):
        self.before, self.last, self.connection = before, before + TURN * turns, connection
        self.asked, self.calls, self.now = 0, 0, 0.0
        self.spent: list[float] = []

    def __call__(self) -> bool:
        sys.setprofile(None)
        if self.asked > self.before:
            self.spent.append(1e3 * (time.process_time() - self.now))
        if self.asked >= self.before and (self.asked - self.before) % TURN == 0:
            if self.asked > self.before:
                self.connection.send(([*self.spent], self.calls / TURN))
            if self.asked == self.last:
                return True
            self.connection.recv()
            self.calls, self.spent = 0, []
        self.asked += 1
        if self.asked > self.last - TURN * COUNTED:
            sys.setprofile(self._count)
        self.now = time.process_time()
        return False

    def _count(self, frame: object, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


def trained(folder: Path, before: int, turns: int, connection: Connection) -> None:
    """Train a run in a process of its own: `before` rounds alone, then `turns` turns."""
    rounds = before + TURN * turns + 1
    fedmpi.run("fedavg", {**SETTINGS, "rounds": rounds}, out=folder, stop=Turns(before, turns, connection))


def measured(rounds: int, turns: int) -> tuple[Floats, Floats]:
    """Measure each round of the old run, `rounds` old at the start, and of the young run."""
    spawn, every = multiprocessing.get_context("spawn"), WARM + turns + COUNTED
    times, calls = np.zeros((every, TURN, 2)), np.zeros((every, 2))
    with tempfile.TemporaryDirectory(prefix="fedmpi-aged-") as folder:
        runs = []
        for name, before in (("old", rounds), ("young", 0)):
            here, there = spawn.Pipe()
            process = spawn.Process(target=trained, args=(Path(folder) / name, before, every, there), daemon=True)
            process.start()
            there.close()
            runs.append((process, here))
        for turn in range(every):
            for run in (0, 1) if turn % 2 else (1, 0):
                runs[run][1].send(None)
                times[turn, :, run], calls[turn, run] = runs[run][1].recv()
        for process, here in runs:
            here.close()
            process.join()
    return times[WARM:-COUNTED], calls[-COUNTED:].mean(axis=0)


def ratio(times: Floats, level: float = 0.95) -> tuple[float, float, float]:
    """Return the ratio of the old run's time to the young run's, and its interval.

    Each turn counts by the median over its rounds, so that short disturbances have no effect. The ratio is the
    geometric mean over the turns, with the 95 % confidence interval (paired t).
    """
    turns = np.median(np.log(times[..., 0] / times[..., 1]), axis=1)
    half = student.ppf((1 + level) / 2, len(turns) - 1) * turns.std(ddof=1) / np.sqrt(len(turns))
    mean = turns.mean()
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="age of the old run when measuring begins (2000)")
    parser.add_argument("--pairs", type=int, default=500, help="rounds of each run that are measured (500)")
    parser.add_argument("--margin", type=float, default=2.0, help="per cent (2)")
    asked = parser.parse_args(words)
    allowed = asked.margin / 100
    times, (old, young) = measured(asked.rounds, asked.pairs // TURN)
    mean, least, most = ratio(times)
    ages = f"a round after {asked.rounds} to one after {TURN * WARM}"
    print(f"processor's time of {ages}: {mean:.4f} ({least:.4f} to {most:.4f})")
    print(f"calls in {ages}: {old:.1f} to {young:.1f}")
    within = 1 - allowed <= least and most <= 1 + allowed and abs(old / young - 1) <= allowed
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
