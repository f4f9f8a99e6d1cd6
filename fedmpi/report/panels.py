"""What the page draws of single runs: who took part, strata, mediators, phases, ranks, traffic, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.fairness import evenness
from fedmpi.common.types import Ints
from fedmpi.records.client_table import last_evaluation, read_clients
from fedmpi.records.history import LINKS, SCORES, Record
from fedmpi.records.participants import clients_from_text
from fedmpi.records.run_log import read_log
from fedmpi.report.configured import Configuration
from fedmpi.report.curves import rounded, thinned
from fedmpi.results.gather import OneRun

CELLS = 120_000
"""Of all heat maps of the page together."""
MOST_ROWS, MOST_COLUMNS = 64, 100
"""Of one heat map."""
POINTS, MOST_POINTS = 20_000, 500
"""Clients shown by their own scores, of all runs together and of each."""
MOST_WARNINGS = 40


def heat_size(runs: int) -> tuple[int, int]:
    """Rows and columns that each of so many runs' heat maps may have."""
    each = max(CELLS // max(runs, 1), 64)
    columns = min(MOST_COLUMNS, int(np.sqrt(each / (MOST_ROWS / MOST_COLUMNS))))
    return min(MOST_ROWS, each // columns), columns


def participation(run: OneRun, runs: int = 1) -> dict[str, Any] | None:
    """Who took part, clients × rounds, in bins of neighbours where there are many; None where it was not recorded."""
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
    whole = known and len(recorded) == len(run.records)  # how many never took part takes a summary and all rounds
    spread = evenness(use) if whole else None
    return {
        "clients": rows.tolist(),
        "rounds": [recorded[i]["round"] + 1 for i in columns[:-1]] + [recorded[-1]["round"] + 2],
        "counts": counts.tolist(),
        "uses": _histogram(use),
        "evenness": spread
        and {
            "used": spread.used,
            "effective": spread.effective,
            "gini": spread.gini,
            "largest": spread.largest,
        },
    }


def edges(count: int, most: int) -> Ints:
    """The borders of at most `most` bins of equal width, but for the last, over `count` things."""
    width = -(-count // most)
    return np.append(np.arange(0, count, width, dtype=np.int64), count)


def _histogram(use: Ints) -> list[list[int]]:
    """[from, to, clients] by times of use, in at most 40 bins."""
    borders = edges(int(use.max()) + 1, 40)
    held, _ = np.histogram(use, bins=borders)
    held[-1] = (use >= borders[-2]).sum()
    return [[int(a), int(b) - 1, int(n)] for a, b, n in zip(borders[:-1], borders[1:], held, strict=True)]


def strata(run: OneRun, runs: int = 1) -> list[list[int]] | None:
    """[round, stratum, clients N_h, drawn m_h] for the first strata of some rounds; None of a run without strata.

    An opening round, in which all clients take part, draws none.
    """
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


def mediators(run: OneRun) -> list[dict[str, Any]] | None:
    """By round the five quartiles of KL(labels ‖ target) over mediators and participants; None without mediators."""
    recorded = [record for record in run.records if record.get("kl_quartiles")]
    found = [
        {
            "round": recorded[i]["round"] + 1,
            "mediators": rounded(recorded[i]["kl_quartiles"]),
            "participants": rounded(recorded[i].get("kl_client_quartiles") or []),
        }
        for i in thinned(range(len(recorded)), MOST_COLUMNS)
    ]
    return found or None


def view(run: OneRun, runs: int = 1) -> dict[str, Any] | None:
    """The scores of a run's clients after their last evaluation, worst first; None where they were not evaluated."""
    table = read_clients(run.folder)
    if not table:
        return None
    last = last_evaluation(table)
    order = np.argsort(last["accuracy"] if "accuracy" in last else -last["loss"], kind="stable")
    some = thinned(range(len(order)), min(MOST_POINTS, max(POINTS // max(runs, 1), 20)))
    columns = {name: rounded(column[order[some]].tolist()) for name, column in last.items() if name != "round"}
    return {"round": int(last["round"][0]) + 1, **columns}


def traffic(group: Configuration) -> dict[str, Any]:
    """Megabytes on each simulated link, and what MPI moved, mean over the configuration's runs."""
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
    """Seconds of each phase in a round, mean over all rounds of the configuration's runs."""
    records = [record for run in group.runs for record in run.records]
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get("phase_seconds") or {})
    return dict(zip(total, rounded(value / len(records) for value in total.values()), strict=True))


def ranks(run: OneRun) -> list[dict[str, Any]] | None:
    """Busy seconds of each rank that trains, mean over rounds, and its waiting for the slowest; None of one rank."""
    seconds = [r["busy_seconds"] for r in run.records if len(r.get("busy_seconds") or []) > 1]
    seconds = [
        busy for busy in seconds if len(busy) == len(seconds[-1])
    ]  # a resumed run may have had other ranks before
    if not seconds:
        return None
    busy = np.array(seconds, np.float64)
    training = np.flatnonzero(busy.any(axis=0))  # not the server, where it only serves
    busy = busy[:, training]
    waits = (busy.max(axis=1, keepdims=True) - busy).mean(axis=0)
    return [
        {"rank": k, "busy": b, "waiting": w}
        for k, b, w in zip(training.tolist(), rounded(busy.mean(axis=0)), rounded(waits), strict=True)
    ]


def warnings(runs: Sequence[OneRun]) -> list[dict[str, Any]]:
    """What the runs' logs warn of, the same words once: text, times, in which runs."""
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for text in _warned(run.folder / "run.log"):
            found.setdefault(text, Counter())[run.name] += 1
    rows = [{"text": text, "times": count.total(), "runs": sorted(count)} for text, count in found.items()]
    return sorted(rows, key=lambda row: found[str(row["text"])].total(), reverse=True)[:MOST_WARNINGS]


def _warned(log: Path) -> list[str]:
    return [text[:500] for level, text in read_log(log) if level in ("WARNING", "ERROR", "CRITICAL")]


def scores(records: Sequence[Record]) -> dict[str, float]:
    """The last of every score that was recorded, without those that were no finite number then."""
    last: dict[str, float | None] = {}
    for record in records:
        last |= {k: v for k, v in record.items() if k.startswith(SCORES)}
    return {k: v for k, v in last.items() if v is not None}
