"""Two ways beside each other, in turns in one run: another copy of the repository, or other settings.

    python -m benchmarks.beside W1 W2 W3 S4 S6 --other ../fedmpi-before      this copy against that one
    python -m benchmarks.beside W1 W2 --set local.algorithm=scaffold         those settings against the workload's own

A pass runs both, the first one first in odd passes and second in even ones; the ratio is taken within a pass. Printed
are the median of the passes and the lowest and highest. W1 and W2 name the batched engine: a trial by time could choose
differently in the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_run, settings
from benchmarks.measure import run_tree
from benchmarks.workloads import WARM_UP, WORKLOADS, Workload, prepare


def seconds_a_round(keys: dict[str, object], ranks: int, tree: Path, out: Path) -> float:
    """Median seconds of the rounds of one run, those of warming up left out."""
    out.mkdir(parents=True)
    command = fedmpi_command(ranks, keys, out)
    run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}, tree)
    return float(statistics.median(read_run(out)["seconds"][WARM_UP:]))


def ratios(workload: Workload, asked: argparse.Namespace, data: Path, work: Path) -> list[tuple[float, float]]:
    """Seconds of a round of the one and of the other, pass by pass."""
    prepare(workload, data)
    engine = {"local.engine": "batched"} if workload.name in ("W1", "W2") else {}
    own = {**settings(workload, data), **engine}
    other = {**own, **dict(word.split("=", 1) for word in asked.set)}
    pairs = []
    for number in range(asked.passes):
        ways = [("one", own, REPOSITORY), ("other", other, asked.other or REPOSITORY)]
        found = {}
        for name, keys, tree in ways if number % 2 == 0 else reversed(ways):
            found[name] = seconds_a_round(keys, asked.ranks, tree, work / f"{workload.name}-{number}-{name}")
        pairs.append((found["one"], found["other"]))
        print(
            f"pass {number + 1}  {workload.name}  {1e3 * found['one']:.1f}  {1e3 * found['other']:.1f} ms",
            file=sys.stderr,
            flush=True,
        )
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS])
    parser.add_argument("--other", type=Path, help="another copy of the repository")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the other")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    what = str(asked.other or " ".join(asked.set))
    print(f"| {asked.ranks} ranks | this, ms a round | {what}, ms a round | that / this (lowest to highest pass) |")
    print("|---|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.workloads:
            workload = WORKLOADS[name]
            pairs = ratios(workload, asked, Path(folder) / "data", Path(folder) / "work")
            one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            shares = sorted(b / a for a, b in pairs)
            spread = f"{statistics.median(shares):.3f} ({shares[0]:.3f} to {shares[-1]:.3f})"
            print(f"| {name} | {1e3 * one:.1f} | {1e3 * other:.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
