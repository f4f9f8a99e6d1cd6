"""How fast FedSSO's excess loss falls, by local steps E, as Markdown:

    fedmpi sweep jobs/experiments/fedsso-rate.toml --out runs/fedsso-rate
    python -m benchmarks.studies.fedsso_rate runs/fedsso-rate

Excess is the recorded objective less its minimum, in thousandths. T counts local steps, so that a round has E of them.
The slope is that of the logarithms of excess and T from T = 100 on: −1 for O(1/T).
Mean ± standard deviation over seeds. Start it in the repository, beside the data of the sweep.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmpi.common.types import Floats
from jobs.experiments.mnist_parity import minimum, parity

STEPS = (1, 2, 5, 10, 20, 50)
AFTER = (100, 500, 2000)
"""Local steps T after which the excess is shown."""
ROUNDS = 40
"""Rounds after which the excess is shown: the same communication."""
FROM = 100


def excess(run: Path, steps: int, least: float) -> tuple[Floats, Floats]:
    """T and the excess after each evaluated round of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [
        (steps * (record["round"] + 1), record["test_loss"] - least) for record in records if "test_loss" in record
    ]
    return tuple(np.array(found).T)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--raw", type=Path, default=Path("raw/mnist"))
    asked = parser.parse_args()
    heads = [*(f"T = {steps}" for steps in AFTER), f"{ROUNDS} rounds", "slope"]
    for shards, words in (("random", "random digits"), ("one", "one digit per client")):
        seeds = sorted(int(run.name.rpartition("=")[2]) for run in asked.runs.glob(f"E-1,{shards},seed=*"))
        least = {seed: minimum(parity(asked.raw, one_class=shards == "one", draw=seed)) for seed in seeds}
        print(f"\n| {words}, n = {len(seeds)} | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
        for steps in STEPS:
            rows = []
            for seed in seeds:
                t, values = excess(asked.runs / f"E-{steps},{shards},seed={seed}", steps, least[seed])
                late = t >= FROM
                slope = np.polyfit(np.log(t[late]), np.log(values[late]), 1)[0]
                rows.append([*(1e3 * np.interp((*AFTER, ROUNDS * steps), t, values)), slope])
            table = np.array(rows)
            cells = [f"{m:.3g} ± {s:.2g}" for m, s in zip(table.mean(0), table.std(0, ddof=1), strict=True)]
            print(f"| E = {steps} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
