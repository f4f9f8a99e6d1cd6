"""What the page shows of configurations and runs, as numbers: curves over seeds, costs, who took part, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpi.common.fairness import Usage, evenness
from fedmpi.common.types import Ints
from fedmpi.records.client_table import last_evaluation, read_clients
from fedmpi.records.history import LINKS, SCORES, Record, clients_from_text
from fedmpi.records.run_log import read_log
from fedmpi.results.comparison import AXES, Spread, first_reached, judged, rises, spent, up_to
from fedmpi.results.loading import OF_NO_MATTER, OneRun, SeedGroup, blocks_of


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed only."""

    label: str  # What tells it from all others, its data included where these differ
    # {"part.key": value} of its first run, without keys that change nothing about what is learned
    table: dict[str, Any]
    runs: tuple[OneRun, ...]  # By seed


def configurations(runs: Sequence[OneRun]) -> tuple[list[Configuration], list[str]]:
    """The configurations of some runs, as `fedmpi compare` groups them, and what it warns of."""
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
    """As much of a group's name as tells it from the others."""
    own = group.words
    for count in range(1, len(own)):
        if sum(other.words[:count] == own[:count] for other in groups) == 1:
            return ", ".join(own[:count])
    return group.label


def _table(run: OneRun) -> dict[str, Any]:
    return {key: value for key, value in run.table.items() if key != "seed" and not key.startswith(OF_NO_MATTER)}


MOST_ROUNDS = 250
"""Rounds of a configuration that are drawn; of more, some evenly spread, evaluated ones first."""
DIGITS = 5
"""Significant digits of what the page holds."""
NOT_DRAWN = ("round", "opening")
TARGETS = 40
"""Accuracies for which the cost is told."""
TITLES = {
    "test_accuracy": "test accuracy",
    "val_accuracy": "validation accuracy",
    "test_macro_f1": "test macro-F1",
    "val_macro_f1": "validation macro-F1",
    "test_perplexity": "test perplexity",
    "val_perplexity": "validation perplexity",
    "test_mean_average_precision": "test mean average precision",
    "val_mean_average_precision": "validation mean average precision",
    "test_mae": "test MAE",
    "val_mae": "validation MAE",
    "test_rmse": "test RMSE",
    "val_rmse": "validation RMSE",
    "test_r2": "test R²",
    "val_r2": "validation R²",
    "test_loss": "test loss",
    "val_loss": "validation loss",
    "train_loss": "training loss",
    **{
        f"client_{score}_{part}": f"{words}, {name}"
        for score, words in (
            ("accuracy", "clients' accuracy"),
            ("tuned_accuracy", "fine-tuned clients' accuracy"),
            ("loss", "clients' loss"),
            ("tuned_loss", "fine-tuned clients' loss"),
        )
        for part, name in (
            ("mean", "mean"),
            ("worst10", "worst 10 %"),
            ("best10", "best 10 %"),
            ("std", "deviation"),
            ("weighted", "weighted by samples"),
            ("jain", "Jain's index"),
        )
    },
    "lr": "local learning rate",
    "samples": "samples of the round",
    "steps": "steps of the round",
    "participants": "participants",
    "asked": "clients asked",
    "available": "clients that are there",
    "seconds": "seconds of the round",
    "virtual_seconds": "virtual seconds of the round",
    "size_ratio": "estimated size / true size",
    "size_estimate": "estimated size",
    "size_true": "true size",
    "size_asked": "clients asked for their size",
    "sampling_probability": "probability of a sample",
    "clipped_fraction": "share of clipped answers",
    "strata": "strata",
    "client_use_gini": "Gini coefficient of the clients' use",
    "client_use_effective": "effective share of clients used (Kish)",
    "clients_used": "share of clients used so far",
    "update_epsilon": "ε of the updates so far",
    "size_epsilon_max": "ε of the sizes so far, largest",
    "size_epsilon_mean": "ε of the sizes so far, mean",
    "rank_balance": "mean / largest busy time of the ranks",
    "kl_mean": "KL of the mediators' labels, mean",
    "kl_client_mean": "KL of the participants' labels, mean",
    "bytes_client_up": "bytes from clients in the round",
    "bytes_client_down": "bytes to clients in the round",
    "bytes_mediator_up": "bytes from mediators in the round",
    "bytes_mediator_down": "bytes to mediators in the round",
}
"""Names of what records tell; others are shown as they are."""


def rounded(values: Iterable[float | None]) -> list[float | int | None]:
    """Numbers as the page holds them, to `DIGITS` significant digits; None for what is no finite number."""
    return [_short(value) for value in values]


def _short(value: float | None) -> float | int | None:
    if value is None or not np.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def thinned(rounds: Sequence[int], most: int) -> list[int]:
    """At most `most` of some rounds, evenly spread, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))]


def completed(run: OneRun) -> list[Record]:
    """The records with what follows from them: evenness of use so far, balance of the ranks, error of the size."""
    clients = int(run.summary.get("clients") or 0)  # not known of a run that is not finished
    usage, made = Usage(clients or _clients_seen(run.records)), []
    with_clients = {record["round"] for record in run.records if "clients" in record}
    even = set(_drawn([run.records]))
    for record in run.records:
        further: Record = {}
        if record["round"] in with_clients:
            usage.record(clients_from_text(record["clients"]))
        if clients and record["round"] in even and len(with_clients) == len(run.records):
            spread = evenness(usage.clients)
            further = {
                "clients_used": spread.used,
                "client_use_effective": spread.effective,
                "client_use_gini": spread.gini,
            }
        if record.get("size_true") and record.get("size_estimate") is not None:
            further["size_ratio"] = record["size_estimate"] / record["size_true"]
        busy = [seconds for seconds in record.get("busy_seconds") or [] if seconds > 0]  # the server may only serve
        if len(busy) > 1:
            further["rank_balance"] = float(np.mean(busy)) / max(busy)
        made.append({**further, **record})
    return made


def _clients_seen(records: Sequence[Record]) -> int:
    return 1 + max(
        (int(clients_from_text(record["clients"]).max(initial=-1)) for record in records if "clients" in record),
        default=0,
    )


def curves(runs: Sequence[list[Record]]) -> dict[str, Any]:
    """One configuration's numbers by round: `x` by axis, and of every key mean and deviation over its runs."""
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
                    if t in where and _number(r[where[t]].get(key))
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
    """All rounds; of very many, as many of those that were evaluated as there may be, and others between them."""
    every = sorted({record["round"] for records in runs for record in records})
    if len(every) <= MOST_ROUNDS:
        return every
    judge = judged(runs[0])
    scored = sorted({record["round"] for records in runs for record in records if judge in record})
    if len(scored) >= MOST_ROUNDS:
        return thinned(scored, MOST_ROUNDS)
    return sorted({*scored, *thinned(every, MOST_ROUNDS - len(scored))})


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(runs: Sequence[list[Record]]) -> list[str]:
    """What is drawn: keys of numbers, those with a name of their own first."""
    keys = {key for records in runs for record in records for key, value in record.items() if _number(value)}
    keys -= set(NOT_DRAWN)
    return [key for key in TITLES if key in keys] + sorted(keys - TITLES.keys())


def targets(groups: Sequence[Configuration]) -> dict[str, Any]:
    """What each configuration spends up to each of some accuracies, evenly spread up to the best of all.

    Of a task without accuracy they are losses, which are come down to: from the highest first one to the lowest of all.
    """
    runs = [[run.records for run in group.runs] for group in groups]
    key = judged([record for records in runs for one in records for record in one])
    if not rises(key):
        return _losses(key, runs)
    best = [[max((r.get(key) or 0.0 for r in one), default=0.0) for one in records] for records in runs]
    highest = max((value for values in best for value in values), default=0.0)
    if highest <= 0:
        return {}
    wanted = [run.table.get("evaluation.target_accuracy") for group in groups for run in group.runs]
    set_by_user = [float(value) for value in wanted if value is not None]
    levels = sorted({round(float(level), 3) for level in np.linspace(0, highest, TARGETS + 1)[1:]} | set(set_by_user))
    levels = [level for level in levels if level <= highest or level in set_by_user]
    every = sorted(value for values in best for value in values)
    reached = [level for level in levels if level <= every[(len(every) - 1) // 2]]
    default = max(set_by_user, default=reached[-1] if reached else levels[0])
    return {"key": key, "rises": True, "levels": levels, "default": default, "costs": _spending(key, runs, levels)}


def _losses(key: str, runs: Sequence[Sequence[list[Record]]]) -> dict[str, Any]:
    """As `targets`, of a loss."""
    losses = [[r[key] for r in one if r.get(key) is not None] for records in runs for one in records]
    known = [values for values in losses if values]
    if not known:
        return {}
    lowest, first = min(map(min, known)), max(values[0] for values in known)
    spread = (float(f"{level:.{DIGITS}g}") for level in np.linspace(first, lowest, TARGETS + 1)[1:])
    levels = sorted({level for level in spread if level >= lowest} | {lowest})
    every = sorted((min(values, default=np.inf) for values in losses), reverse=True)
    reached = [level for level in levels if level >= every[(len(every) - 1) // 2]]
    default = reached[0] if reached else levels[-1]
    return {"key": key, "rises": False, "levels": levels, "default": default, "costs": _spending(key, runs, levels)}


def _spending(key: str, runs: Sequence[Sequence[list[Record]]], levels: Sequence[float]) -> list[dict[str, Any]]:
    """What each configuration's runs had spent when they reached each of some levels."""
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
