"""Fluctuation of a curve from round to round, and differences between methods in it, as Markdown:

    fedmpi sweep jobs/experiments/fedsso-fig3-small.toml --out runs/fedsso-fig3-small
    python -m benchmarks.studies.wavering runs/fedsso-fig3-small --sets MNIST-non-IID MNIST-non-IID2 --metric test_loss

A run's fluctuation is the standard deviation of the change of its metric between consecutive evaluations, over the last
half of its evaluations. A steady fall adds only its own curvature. Folders of runs are SET,SYSTEM,…,seed=S. Differences
are to the first system of `--systems`, in logarithms: a ratio with its 95 % confidence interval over seeds (paired t).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from fedmpi.results.comparison import paired


def wavering(run: Path, metric: str) -> float:
    """Return the standard deviation of the metric's steps in the last half of a run's evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = np.array([record[metric] for record in records if metric in record])
    return float(np.diff(curve[len(curve) // 2 :]).std(ddof=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--sets", nargs="+", required=True)
    parser.add_argument("--systems", nargs="+", default=["FedAvg", "FedSSO-constant-rate", "FedSSO"])
    parser.add_argument("--metric", nargs="+", default=["train_loss", "test_loss", "test_accuracy"])
    asked = parser.parse_args()
    print(f"| set, metric | {' | '.join(f'{system} | to {asked.systems[0]}' for system in asked.systems)} |")
    print("|---|" + "---:|" * 2 * len(asked.systems))
    for part in asked.sets:
        for metric in asked.metric:
            cells, reference = [], np.empty(0)
            for system in asked.systems:
                runs = sorted(asked.runs.glob(f"{part},{system},*seed=*"))
                found = np.array([wavering(run, metric) for run in runs if (run / "summary.json").exists()])
                cells.append(f"{found.mean():.4f} ± {found.std(ddof=1):.4f} (n = {len(found)})")
                reference = found if not len(reference) else reference
                one = paired(np.log(found), np.log(reference))
                ratio = f"{np.exp(one.mean):.2f} [{np.exp(one.low):.2f}, {np.exp(one.high):.2f}]"
                cells.append("" if found is reference else ratio)
            print(f"| {part}, {metric} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
