"""Draw the figures of the reproduced papers from the numbers in docs/papers/data: python docs/figures/papers.py.

Dots are means, bars one standard deviation over seeds. Each method has the same color in all figures.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[1]
COLORS = {
    "Astraea": "#0072B2",
    "FedAvg": "#E69F00",
    "FedSTaS": "#009E73",
    "FedSampling": "#CC79A7",
    "FedSSO": "#D55E00",
    "FedSTS": "#56B4E9",
    "FedProx": "#B8A800",
    "others": "#808080",
}
Row = dict[str, str]


def rows(file: str, column: str, table: str = "") -> dict[str, Row]:
    """Return the rows of a data file with a column, by their names."""
    with (DOCS / "papers" / "data" / f"{file}.csv").open(encoding="utf-8") as opened:
        found = [row for row in csv.DictReader(opened) if row["column"] == column and row["table"].startswith(table)]
    return {row["row"]: row for row in found}


def color(name: str) -> str:
    """Return the color of the method that a name begins with."""
    return next((value for method, value in COLORS.items() if name.startswith(method)), COLORS["others"])


def levels(axes: Axes, shown: dict[str, Row], names: dict[str, str], title: str) -> None:
    """Draw mean and standard deviation of each named row, the first at the top."""
    for place, (label, name) in enumerate(names.items()):
        value, deviation = float(shown[name]["value"]), float(shown[name]["sd"])
        axes.errorbar(value, -place, xerr=deviation, fmt="o", color=color(label), capsize=3)
    axes.set(yticks=[-place for place in range(len(names))], yticklabels=list(names), title=title)
    axes.margins(y=0.15)
    axes.grid(axis="x", color="0.9")


def fedsampling() -> Figure:
    """Differences of Table 1 with their corrected intervals; hollow: not significant."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    names = ("centralized", "FedAvg", "FedYogi", "FedAdagrad", "FedAdam")
    for axes, network in zip(figure.subplots(1, 2, sharey=True), ("Text-CNN", "Transformer"), strict=True):
        found = rows("fedsampling-table1-small", f"{network}, accuracy, FedSampling minus this", "Table 1, MIND")
        for place, name in enumerate(names):
            low, value, high = (float(found[name][key]) for key in ("corrected_low", "value", "corrected_high"))
            hollow = {} if found[name]["significant"] == "yes" else {"markerfacecolor": "white"}
            bar = [[value - low], [high - value]]
            axes.errorbar(value, -place, xerr=bar, fmt="o", color=COLORS["FedSampling"], capsize=3, **hollow)
        axes.axvline(0, color="0.5", linewidth=1)
        axes.set(yticks=[-place for place in range(5)], yticklabels=names, title=f"MIND, {network}")
        axes.set_xlabel("FedSampling minus this, points of accuracy")
        axes.grid(axis="x", color="0.9")
    return figure


def fedsso() -> Figure:
    """Accuracy of Figure 3 on MNIST."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    names = {
        "FedAvg": "FedAvg, learning rate 0.01",
        "FedProx": "FedProx, μ = 0.2",
        "FedSSO, falling rate": "FedSSO, learning rate η_0/(1 + t)",
        "FedSSO, constant rate": "FedSSO, constant learning rate",
    }
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("two classes", "one class"), strict=True):
        found = rows("fedsso-fig3-small", f"{kind} per client, last 10 rounds", "Figure 3, MNIST: test accuracy")
        levels(axes, found, names, f"MNIST, {kind} per client")
        axes.set_xlabel("test accuracy, last 10 rounds, %")
    return figure


def fedstas() -> Figure:
    """Accuracy of Figure 2(b) beside that of the paper."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots()
    names = {name: name for name in ("FedAvg", "FedSTS", "FedSTaS")}
    names |= {"FedSTaS, private sizes": "DP-FedSTaS (ε = 3, M = 100)"}
    found = rows("fedstas-fig2", "last 10 rounds", "Figure 2(b): test")
    levels(axes, found, names, "MNIST, Dirichlet(0.01), five seeds")
    paper = rows("fedstas-fig2", "paper")
    for place, name in enumerate(names.values()):
        if name in paper:
            label = "the paper, one run" if place == 1 else None
            axes.plot(float(paper[name]["value"]), -place, "D", color="0.3", markerfacecolor="white", label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_xlabel("test accuracy, last 10 rounds, %")
    return figure


def astraea() -> Figure:
    """Accuracy of Figures 4 and 5."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    names = {
        "FedAvg": "FedAvg",
        "Astraea, augmentation alone": "augmentation",
        "Astraea, mediators alone": "mediators",
        "Astraea": "both",
    }
    panels = (
        ("astraea-fig4-small", "Figure 4", "MNIST"),
        ("astraea-fig5-small", "Figure 5", "CIFAR-10, 10,000 images"),
    )
    for axes, (file, table, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        levels(axes, rows(file, "accuracy over the last 10 rounds, %", table), names, title)
        axes.set_xlabel("test accuracy, last 10 rounds, %")
    return figure


def served() -> Figure:
    """Accuracy over clients, before and after fine-tuning."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    names = {name: name for name in ("FedAvg", "FedSTaS", "power-of-choice")}
    columns = ("mean", "worst 10 % of clients", "mean, fine-tuned", "worst 10 % of clients, fine-tuned")
    for axes, column in zip(figure.subplots(2, 2, sharey=True, sharex=True).flat, columns, strict=True):
        levels(axes, rows("clients-served", column), names, column)
    figure.supxlabel("accuracy of the clients, %", fontsize="medium")
    return figure


def main() -> None:
    """Write all figures to docs/images."""
    matplotlib.rcParams.update({"svg.hashsalt": "fedmpi", "axes.titlesize": "medium"})
    drawn = {
        "fedsampling_table1": fedsampling,
        "fedsso_fig3": fedsso,
        "fedstas_fig2": fedstas,
        "astraea_fig4_5": astraea,
        "clients_served": served,
    }
    for name, draw in drawn.items():
        draw().savefig(DOCS / "images" / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
