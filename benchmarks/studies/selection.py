"""The table of client selection: run the sweeps of jobs/experiments/selection, and print them as Markdown.

    python -m benchmarks.studies.selection medium --out runs/selection --csv selection.csv
    python -m benchmarks.studies.selection full --out runs/selection-full --jobs 8

Finished runs are not repeated. Each column of a table is a setting: a data set, a label distribution and a number of
clients per round. The tables compare the samplers after equal rounds, at equal bytes, and at equal simulated seconds.
Equal bytes and seconds are SHARE of those that the REFERENCE spends with the same seed. Scores between two evaluations
are interpolated. If a run ended earlier, its last score counts, marked by ≥. Values are means over seeds. Differences
from the REFERENCE are paired by seed. Their intervals are corrected for all comparisons of a metric in a setting
(`fedmpi compare`). A sampler that equals the REFERENCE with all seeds has no interval.

The target is the accuracy of the REFERENCE after SHARE of its rounds. Further tables show the rounds, bytes and seconds
until a run first reaches it, divided by those of the REFERENCE, as geometric means. A run that never reaches it counts
with its whole cost. ≥ marks samplers with such a run; their ratios below 1 are never bold.

The last table shows the mean time of a round, and of client selection with its measurements. These short runs are
sequential, so they do not disturb each other.
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
from benchmarks.studies.paper_intervals import COLUMNS, Row, correct
from fedmpi.common.types import Floats
from fedmpi.results.comparison import paired, spent
from fedmpi.results.loading import OneRun, read_runs

FILES = Path("jobs/experiments/selection")
SWEEPS = {
    "small": ("mnist-small",),
    "medium": ("mnist-small", "mnist-small-100", "cifar10-small", "cifar10-small-100"),
    "full": ("mnist", "femnist", "cifar10"),
}
TARGET = "target"
METRICS = {
    "test_accuracy": "accuracy at equal",
    "client_accuracy_worst10": "worst 10 % at equal",
    TARGET: "cost of the target in",
}
AXES = {"round": "rounds", "megabytes": "bytes", "virtual_seconds": "seconds"}
REFERENCE, SHARE = "uniform", 0.5
VERSUS, ENDED = f"against {REFERENCE}", "ended before"
CHOOSING = ("plan", "inquire")
"""Phases of a round that select clients and measure them for it."""
COST = "cost"
"""Sweep that measures the cost of client selection."""
Samplers = dict[str, dict[int, OneRun]]
"""Runs of a setting by sampler and seed."""


def settings(places: Sequence[Path]) -> dict[str, Samplers]:
    """Return the finished runs by setting and sampler, the reference first."""
    found: dict[str, Samplers] = defaultdict(lambda: defaultdict(dict))
    for place in places:
        for run in (run for run in read_runs([place]) if run.ending == "finished"):
            setting = f"{place.name.partition('-')[0]}, {run.labels['data.source']}, m = {run.table['clients.count']}"
            found[setting][str(run.labels["run"])][run.seed] = run
    return {setting: {REFERENCE: runs[REFERENCE], **runs} for setting, runs in found.items()}


def curve(run: OneRun, metric: str, axis: str) -> tuple[Floats, Floats]:
    """Return what was spent on an axis at each evaluation, and the metric in percent, (e,) each."""
    scored = [place for place, record in enumerate(run.records) if record.get(metric) is not None]
    return spent(run.records)[axis][scored], 100 * np.array([run.records[place][metric] for place in scored])


def score(run: OneRun, metric: str, axis: str, budget: float) -> tuple[float, bool]:
    """Return the metric in percent when so much is spent on an axis, and whether the run had ended before."""
    used, values = curve(run, metric, axis)
    return float(np.interp(budget, used, values)), bool(used[-1] < budget * (1 - 1e-9))


def passage(run: OneRun, axis: str, target: float) -> tuple[float, bool]:
    """Return what is spent on an axis when the accuracy first reaches the target, and whether it never does."""
    used, values = curve(run, "test_accuracy", axis)
    best = np.maximum.accumulate(values)
    return float(np.interp(target, best, used)), bool(best[-1] < target)


def common_seeds(runs: Samplers) -> list[int]:
    return sorted(set.intersection(*(set(by_seed) for by_seed in runs.values())))


def scores(runs: Samplers, metric: str) -> dict[tuple[str, str], tuple[list[float], bool]]:
    """Return the scores of each sampler and axis over the seeds that all samplers have."""
    first = runs[REFERENCE]
    seeds = common_seeds(runs)
    found = {}
    for axis in AXES:
        share = 1.0 if axis == "round" else SHARE
        budgets = {seed: share * spent(first[seed].records)[axis][-1] for seed in seeds}
        for name, by_seed in runs.items():
            values = [score(by_seed[seed], metric, axis, budgets[seed]) for seed in seeds]
            found[name, axis] = [value for value, _ in values], any(ended for _, ended in values)
    return found


def passages(runs: Samplers) -> dict[tuple[str, str], tuple[list[float], bool]]:
    """Return the logarithm of what each sampler spends on each axis until the target, relative to the reference."""
    first, found = runs[REFERENCE], {}
    half = {seed: score(first[seed], "test_accuracy", "round", SHARE * len(first[seed].records))[0] for seed in first}
    for axis in AXES:
        usual = {seed: passage(first[seed], axis, half[seed])[0] for seed in first}
        for name, by_seed in runs.items():
            values = {seed: passage(by_seed[seed], axis, half[seed]) for seed in common_seeds(runs)}
            logarithms = [float(np.log(value / usual[seed])) for seed, (value, _) in values.items()]
            found[name, axis] = logarithms, any(never for _, never in values.values())
    return found


def costs(place: Path) -> str:
    """Return the table of the cost of client selection, without the first round and the last, which is evaluated."""
    by_setting = settings([place])
    rows: dict[str, list[object]] = defaultdict(list)
    for runs in by_setting.values():
        for name, by_seed in runs.items():
            records = [record for run in by_seed.values() for record in run.records[1:-1]]
            choosing = [sum(record["phase_seconds"].get(phase, 0.0) for phase in CHOOSING) for record in records]
            rows[name] += [
                f"{1e3 * float(np.mean(times)):.1f}" for times in ([r["seconds"] for r in records], choosing)
            ]
    counts = [setting.rpartition(", ")[2] for setting in by_setting]
    heads = [f"{count}: {words}, ms" for count in counts for words in ("round", "choosing")]
    return table(["sampler", *heads], [[name, *cells] for name, cells in rows.items()])


def lines_of(setting: str, runs: Samplers) -> list[Row]:
    """Return the rows of the data file of a setting, not corrected."""
    lines = []
    for metric, words in METRICS.items():
        ratio = metric == TARGET
        values = passages(runs) if ratio else scores(runs, metric)
        for (name, axis), (one, ended) in values.items():
            line = dict.fromkeys(COLUMNS, "") | {"table": f"{setting}: {words}", "row": name, "column": AXES[axis]}
            line |= {"n": str(len(one)), "note": ENDED if ended else ""}
            mean, deviation = float(np.mean(one)), float(np.std(one, ddof=1))
            lines.append(
                line | {"value": f"{np.exp(mean) if ratio else mean:.2f}", "sd": f"{deviation:.2f}" * (not ratio)}
            )
            pair = paired(one, values[REFERENCE, axis][0])
            if pair.error > 0:
                numbers = {"value": pair.mean, "low": pair.low, "high": pair.high}
                texts = {key: f"{np.exp(number) if ratio else number:.2f}" for key, number in numbers.items()}
                lines.append(line | {"row": f"{name} {VERSUS}", "scale": "ratio" if ratio else ""} | texts)
    return lines


def cell(lines: list[Row], of: str, name: str, axis: str) -> str:
    """Return a score, and its difference from the reference with its interval, bold if that excludes zero (or one)."""
    found = {line["row"]: line for line in lines if line["table"] == of and line["column"] == axis}
    score, difference = found[name], found.get(f"{name} {VERSUS}")
    mark = "≥ " if score["note"] else ""
    if difference is None:
        return mark + score["value"]
    ratio = difference["scale"] == "ratio"
    value, low, high = (
        difference[key] if ratio else f"{float(difference[key]):+.2f}".replace("-", "−")
        for key in ("value", "corrected_low", "corrected_high")
    )
    interval = f"{value} [{low}, {high}]"
    cheaper = bool(mark) and ratio and float(value) < 1  # no evidence: a run has not reached the target
    interval = f"**{interval}**" if difference["significant"] == "yes" and not cheaper else interval
    return mark + (interval if ratio else f"{score['value']}, {interval}")


def names(found: dict[str, Samplers]) -> list[str]:
    return [*next(iter(found.values()))]


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
    fedmpi.sweep(FILES / f"{COST}.toml", asked.out / COST, jobs=1)
    found = settings(places)
    lines = [line for setting, runs in found.items() for line in lines_of(setting, runs)]
    correct([line for line in lines if line["low"]])
    for words in METRICS.values():
        for axis in AXES.values():
            shown = {
                name: [cell(lines, f"{setting}: {words}", name, axis) for setting in found] for name in names(found)
            }
            print(f"\n{words} {axis}\n")
            print(table(["sampler", *found], [[name, *cells] for name, cells in shown.items()]))
    print(f"\ncost of client selection\n\n{costs(asked.out / COST)}")
    if asked.csv is not None:
        with open(asked.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
