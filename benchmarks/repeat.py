"""Repeat a table of runs over seeds and print mean ± standard deviation, one row a run, as Markdown:

    python -m benchmarks.repeat jobs/experiments/fedstas_mnist.toml --out runs/fedstas-mnist --reference FedSTS

The file names the seeds, the settings that all runs share and those of each run; {seed} stands for the seed. Every run
is `fedmpi train` in a process of its own; runs that have ended are not repeated. With a reference, two columns compare
every run with it over the last rounds: the mean of the differences per seed with its 95 % t interval, and the ratio of
the variances over seeds with the p of the F test (`fedmpi/results/intervals.py`).
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

from benchmarks.contestants import find_mpiexec
from fedmpi.results.intervals import paired, points, spread, spread_ratio

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

    @property
    def late(self) -> np.ndarray:
        """Accuracies measured in the last `LAST` rounds."""
        return self.accuracy[self.rounds > self.rounds[-1] - LAST]


Outcomes = dict[int, Outcome]
"""Of one system, by seed."""


def train(folder: Path, settings: list[str], ranks: int) -> None:
    """Run unless the folder holds a finished run."""
    if not finished(folder):
        launcher = [find_mpiexec(), "-n", str(ranks)] if ranks > 1 else []
        assignments = [part for setting in settings for part in ("--set", setting)]
        command = [*launcher, sys.executable, "-m", "fedmpi", "train", *assignments, "--out", str(folder), "--resume"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def finished(folder: Path) -> bool:
    """The folder holds a run that came to its end."""
    return (folder / "summary.json").exists()


def read(folder: Path, metric: str = "test_accuracy") -> Outcome:
    """The curve of a run, of its accuracy or of another score of its records that lies between 0 and 1."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if metric in record]
    return Outcome(
        np.array([record["round"] + 1 for record in records]),
        np.array([record[metric] for record in records]),
    )


def run_folder(out: Path, name: str, seed: int) -> Path:
    """Where the run of a table lies."""
    return out / f"{name.lower().replace(' ', '-').replace(',', '')}-{seed}"


def averaged(results: dict[str, Outcomes]) -> str:
    """How many evaluations the mean of the last rounds is of."""
    counts = sorted({len(one.late) for outcomes in results.values() for one in outcomes.values()})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def late_means(outcomes: Outcomes) -> dict[int, float]:
    """Mean accuracy over the last rounds, by seed."""
    return {seed: float(one.late.mean()) for seed, one in outcomes.items()}


def row(name: str, outcomes: Outcomes, reference: Outcomes | None) -> str:
    """One line of the table."""
    late = late_means(outcomes)
    final = [float(one.accuracy[-1]) for one in outcomes.values()]
    best = [float(one.accuracy.max()) for one in outcomes.values()]
    cells = [name, str(len(outcomes)), spread(final), spread(list(late.values())), spread(best)]
    if reference is not None:
        cells += compared(late, late_means(reference)) if reference is not outcomes else ["", ""]
    return f"| {' | '.join(cells)} |"


def compared(late: dict[int, float], reference: dict[int, float]) -> list[str]:
    """Difference and ratio of variances, over the seeds that both systems have."""
    shared = [seed for seed in late if seed in reference]
    if len(shared) < 2:
        return [f"{len(shared)} shared seeds", ""]
    ours, theirs = [late[seed] for seed in shared], [reference[seed] for seed in shared]
    spreads = ""
    if np.ptp(theirs) > 0:
        ratio = spread_ratio(ours, theirs)
        spreads = f"{ratio.ratio:.2f} (p = {ratio.p:.2g})"
    return [points(paired(ours, theirs)), spreads]


def table_of(results: dict[str, Outcomes], reference: str | None) -> str:
    """The whole table as Markdown."""
    heads = ["", "n", "final, %", f"mean of {averaged(results)} evaluations in the last {LAST} rounds, %"]
    heads.append("best round, %")
    if reference is not None:
        heads += [f"difference to {reference} over the last {LAST} rounds [95 %]", "ratio of variances to it (F test)"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    compared_with = results[reference] if reference is not None else None
    return "\n".join([*lines, *(row(name, outcomes, compared_with) for name, outcomes in results.items())])


def plot(results: dict[str, Outcomes], path: Path) -> None:
    """Mean curves, with the band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, outcomes in results.items():
        curves = np.stack([one.accuracy for one in outcomes.values()])
        mean, deviation = curves.mean(0), curves.std(0, ddof=min(1, len(curves) - 1))
        rounds = next(iter(outcomes.values())).rounds
        (line,) = axes.plot(rounds, mean, label=f"{name} (n = {len(curves)})")
        axes.fill_between(rounds, mean - deviation, mean + deviation, alpha=0.12, color=line.get_color())
    axes.set(xlabel="round", ylabel="test accuracy")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of every run")
    parser.add_argument("--only", nargs="*", default=[], metavar="RUN", help="names of the runs wanted")
    parser.add_argument("--seeds", nargs="*", type=int, help="other seeds than the table's")
    parser.add_argument("--reference", metavar="RUN", help="compare every run with this one, seed by seed")
    parser.add_argument("--finished", action="store_true", help="train nothing: tabulate the runs that have ended")
    parser.add_argument("--metric", default="test_accuracy", help="score of the records, e.g. test_macro_f1")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    parser.add_argument("--plot-only", nargs="*", default=[], metavar="RUN", help="names of the curves wanted")
    asked = parser.parse_args()
    table = tomllib.loads(asked.table.read_text())
    named = {*asked.only, *asked.plot_only, *([asked.reference] if asked.reference else [])}
    if unknown := named - set(table["runs"]):
        parser.error(f"{asked.table} has no run {', '.join(sorted(unknown))}: it has {', '.join(table['runs'])}")
    if asked.reference and asked.only and asked.reference not in asked.only:
        parser.error(f"the reference {asked.reference} is not among the runs of --only: add it there")
    results: dict[str, Outcomes] = {}
    for name, settings in table["runs"].items():
        for seed in asked.seeds or table["seeds"]:
            folder = run_folder(asked.out, name, seed)
            if asked.only and name not in asked.only:
                continue
            if not asked.finished:
                filled = [part.replace("{seed}", str(seed)) for part in (*table["common"], *settings)]
                train(folder, [f"seed={seed}", *filled], asked.ranks)
            if finished(folder):
                results.setdefault(name, {})[seed] = read(folder, asked.metric)
                print(f"{name}, seed {seed}: {results[name][seed].accuracy[-1]:.4f}", file=sys.stderr)
    if not results or (asked.reference and asked.reference not in results):
        parser.error(f"{asked.out} holds no finished run of {asked.reference or asked.table}: run it first")
    print(table_of(results, asked.reference))
    if asked.plot is not None:
        plot({name: results[name] for name in asked.plot_only or results}, asked.plot)


if __name__ == "__main__":
    main()
