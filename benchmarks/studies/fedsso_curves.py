"""FedSSO's curves, as Markdown: the decrease of the excess loss by local steps E, or the fluctuation between rounds.

    python -m benchmarks.studies.fedsso_curves rate runs/fedsso-rate
    python -m benchmarks.studies.fedsso_curves fluctuation runs/fedsso-fig3

`rate` needs the runs of jobs/experiments/fedsso-rate.toml and the data of that sweep. Excess is the recorded objective
minus its minimum, in thousandths. T counts local steps. The slope is that of log excess over log T from T = 100 on: −1
for O(1/T). `fluctuation` needs those of fedsso-fig3-small.toml. A run's fluctuation is the standard deviation of the
change of its metric between consecutive evaluations, over the last half of its evaluations. Values are mean ± standard
deviation over seeds, with the ratio to the first row and its 95 % confidence interval (paired t).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import table
from fedmpi.common.types import Floats
from fedmpi.results.comparison import paired
from jobs.experiments.mnist_parity import minimum, parity

Records = list[dict[str, Any]]
STEPS = (1, 2, 5, 10, 20, 50)
TOTAL, ROUNDS, FROM = 2000, 40, 100
PARTITIONS = {"random": "random digits", "one": "one digit per client"}
SETS = ("MNIST-non-IID", "MNIST-non-IID2")
METHODS = ("FedAvg", "FedSSO-constant-rate", "FedSSO")
METRICS = ("train_loss", "test_loss", "test_accuracy")


def read(folder: Path, name: str) -> dict[int, Records]:
    """Return the records of the finished runs `name`,seed=S, by seed."""
    runs = sorted(run.parent for run in folder.glob(f"{name},*seed=*/summary.json"))
    lines = {int(run.name.rpartition("=")[2]): (run / "metrics.jsonl").read_text().splitlines() for run in runs}
    return {seed: [json.loads(line) for line in one] for seed, one in lines.items()}


def excess(records: Records, steps: int, least: float) -> list[float]:
    """Return the excess after TOTAL local steps and after ROUNDS rounds, and the slope."""
    curve: Floats = np.array([(steps * (r["round"] + 1), r["test_loss"] - least) for r in records if "test_loss" in r])
    t, above = curve.T
    slope = np.polyfit(np.log(t[t >= FROM]), np.log(above[t >= FROM]), 1)[0]
    return [*(1e3 * np.interp((TOTAL, ROUNDS * steps), t, above)), slope]


def fluctuation(records: Records) -> list[float]:
    """Return the standard deviation of the steps of each metric in the last half of the evaluations."""
    curves = [np.array([record[metric] for record in records if metric in record]) for metric in METRICS]
    return [float(np.diff(curve[len(curve) // 2 :]).std(ddof=1)) for curve in curves]


def rows(
    folder: Path, names: Mapping[str, str], value: Callable[[str, int, Records], list[float]], compared: int
) -> list[list[str]]:
    """Return one row per name: every value, and for the first `compared` ones the ratio to the first name."""
    found = {name: {s: value(name, s, records) for s, records in read(folder, name).items()} for name in names}
    first, lines = next(iter(found.values())), []
    for name, by_seed in found.items():
        values = np.array(list(by_seed.values()))
        cells = [names[name], str(len(values))]
        for column, (mean, deviation) in enumerate(zip(values.mean(0), values.std(0, ddof=1), strict=True)):
            cells.append(f"{mean:.3g} ± {deviation:.1g}")
            if column < compared:
                ratio = paired(*([np.log(side[seed][column]) for seed in by_seed] for side in (by_seed, first)))
                low, mean, high = np.exp((ratio.low, ratio.mean, ratio.high))
                cells.append("" if by_seed is first else f"{mean:.2f} [{low:.2f}, {high:.2f}]")
        lines.append(cells)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rate", "fluctuation"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--raw", type=Path, default=Path("raw/mnist"))
    asked = parser.parse_args()
    if asked.what == "rate":
        for shards, words in PARTITIONS.items():
            names = {f"E-{steps},{shards}": f"E = {steps}" for steps in STEPS}
            seeds = {seed for name in names for seed in read(asked.runs, name)}
            least = {seed: minimum(parity(asked.raw, one_class=shards == "one", draw=seed)) for seed in seeds}
            found = rows(asked.runs, names, lambda name, s, r: excess(r, int(name[2:].split(",")[0]), least[s]), 2)  # noqa: B023
            print(table([words, "n", f"excess, T = {TOTAL}", "ratio", f"{ROUNDS} rounds", "ratio", "slope"], found))
        return
    for part in SETS:
        names = {f"{part},{method}": method for method in METHODS}
        found = rows(asked.runs, names, lambda name, seed, records: fluctuation(records), len(METRICS))
        print(table([part, "n", *(head for metric in METRICS for head in (metric, "ratio"))], found))


if __name__ == "__main__":
    main()
