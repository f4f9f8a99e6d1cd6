"""Numbers of a report: curves over seeds, costs, participation, scores of clients, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.common.fairness import Usage, evenness
from fedmpi.common.types import Ints
from fedmpi.records.history import SCORES, Record, clients_from_text
from fedmpi.records.progress import is_number, read_log
from fedmpi.records.tables import last_evaluation, read_clients
from fedmpi.results.comparison import AXES, Spread, first_reached, judged, rises, spent, up_to
from fedmpi.results.loading import OF_NO_MATTER, OneRun, blocks_of


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


MOST_ROUNDS = 250
"""Largest number of drawn rounds of a configuration: evaluated rounds first, evenly spread."""
DIGITS = 5
"""Significant digits of the page's numbers."""
NOT_DRAWN = ("round", "opening")
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
    "rank_balance": "mean / largest busy time of the ranks",
    "kl_mean": "KL divergence of the mediators' labels, mean",
    "kl_client_mean": "KL divergence of the clients' labels, mean",
    **{f"bytes_{link}": f"bytes {words} per round" for link, words in LINK_NAMES.items()},
}
"""Names of record keys that do not explain themselves."""


def key_title(key: str) -> str:
    """Return the name of a record key: "test accuracy" of "test_accuracy"."""
    return TITLES.get(key) or key.replace("_", " ")


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
    """Return the keys of numbers."""
    keys = {key for records in runs for record in records for key, value in record.items() if is_number(value)}
    return sorted(keys - set(NOT_DRAWN))


def target(groups: Sequence[Configuration]) -> tuple[str, float] | None:
    """Return the score up to which costs are shown: the user's target, or the best that half of the runs reach."""
    runs = [run for group in groups for run in group.runs]
    key = judged([record for run in runs for record in run.records])
    sign = 1 if rises(key) else -1
    given = {float(value) for run in runs if (value := run.table.get("evaluation.target_accuracy")) is not None}
    if given and sign > 0:
        return key, max(given)
    scores = [[sign * record[key] for record in run.records if record.get(key) is not None] for run in runs]
    best = sorted(max(values, default=-np.inf) for values in scores)
    middle = sign * best[(len(best) - 1) // 2]
    return (key, middle) if np.isfinite(middle) and middle else None


def costs(group: Configuration, key: str, level: float) -> dict[str, Spread | None]:
    """Return the cost of a configuration's runs when they reached a level, by axis."""
    firsts = [first_reached(run.records, level, key) for run in group.runs]
    spending = [spent(run.records) for run in group.runs]
    return {axis: up_to(spending, firsts, axis) for axis in AXES}


MOST_ROWS, MOST_COLUMNS = 64, 100
"""Largest size of a heat map."""
MOST_POINTS = 200
"""Largest number of clients of a run with shown scores."""
MOST_WARNINGS = 40


def participation(run: OneRun) -> dict[str, Any] | None:
    """Return the participation of clients × rounds, in bins if there are many; None if it was not recorded."""
    recorded = [record for record in run.records if "clients" in record]
    if not recorded:
        return None
    cohorts = [clients_from_text(record["clients"]) for record in recorded]
    known = int(run.summary.get("clients") or 0)
    clients = known or 1 + max(int(c.max(initial=0)) for c in cohorts)
    rows, columns = edges(clients, MOST_ROWS), edges(len(recorded), MOST_COLUMNS)
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
    columns = {name: rounded(column[order[some]].tolist()) for name, column in last.items() if name != "round"}
    return {"round": int(last["round"][0]) + 1, **columns}


def totals(group: Configuration) -> dict[str, float | int | None]:
    """Return megabytes on each link and by MPI, and milliseconds of each phase per round; means over the runs."""
    found = {
        f"MB {words}": float(np.mean([sum(r.get(f"bytes_{link}") or 0 for r in run.records) for run in group.runs]))
        / 1e6
        for link, words in LINK_NAMES.items()
    }
    moved = [run.summary["mpi_bytes"]["total"] for run in group.runs if "mpi_bytes" in run.summary]
    found["MB by MPI"] = float(np.mean(moved)) / 1e6 if moved else 0.0
    records = [record for run in group.runs for record in run.records]
    phases: Counter[str] = Counter()
    for record in records:
        phases.update(record.get("phase_seconds") or {})
    found |= {f"ms to {phase}": 1000 * seconds / len(records) for phase, seconds in phases.items()}
    return {name: _short(value) for name, value in found.items() if value}


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
