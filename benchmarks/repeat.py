"""Repeat a table of runs over seeds and print mean ± standard deviation, one row a run, as Markdown:

    python -m benchmarks.repeat jobs/experiments/fedstas_mnist.toml --out runs/fedstas-mnist --plot curves.png

The file names the seeds, the settings that all runs share and those of each run; {seed} stands for the seed. Every run
is `fedmpi train` in a process of its own; runs that have ended are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LAST = 10


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Attributes
    ----------
    rounds : int64 (r,)
        Rounds with an evaluation.
    accuracy : float64 (r,)
        Test accuracy after each of them.
    """

    rounds: np.ndarray
    accuracy: np.ndarray


def train(folder: Path, settings: list[str], ranks: int) -> Outcome:
    """Run unless the folder holds a finished run; returns the curve."""
    if not (folder / "summary.json").exists():
        launcher = ["mpiexec", "-n", str(ranks)] if ranks > 1 else []
        assignments = [part for setting in settings for part in ("--set", setting)]
        command = [*launcher, sys.executable, "-m", "fedmpi", "train", *assignments, "--out", str(folder), "--resume"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "test_accuracy" in record]
    return Outcome(
        np.array([record["round"] + 1 for record in records]),
        np.array([record["test_accuracy"] for record in records]),
    )


def spread(values: list[float]) -> str:
    """Mean ± sample standard deviation, in per cent."""
    return (
        f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}" if len(values) > 1 else f"{values[0]:.2%}"
    )


def row(name: str, outcomes: list[Outcome]) -> str:
    """One line of the table."""
    final = [float(one.accuracy[-1]) for one in outcomes]
    late = [float(one.accuracy[one.rounds > one.rounds[-1] - LAST].mean()) for one in outcomes]
    best = [float(one.accuracy.max()) for one in outcomes]
    return f"| {name} | {spread(final)} | {spread(late)} | {spread(best)} |"


def plot(results: dict[str, list[Outcome]], path: Path) -> None:
    """Mean curves, with the band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, outcomes in results.items():
        curves = np.stack([one.accuracy for one in outcomes])
        mean, deviation = curves.mean(0), curves.std(0)
        (line,) = axes.plot(outcomes[0].rounds, mean, label=name)
        axes.fill_between(outcomes[0].rounds, mean - deviation, mean + deviation, alpha=0.12, color=line.get_color())
    axes.set(xlabel="round", ylabel="test accuracy")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of every run")
    parser.add_argument("--only", nargs="*", default=[], metavar="RUN", help="names of the runs wanted")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    parser.add_argument("--plot-only", nargs="*", default=[], metavar="RUN", help="names of the curves wanted")
    asked = parser.parse_args()
    table = tomllib.loads(asked.table.read_text())
    unknown = {*asked.only, *asked.plot_only} - set(table["runs"])
    if unknown:
        parser.error(f"{asked.table} has no run {', '.join(sorted(unknown))}: it has {', '.join(table['runs'])}")
    print(f"| {len(table['seeds'])} seeds | final accuracy, % | mean of the last {LAST} rounds, % | best round, % |")
    print("|---|---|---|---|")
    results: dict[str, list[Outcome]] = {}
    for name, settings in table["runs"].items():
        if asked.only and name not in asked.only:
            continue
        results[name] = []
        for seed in table["seeds"]:
            filled = [part.replace("{seed}", str(seed)) for part in (*table["common"], *settings)]
            folder = asked.out / f"{name.lower().replace(' ', '-').replace(',', '')}-{seed}"
            results[name].append(train(folder, [f"seed={seed}", *filled], asked.ranks))
        print(row(name, results[name]), flush=True)
    if asked.plot is not None:
        plot({name: results[name] for name in asked.plot_only or results}, asked.plot)


if __name__ == "__main__":
    main()
