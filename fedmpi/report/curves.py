"""Numbers of a report: curves over seeds, costs, participation, scores of clients, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.common.fairness import Usage, evenness
from fedmpi.common.types import Ints
from fedmpi.describe.run import CLIENT_SCORES
from fedmpi.records.history import LINKS, SCORES, Record, clients_from_text
from fedmpi.records.progress import MEASURED, is_number, read_log
from fedmpi.records.tables import last_evaluation, read_clients
from fedmpi.results.comparison import AXES, Spread, first_reached, judged, rises, spent, up_to
from fedmpi.results.loading import OF_NO_MATTER, OneRun, SeedGroup, blocks_of


@dataclass(frozen=True)
class Configuration:
    """Runs that differ only in their seed."""

    label: str  # unique among all configurations, with its data if these differ
    # {"part.key": value} of its first run, without keys that do not change results
    table: dict[str, Any]
    runs: tuple[OneRun, ...]  # by seed


def configurations(runs: Sequence[OneRun]) -> tuple[list[Configuration], list[str]]:
    """Return the configurations of some runs, grouped as by `fedmpi compare`, and its warnings."""
    blocks = blocks_of(runs)
    found = [
        Configuration(
            ", ".join([_enough(group, block.groups), *([block.title] if len(blocks) > 1 else [])]),
            _table(next(iter(group.runs.values()))),
            tuple(group.runs.values()),
        )
        for block in blocks
        for group in block.groups
    ]
    return found, [note for block in blocks for note in block.notes]


def _enough(group: SeedGroup, groups: Sequence[SeedGroup]) -> str:
    """Return the shortest beginning of a group's name that no other group has."""
    own = group.words
    for count in range(1, len(own)):
        if sum(other.words[:count] == own[:count] for other in groups) == 1:
            return ", ".join(own[:count])
    return group.label


def _table(run: OneRun) -> dict[str, Any]:
    return {key: value for key, value in run.table.items() if key != "seed" and not key.startswith(OF_NO_MATTER)}


MOST_ROUNDS = 250
"""Largest number of drawn rounds of a configuration: evaluated rounds first, evenly spread."""
DIGITS = 5
"""Significant digits of the page's numbers."""
NOT_DRAWN = ("round", "opening")
TARGETS = 40
"""Number of scores for which the cost is shown."""
LINK_NAMES = {
    "client_up": "from clients",
    "client_down": "to clients",
    "mediator_up": "from mediators",
    "mediator_down": "to mediators",
}
PARTS = {"test": "test", "val": "validation"}
SCORE_NAMES = {"accuracy": "accuracy", **MEASURED, "loss": "loss"}
SPREADS = {
    "mean": "mean",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "std": "standard deviation",
    "weighted": "weighted by samples",
    "jain": "Jain's index",
}
TITLES = {
    **{f"{part}_{score}": f"{PARTS[part]} {name}" for score, name in SCORE_NAMES.items() for part in PARTS},
    "train_loss": "training loss",
    **{
        f"client_{score}_{spread}": f"clients' {words}, {name}"
        for score, words in CLIENT_SCORES.items()
        for spread, name in SPREADS.items()
    },
    "lr": "local learning rate",
    "samples": "samples per round",
    "steps": "steps per round",
    "participants": "selected clients",
    "asked": "invited clients",
    "available": "available clients",
    "seconds": "seconds per round",
    "virtual_seconds": "simulated seconds per round",
    "size_ratio": "estimated size / true size",
    "size_estimate": "estimated size",
    "size_true": "true size",
    "size_asked": "clients queried for their size",
    "sampling_probability": "probability of a sample",
    "clipped_fraction": "share of clipped answers",
    "strata": "strata",
    "client_use_gini": "Gini coefficient of participation",
    "client_use_effective": "effective share of clients used (Kish)",
    "clients_used": "share of clients used so far",
    "update_epsilon": "ε of the updates so far",
    "size_epsilon_max": "ε of the sizes so far, largest",
    "size_epsilon_mean": "ε of the sizes so far, mean",
    "rank_balance": "mean / largest busy time of the ranks",
    "kl_mean": "KL divergence of the mediators' labels, mean",
    "kl_client_mean": "KL divergence of the clients' labels, mean",
    **{f"bytes_{link}": f"bytes {words} per round" for link, words in LINK_NAMES.items()},
}
"""Names of record keys; others are shown as they are."""


def rounded(values: Iterable[float | None]) -> list[float | int | None]:
    """Return numbers to `DIGITS` significant digits; None if they are not finite."""
    return [_short(value) for value in values]


def _short(value: float | None) -> float | int | None:
    if value is None or not np.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of some rounds, evenly spaced, with the first and the last."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))]


def completed(run: OneRun) -> list[Record]:
    """Return records with derived numbers: participation fairness so far, balance of the ranks, error of the size."""
    clients = int(run.summary.get("clients") or 0)  # unknown before the run is finished
    whole = clients and all("clients" in record for record in run.records)
    usage, made, drawn = Usage(clients), [], set(_drawn([run.records]))
    for record in run.records:
        further: Record = {}
        if whole:
            usage.record(clients_from_text(record["clients"]))
        if whole and record["round"] in drawn:
            fair = evenness(usage.clients)
            further |= {"clients_used": fair.used, "client_use_effective": fair.effective, "client_use_gini": fair.gini}
        if record.get("size_true") and record.get("size_estimate") is not None:
            further["size_ratio"] = record["size_estimate"] / record["size_true"]
        busy = [seconds for seconds in record.get("busy_seconds") or [] if seconds > 0]  # rank 0 may only serve
        if len(busy) > 1:
            further["rank_balance"] = float(np.mean(busy)) / max(busy)
        made.append({**further, **record})
    return made


def curves(runs: Sequence[list[Record]]) -> dict[str, Any]:
    """Return one configuration's numbers by round: `x` by axis, `y` by key as mean and deviation over its runs."""
    spending = [spent(records) for records in runs]
    rounds = _drawn(runs)
    at = [{record["round"]: i for i, record in enumerate(records)} for records in runs]
    axes = [axis for axis in AXES if all(axis in one for one in spending)]
    x = {
        axis: rounded(
            float(np.mean([one[axis][where[t]] for one, where in zip(spending, at, strict=True) if t in where]))
            for t in rounds
        )
        for axis in axes
    }
    y = {}
    for key in _numbers(runs):
        spreads = [
            Spread.of(
                [
                    r[where[t]][key]
                    for r, where in zip(runs, at, strict=True)
                    if t in where and is_number(r[where[t]].get(key))
                ]
            )
            for t in rounds
        ]
        y[key] = {"mean": rounded(s.mean if s else None for s in spreads)}
        if len(runs) > 1:
            y[key] |= {
                "deviation": rounded(s.deviation if s else None for s in spreads),
                "n": [s.n if s else 0 for s in spreads],
            }
    return {"x": x, "y": y}


def _drawn(runs: Sequence[list[Record]]) -> list[int]:
    """Return the rounds to draw: all, or `MOST_ROUNDS` with as many evaluated ones as possible."""
    every = sorted({record["round"] for records in runs for record in records})
    if len(every) <= MOST_ROUNDS:
        return every
    judge = judged(runs[0])
    scored = sorted({record["round"] for records in runs for record in records if judge in record})
    if len(scored) >= MOST_ROUNDS:
        return thinned(scored, MOST_ROUNDS)
    return sorted({*scored, *thinned(every, MOST_ROUNDS - len(scored))})


def _numbers(runs: Sequence[list[Record]]) -> list[str]:
    """Return the keys of numbers, those with a title first."""
    keys = {key for records in runs for record in records for key, value in record.items() if is_number(value)}
    keys -= set(NOT_DRAWN)
    return [key for key in TITLES if key in keys] + sorted(keys - TITLES.keys())


def targets(groups: Sequence[Configuration]) -> dict[str, Any]:
    """Return the cost of each configuration up to each of some scores; {} without scores.

    Accuracies are evenly spaced from 0 to the largest of all, losses from the largest first one down to the smallest.
    The default is the user's target, or the best score that half of the runs reach.
    """
    runs = [[run.records for run in group.runs] for group in groups]
    key = judged([record for records in runs for one in records for record in one])
    sign = 1 if rises(key) else -1
    scores = [[r[key] for r in one if r.get(key) is not None] for records in runs for one in records]
    known = [values for values in scores if values]
    end = sign * max((sign * value for values in known for value in values), default=0.0)
    if not known or (sign > 0 and end <= 0):
        return {}
    start = 0.0 if sign > 0 else max(values[0] for values in known)
    even = np.linspace(start, end, TARGETS + 1)[1:].tolist()
    spaced = [round(level, 3) if sign > 0 else float(f"{level:.{DIGITS}g}") for level in even]
    given = [run.table.get("evaluation.target_accuracy") for group in groups for run in group.runs]
    set_by_user = {float(value) for value in given if value is not None and sign > 0}
    levels = sorted({level for level in spaced if sign * level <= sign * end} | {end} | set_by_user)
    best = sorted(max((sign * value for value in values), default=-np.inf) for values in scores)
    reached = [level for level in levels if sign * level <= best[(len(best) - 1) // 2]]
    default = max(set_by_user or reached or levels[::-sign][-1:], key=lambda level: sign * level)
    return {"key": key, "rises": sign > 0, "levels": levels, "default": default, "costs": _spending(key, runs, levels)}


def _spending(key: str, runs: Sequence[Sequence[list[Record]]], levels: Sequence[float]) -> list[dict[str, Any]]:
    """Return the cost of each configuration's runswhen they reached each of some levels."""
    costs = []
    for records in runs:
        spending = [spent(one) for one in records]
        firsts = [[first_reached(one, level, key) for one in records] for level in levels]
        costs.append({axis: _costs([up_to(spending, first, axis) for first in firsts]) for axis in AXES})
    return costs


def _costs(spreads: list[Spread | None]) -> dict[str, Any] | None:
    if not any(spreads):
        return None
    return {
        "mean": rounded(s.mean if s else None for s in spreads),
        "deviation": rounded(s.deviation if s else None for s in spreads),
        "n": [s.n if s else 0 for s in spreads],
    }


CELLS = 120_000
"""Largest number of cells of all heat maps together."""
MOST_ROWS, MOST_COLUMNS = 64, 100
"""Largest size of one heat map."""
POINTS, MOST_POINTS = 20_000, 500
"""Largest number of clients with shown scores, of all runs together and of each."""
MOST_WARNINGS = 40


def heat_size(runs: int) -> tuple[int, int]:
    """Return the largest numbers of rows and columns of the heat map of each of so many runs."""
    each = max(CELLS // max(runs, 1), 64)
    columns = min(MOST_COLUMNS, int(np.sqrt(each / (MOST_ROWS / MOST_COLUMNS))))
    return min(MOST_ROWS, each // columns), columns


def participation(run: OneRun, runs: int = 1) -> dict[str, Any] | None:
    """Return the participation of clients × rounds, in bins if there are many; None if it was not recorded."""
    recorded = [record for record in run.records if "clients" in record]
    if not recorded:
        return None
    cohorts = [clients_from_text(record["clients"]) for record in recorded]
    known = int(run.summary.get("clients") or 0)
    clients = known or 1 + max(int(c.max(initial=0)) for c in cohorts)
    most_rows, most_columns = heat_size(runs)
    rows, columns = edges(clients, most_rows), edges(len(recorded), most_columns)
    counts, use = np.zeros((len(rows) - 1, len(columns) - 1), np.int64), np.zeros(clients, np.int64)
    for t, cohort in enumerate(cohorts):
        use[cohort] += 1
        bins = np.bincount(np.searchsorted(rows, cohort, "right") - 1, minlength=len(rows) - 1)
        counts[:, np.searchsorted(columns, t, "right") - 1] += bins
    whole = known and len(recorded) == len(run.records)  # else it is unknown who never participated
    return {
        "clients": rows.tolist(),
        "rounds": [recorded[i]["round"] + 1 for i in columns[:-1]] + [recorded[-1]["round"] + 2],
        "counts": counts.tolist(),
        "evenness": vars(evenness(use)) if whole else None,
    }


def edges(count: int, most: int) -> Ints:
    """Return the edges of at most `most` bins of equal width, except the last, over `count` things."""
    width = -(-count // most)
    return np.append(np.arange(0, count, width, dtype=np.int64), count)


def strata(run: OneRun, runs: int = 1) -> list[list[int]] | None:
    """Return [round, stratum, clients N_h, drawn m_h] for the first strata of some rounds; None without strata."""
    stratified = [record for record in run.records if record.get("allocation")]
    most_rows, most_columns = heat_size(runs)
    some = thinned(range(len(stratified)), most_columns)
    cells = [
        [stratified[i]["round"] + 1, h + 1, size, drawn]
        for i in some
        for h, (size, drawn) in enumerate(zip(stratified[i]["stratum_sizes"], stratified[i]["allocation"], strict=True))
        if h < most_rows
    ]
    return cells or None


def view(run: OneRun, runs: int = 1) -> dict[str, Any] | None:
    """Return the scores of a run's clients at their last evaluation, worst first; None if they were not evaluated."""
    table = read_clients(run.folder)
    if not table:
        return None
    last = last_evaluation(table)
    order = np.argsort(last["accuracy"] if "accuracy" in last else -last["loss"], kind="stable")
    some = thinned(range(len(order)), min(MOST_POINTS, max(POINTS // max(runs, 1), 20)))
    columns = {name: rounded(column[order[some]].tolist()) for name, column in last.items() if name != "round"}
    return {"round": int(last["round"][0]) + 1, **columns}


def traffic(group: Configuration) -> dict[str, Any]:
    """Return megabytes on each simulated link and by MPI, mean over the configuration's runs."""
    links = {
        link: float(np.mean([sum(r.get(f"bytes_{link}") or 0 for r in run.records) for run in group.runs])) / 1e6
        for link in LINKS
    }
    moved = [run.summary["mpi_bytes"]["total"] / 1e6 for run in group.runs if "mpi_bytes" in run.summary]
    return {
        "links": {link: rounded([value])[0] for link, value in links.items() if value},
        "mpi": rounded([float(np.mean(moved)) if moved else None])[0],
    }


def phases(group: Configuration) -> dict[str, float | int | None]:
    """Return seconds of each phase per round, mean over all rounds of the configuration's runs."""
    records = [record for run in group.runs for record in run.records]
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get("phase_seconds") or {})
    return dict(zip(total, rounded(value / len(records) for value in total.values()), strict=True))


def warnings(runs: Sequence[OneRun]) -> list[dict[str, Any]]:
    """Return the distinct warnings in the runs' logs: text, times, runs."""
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for level, text in read_log(run.folder / "run.log"):
            if level in ("WARNING", "ERROR", "CRITICAL"):
                found.setdefault(text[:500], Counter())[run.name] += 1
    ordered = sorted(found, key=lambda text: found[text].total(), reverse=True)[:MOST_WARNINGS]
    return [{"text": text, "times": found[text].total(), "runs": sorted(found[text])} for text in ordered]


def scores(records: Sequence[Record]) -> dict[str, float]:
    """Return the last value of every score, without those that are not finite."""
    last: dict[str, float | None] = {}
    for record in records:
        last |= {k: v for k, v in record.items() if k.startswith(SCORES)}
    return {k: v for k, v in last.items() if v is not None}
