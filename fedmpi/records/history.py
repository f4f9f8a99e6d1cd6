"""History of a run on rank 0: records, scores and summary; and the same read again from the run folder.

With a run folder the records are in RUN/metrics.jsonl; without one they are kept here, each as its line.
"""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.task_kinds import KINDS
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.records.tables import Columns
from fedmpi.updates.traffic import cost_to_target

Record = dict[str, Any]
SCORES = ("test_", "val_", "client_accuracy_", "client_loss_", "client_tuned_")
"""Prefixes of the names of scores."""
SPENT = ("update_epsilon", "size_epsilon_max", "size_epsilon_mean")
"""Keys of the privacy spent so far."""
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


class History:
    """Finished rounds of a run, and their summary."""

    def __init__(self, config: Config, keeps: bool):
        self.config = config
        self._kind = KINDS[config.task.kind]
        self.rounds = 0
        self.seconds_before = 0.0
        self.changes: list[str] = []
        self.clients: list[Columns] = []
        self._started = time.perf_counter()
        self._lines: list[bytes] | None = [] if keeps else None
        self._judge = "test"  # until a record has a score on validation samples
        self._best: Record = {}
        self._last: Record = {}
        self._accuracies: list[float | None] = []
        self._round_bytes: list[int] = []
        self._links = dict.fromkeys((*LINKS, "paper_formula"), 0)
        self._work = {"samples": 0, "steps": 0}
        self._spent: Record = {}

    @property
    def seconds(self) -> float:
        """Seconds since the run began, without interruptions."""
        return self.seconds_before + time.perf_counter() - self._started

    @property
    def records(self) -> list[Record]:
        """Copies of the records in memory."""
        return [json.loads(line) for line in self._lines or ()]

    def see(self, clients: Columns) -> None:
        """Add the evaluation of single clients after a round."""
        if self._lines is not None:
            self.clients.append(clients)

    def add(self, record: Record) -> None:
        """Add a finished round."""
        self.rounds += 1
        if self._lines is not None:
            self._lines.append(as_line(record))
        score = self._kind.score
        self._judge = "val" if f"val_{score}" in record else self._judge
        judged = record.get(f"{self._judge}_{score}")
        self._last = {**self._last, **record} if judged is None else record
        for link in self._links:
            self._links[link] += int(record.get(f"bytes_{link}", 0))
        for kind in self._work:
            self._work[kind] += int(record.get(kind) or 0)
        self._spent |= {key: record[key] for key in SPENT if key in record}
        self._accuracies.append(record.get("test_accuracy", record.get("val_accuracy")))
        self._round_bytes.append(sum(int(record.get(f"bytes_{link}", 0)) for link in LINKS))
        best = self._best.get(f"{self._judge}_{score}")
        if judged is not None and (best is None or (judged > best if self._kind.higher else judged < best)):
            self._best = record

    def summary(self, facts: Record) -> Record:
        """Return final and best scores, seconds, samples, privacy and bytes of the whole run, and the given facts."""
        parts, score = dict.fromkeys(("test", self._judge)), self._kind.score
        summary: Record = {
            "final": {k: v for k, v in self._last.items() if k.startswith(SCORES) or k in ("round", "train_loss")},
            **{f"best_{part}_{score}": self._best.get(f"{part}_{score}") for part in parts},
            "best_round": self._best.get("round"),
            "best_chosen_on": self._judge,
            "wall_seconds": self.seconds,
            **{f"{kind}_total": count for kind, count in self._work.items()},
            **self._spent,
            "bytes_total": sum(self._round_bytes),
            **{f"bytes_{link}": count for link, count in self._links.items() if count},
            **({"changes": self.changes} if self.changes else {}),
            **facts,
        }
        if self.config.evaluation.target_accuracy is not None:
            summary["target_accuracy"] = self.config.evaluation.target_accuracy
            summary |= self._cost_to_target(self.config.evaluation.target_accuracy)
        return dict(json_value(summary))

    def _cost_to_target(self, target: float) -> Record:
        """Return rounds and megabytes up to the first evaluation that reached the target (Astraea, Table III)."""
        cost = cost_to_target(self._accuracies, self._round_bytes, target)
        return {
            "rounds_to_target": cost.rounds if cost else None,
            "megabytes_to_target": cost.megabytes if cost else None,
        }


def as_line(record: Record) -> bytes:
    """Return the record as one line of strict JSON."""
    return json.dumps(json_value(record), allow_nan=False).encode() + b"\n"


def json_value(value: Any) -> Any:
    """Return the value for strict JSON: infinite numbers and NaN become null."""
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def clients_as_text(clients: Ints) -> str:
    """Return sorted, distinct clients (m,) as text such as "0-3 7"; "" for none."""
    if not len(clients):
        return ""
    first = np.flatnonzero(np.diff(clients, prepend=clients[0] - 2) != 1)
    last = np.append(first[1:], len(clients)) - 1
    runs = zip(clients[first].tolist(), clients[last].tolist(), strict=True)
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def clients_from_text(text: str) -> Ints:
    """Return the clients (m,) of a text made by `clients_as_text`."""
    ends = [run.split("-") for run in text.split()]
    first = np.array([int(run[0]) for run in ends], np.int64)
    lengths = np.array([int(run[-1]) for run in ends], np.int64) + 1 - first
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def read_records(folder: Path, rounds: int | None = None) -> list[Record]:
    """Return the first `rounds` records in RUN/metrics.jsonl, or all; an incomplete last line is ignored."""
    path = folder / "metrics.jsonl"
    with _readable(path):
        lines = read_plain(path).splitlines(keepends=True)[:rounds] if os.path.lexists(path) else []
        return [dict(json.loads(line)) for line in lines if line.endswith(b"\n")]


def read_summary(path: Path) -> Record:
    """Return the summary in RUN/summary.json, or a sweep's note beside it; empty if there is none."""
    with _readable(path):
        return dict(json.loads(read_plain(path))) if os.path.lexists(path) else {}


def ending_of(summary: Record, path: Path) -> Literal["finished", "ended"]:
    """Return whether a run with a summary finished all rounds, or `on_round` ended it earlier."""
    with _readable(path):
        rounds = tomllib.loads(read_plain(path).decode()).get("rounds", 0)
    return "ended" if summary.get("final", {}).get("round", rounds) + 1 < rounds else "finished"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Report a damaged file in one sentence."""
    try:
        yield
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
