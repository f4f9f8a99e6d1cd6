"""History of a run on rank 0: records, scores and summary; and the same read again from the run folder.

With a run folder the records are in RUN/metrics.jsonl; without one they are kept here, each as its line.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import tomllib
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.files import read_plain
from fedmpi.common.task_kinds import KINDS
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.records.client_table import Columns
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
    if any(len(run) > 2 for run in ends):
        raise ValueError(f"{text[:40]!r} does not name clients")
    first = np.array([int(run[0]) for run in ends], np.int64)
    lengths = np.array([int(run[-1]) for run in ends], np.int64) + 1 - first
    if (lengths < 1).any():
        raise ValueError(f"{text[:40]!r} does not name clients in ascending order")
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(lengths.sum())


def largest_client(text: str) -> int:
    """Return the largest client in such a text; -1 for none."""
    return max(map(int, re.findall(r"\d+", text)), default=-1)


LISTS = ("busy_seconds", "kl_quartiles", "kl_client_quartiles", "stratum_sizes", "allocation")
"""Numbers of a round's ranks, mediators and strata."""
NUMBERS = re.compile(
    r"(virtual_)?seconds|wall_seconds|bytes_.+|samples|participants|train_loss|size_(true|estimate)|best_round"
    r"|(best_)?(test|val)_.+|client_(tuned_)?(accuracy|loss)_.+|(rounds|megabytes)_to_target"
)
"""Keys of numbers in records and summaries."""
PARTICIPANTS = re.compile(r"(?a:(\d{1,12}(-\d{1,12})?( |$))*)")
LARGEST = 2**63
"""Bound of integers: no count comes close to it, and a float can represent it."""


def read_records(folder: Path, rounds: int | None = None) -> list[Record]:
    """Return the first `rounds` records in RUN/metrics.jsonl, or all; an incomplete last line is ignored."""
    path = folder / "metrics.jsonl"
    try:
        lines = read_plain(path).splitlines(keepends=True)[:rounds] if os.path.lexists(path) else []
        return [read_record(line) for line in lines if line.endswith(b"\n")]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def read_summary(path: Path) -> Record:
    """Return the summary in RUN/summary.json, or a sweep's note beside it; empty if there is none."""
    try:
        return _summary(json.loads(read_plain(path).decode("utf-8"))) if os.path.lexists(path) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None


def ending_of(summary: Record, path: Path) -> Literal["finished", "ended"]:
    """Return whether a run with a summary finished all rounds, or `on_round` ended it earlier."""
    try:
        rounds = tomllib.loads(read_plain(path).decode("utf-8")).get("rounds", 0)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    final = summary.get("final", {})
    last = final.get("round", rounds) if isinstance(final, dict) else None
    if not isinstance(rounds, int) or not isinstance(last, int):
        raise UserError(f"{path} and summary.json beside it do not say how many rounds there were: they are damaged")
    return "ended" if last + 1 < rounds else "finished"


def read_record(line: bytes) -> Record:
    """Return the record in a line of RUN/metrics.jsonl."""
    record = _table(json.loads(line))
    round = record.get("round")
    if not isinstance(round, int) or not _is_number(round):
        raise ValueError(f"round = {round!r} in a record")
    _check(record, f" in the record of round {round}")
    clients, strata = record.get("clients", ""), record.get("stratum_sizes") or []
    if not isinstance(clients, str) or PARTICIPANTS.fullmatch(clients) is None:
        raise ValueError(f"clients = {clients!r} in the record of round {round}")
    if (allocation := record.get("allocation")) and len(strata) != len(allocation):
        raise ValueError(f"{len(strata)} stratum_sizes and {len(allocation)} in allocation of round {round}")
    return record


def _summary(read: Any) -> Record:
    summary = _table(read)
    final, moved, clients = summary.get("final"), summary.get("mpi_bytes", {"total": 0}), summary.get("clients", 1)
    _check({**(final if isinstance(final, dict) else {}), **summary})
    if not isinstance(moved, dict) or not _is_number(moved.get("total")):
        raise ValueError(f"mpi_bytes = {moved!r}")
    if isinstance(clients, int) and not 0 < clients < LARGEST:
        raise ValueError(f"clients = {clients!r}")
    return summary


def _check(table: Record, where: str = "") -> None:
    """Require numbers where reports expect them. None means no number."""
    for key, value in table.items():
        if value is None:
            continue
        if key in LISTS:
            right = isinstance(value, list) and all(map(_is_number, value))
        elif key == "phase_seconds":
            right = isinstance(value, dict) and all(map(_is_number, value.values()))
        else:
            right = NUMBERS.fullmatch(key) is None or _is_number(value)
        if not right:
            raise ValueError(f"{key} = {value!r}{where}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) >= LARGEST


def _table(read: Any) -> Record:
    if not isinstance(read, dict):
        raise ValueError(f"there is {str(read)[:20]!r} where keys and values should be")
    return read
