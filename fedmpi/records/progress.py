"""Progress of a run: a bar on a terminal, otherwise a line every few seconds; and the table at its end."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from fedmpi.common.errors import UNWRITABLE
from fedmpi.common.terminal import console, on_terminal, paragraph, readable_duration

log = logging.getLogger("fedmpi")

ROUNDS_OF_OUTLOOK, SECONDS_OF_OUTLOOK = 5, 60.0
"""Rounds, or their seconds, after which the duration of a run is estimated."""
LONG_WORK = 2 * 86_400.0
"""Remaining seconds from which a run is worth a warning."""
MEASURED = {
    "macro_f1": "macro-F1",
    "perplexity": "perplexity",
    "mean_average_precision": "mean average precision",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R²",
}


class RoundDisplay(Protocol):
    """Display of finished rounds."""

    def update(self, record: dict[str, Any]) -> None:
        """Show a finished round."""

    def close(self) -> None:
        """End the display."""


def open_display(rounds: int, first: int, interval: float, launched: bool = False) -> RoundDisplay:
    """Return a bar if standard output is the user's terminal, plain lines otherwise."""
    return _Bar(rounds, first) if on_terminal() and not launched else _Lines(rounds, first, interval)


class _Bar:
    """Line at the bottom that is redrawn; other output appears above it."""

    def __init__(self, rounds: int, first: int):
        place = Column(no_wrap=True, min_width=len(f"round {rounds}/{rounds}"))  # narrow terminals cut the facts
        shown = TextColumn("round {task.completed}/{task.total}", table_column=place)
        columns = (shown, BarColumn(12), "{task.fields[facts]}", TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, console=console())
        self._task = self._progress.add_task("", total=rounds, completed=first, facts="")
        self._progress.start()

    def update(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=record["round"] + 1, facts="  ".join(_facts(record)))

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, rounds: int, first: int, interval: float):
        self._rounds, self._first, self._interval = rounds, first, interval
        self._started, self._shown = time.perf_counter(), float("-inf")

    def update(self, record: dict[str, Any]) -> None:
        now, done = time.perf_counter(), record["round"] + 1
        if now - self._shown < self._interval and done < self._rounds:
            return
        times, seconds = [], now - self._started
        if done == self._rounds:
            times = [f"{readable_duration(seconds)} in all"]
        elif self._shown > 0:  # the first line has nothing to estimate from
            times = [f"{readable_duration(seconds / max(1, done - self._first) * (self._rounds - done))} left"]
        self._shown = now
        print("  ".join([f"round {done}/{self._rounds}", *_facts(record), *times]), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


def _facts(record: dict[str, Any]) -> list[str]:
    facts = [f"loss {record['train_loss']:.4f}"] if record.get("train_loss") is not None else []
    for part, name in (("test", ""), ("val", "validation ")):
        if f"{part}_accuracy" in record:
            facts.append(f"{name}accuracy {_number(record[f'{part}_accuracy'])}")
        elif f"{part}_loss" in record:
            facts.append(f"{name or 'test '}loss {_number(record[f'{part}_loss'])}")
    if record.get("seconds") and record.get("participants") is not None:
        facts.append(f"{record['participants'] / record['seconds']:.0f} clients/s")
    return facts


class Outlook:
    """Warning after the first rounds if the rest of a run will take days."""

    def __init__(self, rounds: int, first: int):
        self._rounds, self._warned = rounds, False
        self._seconds: list[float] = []

    def update(self, record: dict[str, Any]) -> None:
        """Add a finished round; the first, which loads, does not count if there are others."""
        if self._warned:
            return
        self._seconds.append(record["seconds"])
        done, rounds = record["round"] + 1, self._seconds[1:] or self._seconds
        if len(self._seconds) < ROUNDS_OF_OUTLOOK and sum(self._seconds) < SECONDS_OF_OUTLOOK:
            return
        self._warned = True
        each = sum(rounds) / len(rounds)
        if (left := each * (self._rounds - done)) > LONG_WORK:
            log.warning(
                "%s of %s rounds are left, at %.3g s each about %s: set fewer rounds, or count on --resume",
                f"{self._rounds - done:,}",
                f"{self._rounds:,}",
                each,
                readable_duration(left),
            )


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print fedmpi's warnings on standard error within the context."""
    handler, log = TerminalWarnings(), logging.getLogger("fedmpi")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class TerminalWarnings(logging.Handler):
    """Handler that prints warnings on standard error, above a progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning; the stream is looked up now because the progress bar exchanges it."""
        with suppress(*UNWRITABLE):  # full, or closed: no reason to end a run
            sys.stderr.write(f"warning: {record.getMessage()}\n")  # in one piece, as the guard's
            sys.stderr.flush()


def show_summary(summary: dict[str, Any], folder: str) -> None:
    """Print the table at the end of a run, and where its results are."""
    table = Table(show_header=False)
    final = summary["final"]
    rows = {
        "rounds": final.get("round", -1) + 1,
        **_scores(summary),
        **_of_clients(summary),
        "wall time": readable_duration(summary["wall_seconds"]),
        "ranks": summary["ranks"],
        "simulated traffic": f"{summary['bytes_total'] / 1e6:.1f} MB",
        "moved by MPI": f"{summary['mpi_bytes']['total'] / 1e6:.1f} MB",
    }
    if "target_accuracy" in summary:
        reached = summary["rounds_to_target"]
        rows["rounds to target"] = "not reached" if reached is None else reached
        if reached is not None:
            rows["traffic to target"] = f"{summary['megabytes_to_target']:.1f} MB"
    for name, value in rows.items():
        table.add_row(name, str(value))
    console().print(table)
    print(paragraph(f"results in {folder}: metrics.jsonl (the rounds), model.safetensors, summary.json, run.log"))


def _scores(summary: dict[str, Any]) -> dict[str, str]:
    """Return final scores on each evaluated part, and the best round."""
    final, rows = summary["final"], {}
    best = f"round {(summary['best_round'] or 0) + 1}"
    best += ", the best on validation" if summary["best_chosen_on"] == "val" else ""
    for part, name in (("test", "test"), ("val", "validation")):
        score = "accuracy" if f"{part}_accuracy" in final else "loss"
        if f"{part}_{score}" in final:
            rows[f"{name} {score}"] = _number(final[f"{part}_{score}"])
            rows[f"best {name} {score}"] = f"{_number(summary[f'best_{part}_{score}'])} ({best})"
        if score == "accuracy":
            rows[f"{name} loss"] = _number(final.get(f"{part}_loss"))
        for key, title in MEASURED.items():
            if f"{part}_{key}" in final:
                rows[title if part == "test" else f"validation {title}"] = _number(final[f"{part}_{key}"])
    return rows


def _of_clients(summary: dict[str, Any]) -> dict[str, str]:
    """Return the distribution of the clients' scores, if they were evaluated."""
    final, rows = summary["final"], dict[str, str]()
    for score, name in (("accuracy", "clients' accuracy"), ("tuned_accuracy", "fine-tuned"), ("loss", "clients' loss")):
        mean, deviation, worst, best, jain = (
            _number(final.get(f"client_{score}_{part}")) for part in ("mean", "std", "worst10", "best10", "jain")
        )
        if mean != "-" and not (score == "loss" and rows):
            rows[name] = f"{mean} ± {deviation}, worst 10 % {worst}, best 10 % {best}, Jain {jain}"
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
