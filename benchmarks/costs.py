"""What it cost the runs of a table to reach a test accuracy, one row a run, as Markdown (Astraea, Table III):

    python -m benchmarks.costs jobs/experiments/astraea_mnist.toml --runs runs/astraea-mnist --target 0.9

The runs are those that `python -m benchmarks.repeat` made. Rounds and megabytes are those up to the first evaluation
that reached the target; runs that never did are counted. KL is the mean over all rounds of the mediators' mean
divergence from equal classes, or, without mediators, blank.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.repeat import finished, run_folder
from fedmpi.records.history import LINKS
from fedmpi.results.intervals import spread
from fedmpi.updates.traffic import MEGABYTE, TargetCost, cost_to_target

Record = dict[str, Any]


def read_records(folder: Path) -> list[Record]:
    """The records of a finished run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def round_bytes(record: Record) -> int:
    """Bytes on all links of a round."""
    return sum(int(record.get(f"bytes_{link}", 0)) for link in LINKS)


def cost(records: list[Record], target: float) -> TargetCost | None:
    """Rounds and megabytes to the target."""
    return cost_to_target(
        [record.get("test_accuracy") for record in records], [round_bytes(record) for record in records], target
    )


def mean_and_range(values: list[float], digits: int) -> str:
    """Mean, and in brackets the smallest and largest value."""
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def row(name: str, runs: list[list[Record]], target: float) -> str:
    """One line of the table."""
    reached = [found for found in (cost(records, target) for records in runs) if found is not None]
    sent = np.mean([sum(map(round_bytes, records)) / len(records) for records in runs]) / MEGABYTE
    divergences = [float(np.mean([r["kl_mean"] for r in records])) for records in runs if "kl_mean" in records[0]]
    last = [[r["test_accuracy"] for r in records if "test_accuracy" in r][-1] for records in runs]
    cells = [
        spread(last),
        f"{np.mean(divergences):.3f}" if divergences else "",
        f"{sent:.1f}",
        mean_and_range([found.rounds for found in reached], 0) if reached else "never",
        mean_and_range([found.megabytes for found in reached], 0) if reached else "never",
        f"{len(reached)} of {len(runs)}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--target", type=float, required=True, help="test accuracy to reach")
    asked = parser.parse_args()
    table = tomllib.loads(asked.table.read_text())
    print(f"| | final accuracy, % | KL | MB a round | rounds to {asked.target} | MB to {asked.target} | reached |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in table["runs"]:
        folders = [run_folder(asked.runs, name, seed) for seed in table["seeds"]]
        done = [read_records(folder) for folder in folders if finished(folder)]
        if done:
            print(row(name, done, asked.target))


if __name__ == "__main__":
    main()
