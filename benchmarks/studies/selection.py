"""The table of client selection: run the sweeps of jobs/experiments/selection, and print them as Markdown.

    python -m benchmarks.studies.selection small --out runs/selection --csv selection.csv
    python -m benchmarks.studies.selection full --out runs/selection-full --jobs 8

Finished runs are not repeated. A table is one metric in one setting: a data set, a label distribution and a number of
clients per round. Its columns compare the samplers after equal rounds, at equal bytes, and at equal simulated seconds.
Equal bytes and seconds are SHARE of those that the first sampler spends in the same seed. Between two evaluations a
score is interpolated. A run that has ended before counts with its last score, marked by ≤. Values are means over seeds,
and differences from the first sampler are paired by seed. Their intervals are corrected for all comparisons of the
table (`fedmpi compare`). "ms" is the median time of a round, "choosing" the part of it that selects clients and
measures them for it.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fedmpi
from benchmarks.measure import table
from benchmarks.studies.paper_intervals import COLUMNS
from fedmpi.results.comparison import Difference, corrected, paired, spent
from fedmpi.results.loading import OneRun, read_runs

FILES = Path("jobs/experiments/selection")
SWEEPS = {"small": ("mnist-small", "cifar10-small"), "full": ("mnist", "femnist", "cifar10")}
METRICS = {"test_accuracy": "accuracy", "client_accuracy_worst10": "worst 10 %"}
AXES = {"round": "equal rounds", "megabytes": "equal bytes", "virtual_seconds": "equal seconds"}
SHARE = 0.5
CHOOSING = ("plan", "inquire")
"""Phases of a round that select clients and measure them for it."""
Samplers = dict[str, dict[int, OneRun]]
"""Runs of a setting by sampler and seed."""


def settings(places: Sequence[Path]) -> dict[str, Samplers]:
    """Return the finished runs by setting; the samplers in the order of the sweep."""
    found: dict[str, Samplers] = defaultdict(lambda: defaultdict(dict))
    for place in places:
        for run in (run for run in read_runs([place]) if run.ending == "finished"):
            setting = f"{place.name}, {run.labels['data.source']}, m = {run.table['clients.count']}"
            found[setting][str(run.labels["run"])][run.seed] = run
    return {setting: dict(runs) for setting, runs in found.items()}


def score(run: OneRun, metric: str, axis: str, budget: float) -> tuple[float, bool]:
    """Return the metric in percent when so much is spent on an axis, and whether the run had ended before."""
    scored = [place for place, record in enumerate(run.records) if record.get(metric) is not None]
    used, values = spent(run.records)[axis][scored], [run.records[place][metric] for place in scored]
    return 100 * float(np.interp(budget, used, values)), bool(used[-1] < budget * (1 - 1e-9))


def scores(runs: Samplers, metric: str) -> dict[tuple[str, str], tuple[list[float], bool]]:
    """Return the scores of each sampler and axis over the seeds that all samplers have."""
    first = next(iter(runs.values()))
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))
    found = {}
    for axis in AXES:
        share = 1.0 if axis == "round" else SHARE
        budgets = {seed: share * spent(first[seed].records)[axis][-1] for seed in seeds}
        for name, by_seed in runs.items():
            values = [score(by_seed[seed], metric, axis, budgets[seed]) for seed in seeds]
            found[name, axis] = [value for value, _ in values], any(ended for _, ended in values)
    return found


def milliseconds(runs: Samplers, name: str) -> list[str]:
    """Return the median time of a sampler's rounds, and of its choice, without first rounds."""
    records = [record for run in runs[name].values() for record in run.records[1:]]
    choosing = [sum(record["phase_seconds"].get(phase, 0.0) for phase in CHOOSING) for record in records]
    return [f"{1e3 * float(np.median(times)):.1f}" for times in ([r["seconds"] for r in records], choosing)]


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SWEEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/selection"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    places = [asked.out / name for name in SWEEPS[asked.size]]
    for place in places:
        fedmpi.sweep(FILES / f"{place.name}.toml", place, jobs=asked.jobs)
    lines: list[dict[str, object]] = []
    for setting, runs in settings(places).items():
        first, *others = runs
        for metric, words in METRICS.items():
            found = scores(runs, metric)
            pairs = {
                (name, axis): paired(found[name, axis][0], found[first, axis][0]) for name in others for axis in AXES
            }
            shown = {key: text(*found[key], None) for key in found if key[0] == first}
            for key, difference in zip(pairs, corrected(list(pairs.values())), strict=True):
                shown[key] = text(*found[key], difference)
            rows = [[name, *milliseconds(runs, name), *(shown[name, axis] for axis in AXES)] for name in runs]
            print(f"\n{setting}: {words}, n = {len(found[first, 'round'][0])}\n")
            print(table(["sampler", "ms", "choosing", *AXES.values()], rows))
            for (name, axis), (values, ended) in found.items():
                line = dict.fromkeys(COLUMNS, "") | {"table": f"{setting}: {words}", "row": name, "column": AXES[axis]}
                lines.append(
                    line | {"n": len(values), "value": f"{np.mean(values):.2f}", "sd": f"{np.std(values, ddof=1):.2f}"}
                )
                lines[-1]["note"] = "ended before" if ended else ""
                if (name, axis) in pairs:
                    one = pairs[name, axis]
                    limits = {"value": f"{one.mean:.2f}", "sd": "", "low": f"{one.low:.2f}", "high": f"{one.high:.2f}"}
                    lines.append(line | {"row": f"{name} minus {first}", "n": one.n, **limits})
    if asked.csv is not None:
        with open(asked.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


def text(values: Sequence[float], ended: bool, difference: Difference | None) -> str:
    """Return a cell: the mean over seeds, and the difference with its interval, bold if that excludes zero."""
    mean = f"{'≤ ' if ended else ''}{np.mean(values):.1f}"
    if difference is None:
        return mean
    interval = f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"
    return f"{mean}, **{interval}**" if difference.significant else f"{mean}, {interval}"


if __name__ == "__main__":
    main()
