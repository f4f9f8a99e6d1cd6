"""Numbers of the runs in a report: curves, participation, strata, last scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedmpi.common.fairness import evenness
from fedmpi.common.types import Ints
from fedmpi.records.history import SCORES, Record, clients_from_text
from fedmpi.records.progress import is_number
from fedmpi.results.comparison import judged, spent
from fedmpi.results.loading import OneRun

MOST_ROUNDS = 250
"""Largest number of drawn rounds of a run."""
MOST_ROWS, MOST_COLUMNS = 64, 100
"""Largest size of a heat map."""
WORDS = {"_": " ", "epsilon": "ε", "kl": "KL", "virtual": "simulated", "size ratio": "estimated size / true size"}
"""Words of the report for parts of a record key."""


def key_title(key: str) -> str:
    """Return the name of a record key: "test accuracy" of "test_accuracy"."""
    for part, words in WORDS.items():
        key = key.replace(part, words)
    return key


def thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` of some values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def drawn_rounds(runs: Sequence[OneRun]) -> set[int]:
    """Return the rounds of a configuration that are drawn: of more than `MOST_ROUNDS` only evaluated ones."""
    records = [record for run in runs for record in run.records]
    rounds, key = {record["round"] for record in records}, judged(records)
    if len(rounds) > MOST_ROUNDS:
        rounds = {record["round"] for record in records if key in record} or rounds
    return set(thinned(sorted(rounds), MOST_ROUNDS))


def curves(run: OneRun, rounds: set[int]) -> dict[str, Any]:
    """Return the numbers of some rounds: `x` by axis, `y` by key."""
    places = [place for place, record in enumerate(run.records) if record["round"] in rounds]
    records = [{**run.records[place], "size_ratio": _size_ratio(run.records[place])} for place in places]
    keys = {key for record in records for key, value in record.items() if is_number(value)}
    y = {key: [record.get(key) for record in records] for key in sorted(keys - {"round", "opening"})}
    return {"x": {axis: values[places].tolist() for axis, values in spent(run.records).items()}, "y": y}


def _size_ratio(record: Record) -> float | None:
    found, true = record.get("size_estimate"), record.get("size_true")
    return found / true if found is not None and true else None


def scores(records: Sequence[Record], beginnings: tuple[str, ...] = SCORES) -> dict[str, float | None]:
    """Return the last value of every score whose key begins in this way; None if it is not finite."""
    return {key: value for record in records for key, value in record.items() if key.startswith(beginnings)}


def participation(run: OneRun) -> dict[str, Any] | None:
    """Return the selected clients by round, in bins if there are many; None if they were not recorded.

    A heat map has the edges of its rows and rounds, and for each row the shares of clients that were drawn, by round.
    """
    recorded = [record for record in run.records if "clients" in record]
    if not recorded:
        return None
    cohorts = [clients_from_text(record["clients"]) for record in recorded]
    known = int(run.summary.get("clients") or 0)
    clients = known or 1 + max(int(c.max(initial=0)) for c in cohorts)
    rows, columns = _edges(clients, MOST_ROWS), _edges(len(recorded), MOST_COLUMNS)
    selected, times = np.concatenate(cohorts), np.repeat(np.arange(len(cohorts)), [len(cohort) for cohort in cohorts])
    drawn, _, _ = np.histogram2d(selected, times, (rows, columns))
    whole = known and len(recorded) == len(run.records)  # else it is unknown who never participated
    return {
        "rows": rows.tolist(),
        "rounds": [recorded[i]["round"] + 1 for i in columns[:-1]] + [recorded[-1]["round"] + 2],
        "share": (drawn / np.outer(np.diff(rows), np.diff(columns))).tolist(),
        "binary": len(rows) > clients and len(columns) > len(recorded),
        "evenness": vars(evenness(np.bincount(selected, minlength=clients))) if whole else None,
    }


def _edges(values: int, most: int) -> Ints:
    """Return the edges of at most `most` bins of equal width, except the last, over so many values."""
    return np.append(np.arange(0, values, -(-values // most), dtype=np.int64), values)


def strata(run: OneRun) -> dict[str, Any] | None:
    """Return the share m_h / N_h of drawn clients of each stratum, by round, as a heat map; None without strata."""
    some = thinned([record for record in run.records if record.get("allocation")], MOST_COLUMNS)
    if not some:
        return None
    shares = np.full((MOST_ROWS, len(some)), np.nan)
    for place, record in enumerate(some):
        drawn, sizes = (np.array(record[key][:MOST_ROWS]) for key in ("allocation", "stratum_sizes"))
        shares[: len(drawn), place] = drawn / np.maximum(sizes, 1)
    shares = shares[~np.isnan(shares).all(axis=1)]
    rounds = [record["round"] + 1 for record in some]
    return {"rows": [*range(1, len(shares) + 2)], "rounds": [*rounds, rounds[-1] + 1], "share": shares.tolist()}
