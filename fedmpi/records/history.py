"""What a run has come to: its records, the best and the last scores, the bytes, and the summary made of them (rank 0).

With a run folder the records lie in RUN/metrics.jsonl; without one they are kept here, each as the line it would be.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

from fedmpi.common.task_kinds import KINDS
from fedmpi.config import Config
from fedmpi.records.client_table import Columns
from fedmpi.updates.traffic import cost_to_target

Record = dict[str, Any]
SCORES = ("test_", "val_", "client_accuracy_", "client_loss_", "client_tuned_")
"""How names of scores begin."""
SPENT = ("update_epsilon", "size_epsilon_max", "size_epsilon_mean")
"""Privacy that a record says has been spent so far."""
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


class History:
    """The finished rounds of a run, and what is told about them in the end."""

    def __init__(self, config: Config, keeps: bool):
        self.config = config
        self._kind = KINDS[config.task.kind]
        self.rounds = 0
        self.seconds_before = 0.0
        self.changes: list[str] = []
        self.clients: list[Columns] = []
        self._started = time.perf_counter()
        self._lines: list[bytes] | None = [] if keeps else None
        self._judge = "test"  # until a record tells a score on validation samples
        self._best: Record = {}
        self._last: Record = {}
        self._accuracies: list[float | None] = []
        self._round_bytes: list[int] = []
        self._links = dict.fromkeys((*LINKS, "paper_formula"), 0)
        self._work = {"samples": 0, "steps": 0}
        self._spent: Record = {}

    @property
    def seconds(self) -> float:
        """Since the run began, interruptions left out."""
        return self.seconds_before + time.perf_counter() - self._started

    @property
    def records(self) -> list[Record]:
        """Copies of the records that are kept."""
        return [json.loads(line) for line in self._lines or ()]

    def see(self, clients: Columns) -> None:
        """Take in what was found out about single clients after a round."""
        if self._lines is not None:
            self.clients.append(clients)

    def add(self, record: Record) -> None:
        """Take in one finished round."""
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
        """Final and best scores, seconds, samples, privacy, bytes over the whole run, and the facts of the run."""
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
        """Rounds and megabytes up to the first evaluation that reached the target (Astraea, Table III)."""
        cost = cost_to_target(self._accuracies, self._round_bytes, target)
        return {
            "rounds_to_target": cost.rounds if cost else None,
            "megabytes_to_target": cost.megabytes if cost else None,
        }


def as_line(record: Record) -> bytes:
    """The record as one line of strict JSON, its end included."""
    return json.dumps(json_value(record), allow_nan=False).encode() + b"\n"


def json_value(value: Any) -> Any:
    """The value as strict JSON can hold it: numbers that are infinite or not a number become null."""
    if isinstance(value, dict):
        return {key: json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
