"""What a run shows while it works: a progress bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display(Protocol):
    """Shows rounds as they are settled."""

    def update(self, record: dict[str, Any]) -> None:
        """Show a finished round."""

    def close(self) -> None:
        """End the display."""


def open_display(rounds: int, first: int, interval: float) -> Display:
    """A bar when standard output is a terminal, plain lines otherwise."""
    return _Bar(rounds, first) if sys.stdout.isatty() else _Lines(rounds, first, interval)


class _Bar:
    def __init__(self, rounds: int, first: int):
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("rounds", total=rounds, completed=first, facts="")
        self._progress.start()

    def update(self, record: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=record["round"] + 1, facts=_facts(record))

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, rounds: int, first: int, interval: float):
        self._rounds, self._first, self._interval = rounds, first, interval
        self._started = time.perf_counter()
        self._shown = float("-inf")

    def update(self, record: dict[str, Any]) -> None:
        now, done = time.perf_counter(), record["round"] + 1
        if now - self._shown < self._interval and done < self._rounds:
            return
        self._shown = now
        left = (now - self._started) / max(1, done - self._first) * (self._rounds - done)
        print(f"round {done}/{self._rounds}  {_facts(record)}  {left:.0f} s left", flush=True)

    def close(self) -> None:
        sys.stdout.flush()


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Within: fedmpi's warnings are printed on standard error."""
    handler, log = TerminalWarnings(), logging.getLogger("fedmpi")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class TerminalWarnings(logging.Handler):
    """Shows warnings on standard error, above the progress bar if there is one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning; the stream is looked up now because the progress bar exchanges it."""
        print(f"warning: {record.getMessage()}", file=sys.stderr, flush=True)


def _facts(record: dict[str, Any]) -> str:
    facts = [f"loss {record['train_loss']:.4f}"] if record.get("train_loss") is not None else []
    for part, name in (("test", "accuracy"), ("val", "validation accuracy")):
        if f"{part}_accuracy" in record:
            facts.append(f"{name} {record[f'{part}_accuracy']:.4f}")
    if record["seconds"] > 0:
        facts.append(f"{record['participants'] / record['seconds']:.0f} clients/s")
    return "  ".join(facts)


def show_summary(summary: dict[str, Any], folder: str) -> None:
    """The table at the end of a run."""
    table = Table(title=f"run {folder}", show_header=False)
    final = summary["final"]
    rows = {
        "rounds": final.get("round", -1) + 1,
        **_scores(summary),
        "wall time": f"{summary['wall_seconds']:.1f} s",
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
    Console(soft_wrap=True).print(table)


def _scores(summary: dict[str, Any]) -> dict[str, str]:
    """Final scores on each part that was evaluated, and the best round with what chose it."""
    final, rows = summary["final"], {}
    best = f"round {(summary['best_round'] or 0) + 1}"
    if summary["best_chosen_on"] == "val":
        best += ", the best on validation"
    for part, name in (("test", "test"), ("val", "validation")):
        if f"{part}_accuracy" in final:
            rows[f"{name} accuracy"] = _number(final.get(f"{part}_accuracy"))
            rows[f"best {name} accuracy"] = f"{_number(summary[f'best_{part}_accuracy'])} ({best})"
            rows[f"{name} loss"] = _number(final.get(f"{part}_loss"))
            rows["macro-F1" if part == "test" else "validation macro-F1"] = _number(final.get(f"{part}_macro_f1"))
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
