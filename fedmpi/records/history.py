"""History of a run on rank 0: records, scores and summary; and the same read again from the run folder."""

from __future__ import annotations

import json
import math
import os
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.common.apportionment import places_within
from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.task_kinds import KINDS
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.records.tables import TABLES, Columns, concatenated
from fedmpi.updates.traffic import cost_to_target

Record = dict[str, Any]
SCORES = ("test_", "val_", "client_accuracy_", "client_loss_", "client_tuned_", "client_personal_")
"""Prefixes of the names of scores."""
SPENT = ("update_epsilon", "size_epsilon_max", "size_epsilon_mean")
"""Keys of the privacy spent so far."""
LINKS = ("client_up", "client_down", "mediator_up", "mediator_down")


class BestRound:
    """Best of the rounds added so far, and the evaluations since the last improvement (`evaluation.patience`).

    Rounds are ranked by accuracy, or by loss in a regression: on the validation samples if a round was evaluated on
    them, else on the test set.
    """

    def __init__(self, config: Config, records: Iterable[Record] = ()):
        self._kind, self._table = KINDS[config.task.kind], config.evaluation
        self._begin("test")
        for record in records:
            self.add(record)

    def _begin(self, part: str) -> None:
        self.part, self.key = part, f"{part}_{self._kind.score}"
        self.record: Record = {}  # of the best round
        self.waited = 0
        self._best = self._improved = -math.inf

    def add(self, record: Record) -> bool:
        """Add the next round, unless it was not evaluated; return whether it is the best so far."""
        if self.part == "test" and f"val_{self._kind.score}" in record:
            self._begin("val")
        if self.key not in record:
            return False
        score = json_value(record[self.key])
        value = -math.inf if score is None else score if self._kind.higher else -score
        self.waited += 1
        if value > self._improved + self._table.min_delta:
            self._improved, self.waited = value, 0
        if better := value > self._best:
            self._best, self.record = value, record
        return better

    @property
    def patience_left(self) -> float:
        """Number of further evaluations without an improvement that end the run."""
        return math.inf if self._table.patience is None else self._table.patience - self.waited

    @property
    def exhausted(self) -> bool:
        """Check whether the run should end, since the score no longer improves."""
        return self.patience_left <= 0

    @property
    def reason(self) -> str:
        """Reason for the end of the run, in words."""
        return f"{self.key} has not improved by more than {self._table.min_delta:g} in {self.waited} evaluations"


class History:
    """Finished rounds of a run, and their summary."""

    def __init__(self, config: Config):
        self.config = config
        self.lines: list[bytes] = []  # The records, as in metrics.jsonl
        self.tables: dict[str, list[Columns]] = {name: [] for name in TABLES}  # Rows that are in no file yet
        self.seconds_before = 0.0
        self._started = time.perf_counter()

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return len(self.lines)

    @property
    def seconds(self) -> float:
        """Seconds since the run began, without interruptions."""
        return self.seconds_before + time.perf_counter() - self._started

    @property
    def records(self) -> list[Record]:
        """The records as JSON holds them."""
        return [json.loads(line) for line in self.lines]

    def take_tables(self) -> dict[str, Columns]:
        """Return the rows of each table that are in no file; the caller writes them."""
        taken = {name: concatenated(parts) for name, parts in self.tables.items()}
        self.tables = {name: [] for name in TABLES}
        return taken

    def summary(self, facts: Record) -> Record:
        """Return final and best scores, seconds, samples, privacy and bytes of the whole run, and the given facts."""
        records = self.records
        found, kind = BestRound(self.config, records), KINDS[self.config.task.kind]
        best, parts = found.record, dict.fromkeys(("test", found.part))
        scored = [place for place, record in enumerate(records) if record.get(found.key) is not None]
        last = {name: value for record in records[scored[-1] if scored else 0 :] for name, value in record.items()}
        links = {link: _total(records, f"bytes_{link}") for link in (*LINKS, "paper_formula")}
        summary: Record = {
            "final": {k: v for k, v in last.items() if k.startswith(SCORES) or k in ("round", "train_loss")},
            **{f"best_{part}_{kind.score}": best.get(f"{part}_{kind.score}") for part in parts},
            "best_round": best.get("round"),
            "best_chosen_on": found.part,
            "wall_seconds": self.seconds,
            **{f"{work}_total": _total(records, work) for work in ("samples", "steps")},
            **{name: record[name] for record in records for name in SPENT if name in record},
            "bytes_total": sum(links[link] for link in LINKS),
            **{f"bytes_{link}": count for link, count in links.items() if count},
            **facts,
        }
        if (target := self.config.evaluation.target_accuracy) is not None:
            accuracies = [record.get("test_accuracy", record.get("val_accuracy")) for record in records]
            sent = [sum(_total([record], f"bytes_{link}") for link in LINKS) for record in records]
            cost = cost_to_target(accuracies, sent, target)  # Astraea, Table III
            summary["target_accuracy"] = target
            summary["rounds_to_target"] = cost.rounds if cost else None
            summary["megabytes_to_target"] = cost.megabytes if cost else None
        return dict(json_value(summary))


def _total(records: Sequence[Record], key: str) -> int:
    return sum(int(record.get(key) or 0) for record in records)


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
    return np.repeat(first, lengths) + places_within(lengths)


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
    """Return whether a run with a summary finished all rounds or ended earlier."""
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
