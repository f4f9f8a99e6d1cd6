"""Draw clients.svg: the distribution of a run's client scores, and the last scores against size, use and label mix.

python docs/figures/clients.py runs/per-client
"""

import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

import fedmpi
from fedmpi.data.opening import open_store
from fedmpi.data.statistics import label_distances

AGAINST = {
    "training_samples": "training samples",
    "times_used": "rounds selected",
    "label_distance": "distance of the label mix from that of all",
}
BLUE, ORANGE = "#2a6f97", "#e07a1f"

folder = Path(sys.argv[1])
table = pandas.read_parquet(folder / "clients.parquet")
source = fedmpi.load_run(folder).config.data.source
counts = open_store(source.choice, source.options).class_counts()
table["label_distance"] = label_distances(counts, counts.sum(axis=0) / counts.sum())[table["client"]]
last = table[table["round"] == table["round"].max()]
scores = {"accuracy": BLUE, "tuned_accuracy": ORANGE}
figure = Figure(figsize=(4.2 * (1 + len(AGAINST)), 4.2), layout="constrained")
first, *others = figure.subplots(1, 1 + len(AGAINST))

evaluations = [(f"round {number + 1}", rows["accuracy"], BLUE) for number, rows in table.groupby("round")][-4:]
shades = [*np.linspace(0.25, 1.0, len(evaluations)), 1.0]
evaluations.append(("fine-tuned", last["tuned_accuracy"], ORANGE))
for (label, values, color), shade in zip(evaluations, shades, strict=True):
    share = np.arange(1, len(values) + 1) / len(values)
    first.step(np.sort(values), share, where="post", color=color, alpha=shade, label=label)
first.legend(frameon=False, fontsize=8)
first.set(xlabel="accuracy of a client", ylabel="share of the clients", ylim=(0, 1))

for axes, (name, words) in zip(others, AGAINST.items(), strict=True):
    for score, color in scores.items():
        axes.scatter(last[name], last[score], s=9, alpha=0.5, linewidths=0, color=color)
    correlation = last["accuracy"].corr(last[name], method="spearman")
    axes.set_title(f"Spearman's ρ {correlation:.4f}", fontsize=9)
    axes.set(xlabel=words, ylabel="accuracy")
others[0].set_xscale("log")
for axes in (first, *others):
    axes.grid(color="0.92")
figure.suptitle(f"{folder.name}: {len(last):,} clients")
figure.savefig(Path(__file__).resolve().parents[1] / "images" / "clients.svg")
