"""Compare two variants in alternation: another copy of the repository, or other settings.

    python -m benchmarks.beside W1 W2 W3 S4 S6 --other ../fedmpi-before      this copy against that one
    python -m benchmarks.beside W1 W2 --set local.algorithm=scaffold         those settings against the workload's own
    python -m benchmarks.beside residual lstm --other ../fedmpi-before       single models (`benchmarks.workloads`)

A pass runs both variants, in alternating order, and the ratio is taken within a pass. The output shows the median,
lowest and highest ratio of the passes. On a machine of varying speed the last column is more reliable. It is the ratio
of the fast rounds, the lowest tenth of all rounds of all passes, with a 95 % bootstrap interval (percentiles over
passes). W1 and W2 set the batched engine, since the engine benchmark could choose different engines for the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_run, settings
from benchmarks.measure import run_tree
from benchmarks.workloads import MODELS, OWN, WARM_UP, WORKLOADS, Workload, prepare

ALL = WORKLOADS | MODELS | OWN
FAST = 0.1
"""Share of the rounds that count as fast."""


def seconds_of_rounds(keys: dict[str, object], ranks: int, tree: Path, out: Path) -> list[float]:
    """Return the seconds of the rounds of one run, without warm-up rounds."""
    out.mkdir(parents=True)
    command = fedmpi_command(ranks, keys, out)
    run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}, tree)
    return [float(seconds) for seconds in read_run(out)["seconds"][WARM_UP:]]


def measured(
    workload: Workload, asked: argparse.Namespace, data: Path, work: Path
) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of the rounds of both variants, pass by pass."""
    prepare(workload, data)
    engine = {"local.engine": "batched"} if workload.name in ("W1", "W2") else {}
    own = {**settings(workload, data), **engine, **dict(word.split("=", 1) for word in asked.both)}
    other = {**own, **dict(word.split("=", 1) for word in asked.set)}
    pairs = []
    for number in range(asked.passes):
        ways = [("one", own, REPOSITORY), ("other", other, asked.other or REPOSITORY)]
        found = {}
        for name, keys, tree in ways if number % 2 == 0 else reversed(ways):
            found[name] = seconds_of_rounds(keys, asked.ranks, tree, work / f"{workload.name}-{number}-{name}")
        pairs.append((found["one"], found["other"]))
        first, second = (1e3 * statistics.median(rounds) for rounds in pairs[-1])
        print(f"pass {number + 1}  {workload.name}  {first:.1f}  {second:.1f} ms", file=sys.stderr, flush=True)
    return pairs


def fast_ratio(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    """Return the ratio of the seconds of fast rounds: the quantile `FAST` of all rounds of each variant."""
    one, other = (np.quantile(np.concatenate(rounds), FAST) for rounds in zip(*pairs, strict=True))
    return float(other / one)


def bootstrap(pairs: Sequence[tuple[list[float], list[float]]], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of `fast_ratio`: percentiles over passes resampled with replacement."""
    generator = np.random.default_rng(0)
    drawn = [fast_ratio([pairs[i] for i in generator.integers(0, len(pairs), len(pairs))]) for _ in range(draws)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*ALL])
    parser.add_argument("--other", type=Path, help="another copy of the repository")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the other")
    parser.add_argument("--both", action="append", default=[], metavar="KEY=VALUE", help="settings of both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    what = str(asked.other or " ".join(asked.set))
    columns = ("this, ms a round", f"{what}, ms a round", "that / this (lowest to highest pass)", "fast rounds")
    print(f"| {asked.ranks} ranks | {' | '.join(columns)} |")
    print("|---|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.workloads:
            workload = ALL[name]
            pairs = measured(workload, asked, Path(folder) / "data", Path(folder) / "work")
            medians = [(statistics.median(one), statistics.median(other)) for one, other in pairs]
            one, other = (statistics.median(column) for column in zip(*medians, strict=True))
            shares = sorted(b / a for a, b in medians)
            spread = f"{statistics.median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})"
            low, high = bootstrap(pairs)
            fast = f"{fast_ratio(pairs):.3f} [{low:.3f}, {high:.3f}]"
            print(f"| {name} | {1e3 * one:.1f} | {1e3 * other:.1f} | {spread} | {fast} |", flush=True)


if __name__ == "__main__":
    main()
