"""Fairness of the methods of a sweep: mean accuracy of the clients against that of the worst 10 %, one point per run.

    fedmpi sweep jobs/experiments/clients-served.toml --out runs/clients-served
    python -m benchmarks.studies.clients_served runs/clients-served --plot served.png

Runs that differ only in the seed belong to one method. The output shows means and standard deviations over them after
the last evaluation. Hollow points are the clients' models after fine-tuning.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

SCORES = (
    "client_accuracy_mean",
    "client_accuracy_worst10",
    "client_tuned_accuracy_mean",
    "client_tuned_accuracy_worst10",
)
COLOURS = ("#1f5fa8", "#c8501e", "#2f8f4e", "#7a4fa3", "#555555")


def served(folder: Path) -> dict[str, list[list[float]]]:
    """Return the scores (seeds, 4) of each method's finished runs, in the order of `SCORES`; NaN for missing ones."""
    found: dict[str, list[list[float]]] = {}
    for run in sorted(path.parent for path in folder.glob("*/summary.json")):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        if SCORES[0] in records[-1]:
            system = run.name.partition(",seed=")[0]
            found.setdefault(system, []).append([records[-1].get(score, np.nan) for score in SCORES])
    return found


def draw(found: dict[str, list[list[float]]], path: Path) -> None:
    """Draw the mean against the worst 10 %, in percent; full points the global model, hollow ones fine-tuned."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for (system, scores), colour in zip(found.items(), COLOURS * len(found), strict=False):
        mean, worst, tuned, tuned_worst = 100 * np.array(scores).T
        axes.scatter(mean, worst, color=colour, s=34, label=system, linewidths=0)
        axes.scatter(tuned, tuned_worst, facecolors="none", edgecolors=colour, s=34)
    axes.set(xlabel="mean accuracy of the clients, %", ylabel="accuracy of the worst tenth, %")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a sweep's runs")
    parser.add_argument("--plot", type=Path, help="draw a point a run")
    asked = parser.parse_args()
    found = served(asked.folder)
    if not found:
        parser.error(f"{asked.folder} holds no finished run with evaluation.clients")
    print("| clients' accuracy, % | n | mean | worst tenth | mean, fine-tuned | worst tenth, fine-tuned |")
    print("|---|---:|---:|---:|---:|---:|")
    for system, scores in found.items():
        values = 100 * np.array(scores)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.full(len(SCORES), np.nan)
        cells = [f"{mean:.1f} ± {deviation:.1f}" for mean, deviation in zip(values.mean(0), spread, strict=True)]
        print(f"| {system} | {len(values)} | {' | '.join(cells)} |")
    if asked.plot:
        draw(found, asked.plot)


if __name__ == "__main__":
    main()
