"""Numbers of a report: curves over seeds, participation, strata, scores of clients, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.common.fairness import evenness
from fedmpi.common.types import Ints
from fedmpi.records.history import SCORES, Record, clients_from_text
from fedmpi.records.progress import is_number, read_log
from fedmpi.records.tables import last_evaluation, read_clients
from fedmpi.results.comparison import AXES, judged, spent
from fedmpi.results.loading import OF_NO_MATTER, OneRun, blocks_of

MOST_ROUNDS = 250
"""Largest number of drawn rounds of a configuration."""
MOST_ROWS, MOST_COLUMNS = 64, 100
"""Largest size of a heat map."""
MOST_POINTS = 200
"""Largest number of clients of a run with shown scores."""
MOST_WARNINGS = 40
DIGITS = 5
"""Significant digits of the page's numbers."""
LINK_NAMES = {
    "client_up": "from clients",
    "client_down": "to clients",
    "mediator_up": "from mediators",
    "mediator_down": "to mediators",
}
TITLES = {
    "train_loss": "training loss",
    "lr": "local learning rate",
    "samples": "samples per round",
    "steps": "steps per round",
    "participants": "selected clients",
    "seconds": "seconds per round",
    "virtual_seconds": "simulated seconds per round",
    "size_ratio": "estimated size / true size",
    "sampling_probability": "probability of a sample",
    "clipped_fraction": "share of clipped answers",
    "clients_used": "share of clients used so far",
    "client_use_gini": "Gini coefficient of participation",
    "client_use_effective": "effective share of clients used (Kish)",
    "update_epsilon": "ε of the updates so far",
    "size_epsilon_max": "ε of the sizes so far, largest",
    "size_epsilon_mean": "ε of the sizes so far, mean",
    "kl_mean": "KL divergence of the mediators' labels, mean",
    "kl_client_mean": "KL divergence of the clients' labels, mean",
    **{f"bytes_{link}": f"bytes {words} per round" for link, words in LINK_NAMES.items()},
}
"""Names of record keys that do not explain themselves."""


@dataclass(frozen=True)
class Configuration:
    """Runs that differ only in their seed."""

    label: str  # unique among all configurations, with its data if these differ
    # {"part.key": value} of its first run, without keys that do not change results
    table: dict[str, Any]
    runs: tuple[OneRun, ...]  # by seed


def configurations(runs: Sequence[OneRun]) -> tuple[list[Configuration], list[str]]:
    """Return the configurations of some runs, grouped as by `fedmpi compare`, and its warnings."""
    blocks, found = blocks_of(runs), []
    for block in blocks:
        for group in block.groups:
            label = ", ".join([group.label, *([block.title] if len(blocks) > 1 else [])])
            first = next(iter(group.runs.values())).table
            table = {k: value for k, value in first.items() if k != "seed" and not k.startswith(OF_NO_MATTER)}
            found.append(Configuration(label, table, tuple(group.runs.values())))
    return found, [note for block in blocks for note in block.notes]


def key_title(key: str) -> str:
    """Return the name of a record key: "test accuracy" of "test_accuracy"."""
    return TITLES.get(key) or key.replace("_", " ")


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return numbers to `DIGITS` significant digits; None if they are not finite."""
    known = (None if value is None or not np.isfinite(value) else value for value in values)
    return [None if value is None else float(f"{value:.{DIGITS}g}") for value in known]


def thinned(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of some values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def curves(runs: Sequence[list[Record]]) -> dict[str, Any]:
    """Return one configuration's numbers by round: `x` by axis, `y` by key as mean and deviation over its runs.

    Of more than `MOST_ROUNDS` rounds, only evaluated ones are drawn.
    """
    from pandas import DataFrame, concat  # slow to import

    spending = [spent(records) for records in runs]
    axes = {axis: f"spent: {axis}" for axis in AXES if all(axis in one for one in spending)}
    tables = []
    for records, costs in zip(runs, spending, strict=True):
        numbers = [{key: value for key, value in record.items() if is_number(value)} for record in records]
        tables.append(DataFrame(numbers).assign(**{name: costs[axis] for axis, name in axes.items()}))
    table = concat(tables)
    if {"size_true", "size_estimate"} <= {*table}:
        table["size_ratio"] = table["size_estimate"] / table["size_true"]
    by_round = table.groupby("round")
    means, deviations, counts = by_round.mean(), by_round.std(), by_round.count()
    rounds, judge = means.index, judged(runs[0])
    if len(rounds) > MOST_ROUNDS and judge in means:
        rounds = rounds[means[judge].notna()]
    means, deviations, counts = (one.loc[thinned(rounds, MOST_ROUNDS)] for one in (means, deviations, counts))
    y = {}
    for key in sorted({*means} - {*axes.values(), "opening"}):
        y[key] = {"mean": rounded(means[key])}
        if len(runs) > 1:
            y[key] |= {"deviation": rounded(deviations[key]), "n": counts[key].tolist()}
    return {"x": {axis: rounded(means[name]) for axis, name in axes.items()}, "y": y}


def scores(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the last value of every score; None if it is not finite."""
    return {key: value for record in records for key, value in record.items() if key.startswith(SCORES)}


def participation(run: OneRun) -> dict[str, Any] | None:
    """Return the participation of clients × rounds, in bins if there are many; None if it was not recorded."""
    recorded = [record for record in run.records if "clients" in record]
    if not recorded:
        return None
    cohorts = [clients_from_text(record["clients"]) for record in recorded]
    known = int(run.summary.get("clients") or 0)
    clients = known or 1 + max(int(c.max(initial=0)) for c in cohorts)
    rows, columns = edges(clients, MOST_ROWS), edges(len(recorded), MOST_COLUMNS)
    selected, times = np.concatenate(cohorts), np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts])
    counts, _, _ = np.histogram2d(selected, times, (rows, columns))
    whole = known and len(recorded) == len(run.records)  # else it is unknown who never participated
    return {
        "clients": rows.tolist(),
        "rounds": [recorded[i]["round"] + 1 for i in columns[:-1]] + [recorded[-1]["round"] + 2],
        "counts": counts.astype(int).tolist(),
        "binary": len(rows) > clients and len(columns) > len(recorded),
        "evenness": vars(evenness(np.bincount(selected, minlength=clients))) if whole else None,
    }


def edges(count: int, most: int) -> Ints:
    """Return the edges of at most `most` bins of equal width, except the last, over `count` things."""
    width = -(-count // most)
    return np.append(np.arange(0, count, width, dtype=np.int64), count)


def strata(run: OneRun) -> list[list[int]] | None:
    """Return [round, stratum, clients N_h, drawn m_h] for the first strata of some rounds; None without strata."""
    stratified = [record for record in run.records if record.get("allocation")]
    some = thinned(range(len(stratified)), MOST_COLUMNS)
    cells = [
        [stratified[i]["round"] + 1, h + 1, size, drawn]
        for i in some
        for h, (size, drawn) in enumerate(zip(stratified[i]["stratum_sizes"], stratified[i]["allocation"], strict=True))
        if h < MOST_ROWS
    ]
    return cells or None


def view(run: OneRun) -> dict[str, Any] | None:
    """Return the scores of a run's clients at their last evaluation, worst first; None if they were not evaluated."""
    table = read_clients(run.folder)
    if not table:
        return None
    last = last_evaluation(table)
    order = np.argsort(last["accuracy"] if "accuracy" in last else -last["loss"], kind="stable")
    some = thinned(range(len(order)), MOST_POINTS)
    return {name: rounded(column[order[some]].tolist()) for name, column in last.items() if name != "round"}


def warnings(runs: Sequence[OneRun]) -> list[tuple[str, int]]:
    """Return the distinct warnings in the runs' logs, and how often each is there."""
    logs = (read_log(run.folder / "run.log") for run in runs)
    found = Counter(text[:500] for log in logs for level, text in log if level in ("WARNING", "ERROR", "CRITICAL"))
    return found.most_common(MOST_WARNINGS)
