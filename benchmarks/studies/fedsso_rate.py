"""Decrease of FedSSO's excess loss by local steps E, as Markdown:

    fedmpi sweep jobs/experiments/fedsso-rate.toml --out runs/fedsso-rate
    python -m benchmarks.studies.fedsso_rate runs/fedsso-rate

Excess is the recorded objective less its minimum, in thousandths. T counts local steps, so that a round has E of them.
The slope is that of log excess over log T from T = 100 on: −1 for O(1/T). Values are mean ± standard deviation over
seeds. Ratios are to E = 1, with their 95 % confidence intervals (paired t). Start it in the repository, which contains
the data of the sweep.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmpi.common.types import Floats
from fedmpi.results.comparison import paired
from jobs.experiments.mnist_parity import minimum, parity

STEPS = (1, 2, 5, 10, 20, 50)
TOTAL, ROUNDS, FROM = 2000, 40, 100


def measured(run: Path, steps: int, least: float) -> list[float]:
    """Return the excess after TOTAL local steps and after ROUNDS rounds, and the slope."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve: Floats = np.array([(steps * (r["round"] + 1), r["test_loss"] - least) for r in records if "test_loss" in r])
    t, excess = curve.T
    slope = np.polyfit(np.log(t[t >= FROM]), np.log(excess[t >= FROM]), 1)[0]
    return [*(1e3 * np.interp((TOTAL, ROUNDS * steps), t, excess)), slope]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--raw", type=Path, default=Path("raw/mnist"))
    asked = parser.parse_args()
    heads = [f"excess at T = {TOTAL}", "ratio", f"after {ROUNDS} rounds", "ratio", "slope"]
    for shards, words in (("random", "random digits"), ("one", "one digit per client")):
        runs = [run for run in asked.runs.glob(f"E-*,{shards},seed=*") if (run / "summary.json").exists()]
        seeds = sorted({int(run.name.rpartition("=")[2]) for run in runs})
        least = {seed: minimum(parity(asked.raw, one_class=shards == "one", draw=seed)) for seed in seeds}
        print(f"\n| {words} | n | {' | '.join(heads)} |\n|---|{'---:|' * (1 + len(heads))}")
        one: dict[int, list[float]] = {}
        for steps in STEPS:
            places = {seed: asked.runs / f"E-{steps},{shards},seed={seed}" for seed in seeds}
            found = {seed: measured(run, steps, least[seed]) for seed, run in places.items() if run in runs}
            one = one or found
            table = np.array(list(found.values()))
            cells = [f"{m:.3g} ± {s:.1g}" for m, s in zip(table.mean(0), table.std(0, ddof=1), strict=True)]
            for column, place in ((0, 1), (1, 3)):
                logs = [[np.log(side[seed][column]) for seed in found] for side in (found, one)]
                ratio = paired(*logs)
                low, mean, high = np.exp((ratio.low, ratio.mean, ratio.high))
                cells.insert(place, f"{mean:.2f} [{low:.2f}, {high:.2f}]" if found is not one else "")
            print(f"| E = {steps} | {len(found)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
