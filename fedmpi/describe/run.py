"""Description of a run's clients: distribution of scores, correlates of scores, and the worst clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from fedmpi.common.errors import UserError
from fedmpi.common.fairness import spread_over_clients
from fedmpi.common.terminal import show_table
from fedmpi.common.types import AnyArray
from fedmpi.describe.data import check_picture, save_picture
from fedmpi.records.history import read_summary
from fedmpi.records.tables import Columns, last_evaluation, read_clients

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGAINST = {
    "training_samples": "training samples",
    "times_used": "rounds selected",
    "label_distance": "distance of the label mix from that of all",
}
"""Quantities with which scores are compared."""
CLIENT_SCORES = {
    "accuracy": "accuracy",
    "tuned_accuracy": "accuracy, fine-tuned",
    "loss": "loss",
    "tuned_loss": "loss, fine-tuned",
}
STATISTICS = ("mean", "weighted by samples", "deviation", "worst 10 %", "median", "best 10 %", "Jain")
SHORT = {
    "tuned_accuracy": "tuned",
    "tuned_loss": "tuned",
    "samples": "tested",
    "training_samples": "trained on",
    "times_used": "rounds",
    "label_distance": "label distance",
}
"""Headings of single clients."""
WORST = 5
"""Clients that are listed."""
_COLORS = {"accuracy": "#2a6f97", "tuned_accuracy": "#e07a1f", "loss": "#2a6f97", "tuned_loss": "#e07a1f"}


@dataclass(frozen=True)
class ClientsOfRun:
    """The evaluations of a run's clients."""

    folder: Path
    table: Columns  # All rows, and those of the last evaluation
    last: Columns
    rows: str  # Samples on which the clients were evaluated, in words; "" if the run is not finished

    @property
    def score(self) -> str:
        """The number by which clients are ranked: "accuracy", or "loss" where there is none."""
        return "accuracy" if "accuracy" in self.last else "loss"

    def render(self, console: Console) -> None:
        """Print how the scores of the last evaluation spread, what they go with, and who is served worst."""
        evaluations, clients = len(np.unique(self.table["round"])), len(self.last["client"])
        on = f" on their {self.rows}" if self.rows else ""
        times = f"{evaluations} evaluation" + ("s" if evaluations > 1 else "")
        scores = [score for score in CLIENT_SCORES if score in self.last]
        title = f"{self.folder}: {clients:,} clients after round {int(self.last['round'][0]) + 1}{on}; {times}"
        show_table(
            console,
            ("", *(CLIENT_SCORES[score] for score in scores)),
            list(zip(STATISTICS, *(self._spread(score) for score in scores), strict=True)),
            title=title,
        )
        show_table(
            console,
            (f"rank correlation of the {self.score} with", "Spearman's ρ"),
            [
                (words, _number(rank_correlation(self.last[self.score], self.last[name])))
                for name, words in AGAINST.items()
                if name in self.last
            ],
        )
        beside = [score for score in scores if score != "tuned_loss" or self.score == "loss"]  # fits 80 columns
        columns = ["client", *beside, "samples", *(name for name in AGAINST if name in self.last)]
        headings = [SHORT.get(name, name) for name in columns]
        show_table(
            console,
            headings,
            [[_shown(self.last[name][place]) for name in columns] for place in self._worst()],
            title="served worst",
        )

    def plot(self, path: Path) -> None:
        """Draw the distribution over the run, and the last scores against size, use and label mix."""
        check_picture(path)
        from matplotlib.figure import Figure

        against = [name for name in AGAINST if name in self.last]
        figure = Figure(figsize=(4.2 * (1 + len(against)), 4.2), layout="constrained")
        first, *others = figure.subplots(1, 1 + len(against))
        self._draw_distribution(first)
        for axes, name in zip(others, against, strict=True):
            self._draw_against(axes, name)
        figure.suptitle(
            f"{self.folder.resolve().name}: {len(self.last['client']):,} clients, {self.rows or 'own rows'}"
        )
        save_picture(figure, path)

    def _spread(self, score: str) -> list[str]:
        values, weights = self.last[score], self.last["samples"].astype(np.float64)
        known = ~np.isnan(values)
        if not known.any():
            return ["-"] * len(STATISTICS)
        found = spread_over_clients(values[known], weights[known], "smallest" if score.endswith("loss") else "largest")
        numbers = [found[name] for name in ("mean", "weighted", "std", "worst10")]
        numbers += [float(np.median(values[known])), found["best10"], found["jain"]]
        return [_number(number) for number in numbers]

    def _worst(self) -> list[int]:
        values = self.last[self.score]
        order = np.argsort(values if self.score == "accuracy" else -values, kind="stable")
        return [int(place) for place in order[:WORST]]

    def _draw_distribution(self, axes: Axes) -> None:
        rounds = np.unique(self.table["round"])
        shown = rounds[np.unique(np.linspace(0, len(rounds) - 1, min(4, len(rounds))).round().astype(int))]
        share = 0.25
        for round in shown:
            share = 1.0 if round == shown[-1] else share
            values = np.sort(self.table[self.score][self.table["round"] == round])
            place = np.arange(1, len(values) + 1) / len(values)
            axes.step(values, place, where="post", color=_COLORS[self.score], alpha=share, label=f"round {round + 1}")
            share += 0.2
        if (tuned := f"tuned_{self.score}") in self.last:
            values = np.sort(self.last[tuned])
            place = np.arange(1, len(values) + 1) / len(values)
            axes.step(values, place, where="post", color=_COLORS[tuned], label="fine-tuned")
        axes.legend(frameon=False, fontsize=8)
        axes.set(xlabel=f"{self.score} of a client", ylabel="share of the clients", ylim=(0, 1))
        axes.grid(color="0.92")

    def _draw_against(self, axes: Axes, name: str) -> None:
        for score in (self.score, f"tuned_{self.score}"):
            if score in self.last:
                axes.scatter(self.last[name], self.last[score], s=9, alpha=0.5, linewidths=0, color=_COLORS[score])
        correlation = rank_correlation(self.last[self.score], self.last[name])
        if name == "training_samples" and self.last[name].min() > 0:
            axes.set_xscale("log")
        axes.set(xlabel=AGAINST[name], ylabel=self.score, title=f"Spearman's ρ {_number(correlation)}")
        axes.title.set_fontsize(9)
        axes.grid(color="0.92")


def inspect_clients(folder: Path) -> ClientsOfRun:
    """Read what a run found out about its clients."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run: there is no config.toml in it")
    table = read_clients(folder)
    if not table:
        raise UserError(
            f"{folder} has no table of clients. Run with --set evaluation.clients=all. A run writes it with its "
            "checkpoints and at the end"
        )
    rows = str(read_summary(folder / "summary.json").get("clients_evaluated_on", ""))
    return ClientsOfRun(folder, table, last_evaluation(table), rows)


def rank_correlation(one: AnyArray, other: AnyArray) -> float:
    """Spearman's ρ of two columns, of rows in which both are numbers; NaN where one of them is the same everywhere."""
    from pandas import DataFrame  # slow to import

    return float(DataFrame({"one": one, "other": other}).corr("spearman").iloc[0, 1])


def _number(value: float) -> str:
    return f"{value:.4f}" if np.isfinite(value) else "-"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, np.integer) else _number(float(value))
