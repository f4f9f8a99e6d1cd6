"""Output of a run: rounds on the terminal, the table at its end, RUN/run.log, and TensorBoard's numbers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from fedmpi.common.errors import UNWRITABLE, UserError, raised
from fedmpi.common.files import is_locked
from fedmpi.common.terminal import console, on_terminal, paragraph, readable_duration
from fedmpi.config.loading import read_toml
from fedmpi.records.history import SCORES, Record, read_records, read_summary

log = logging.getLogger("fedmpi")


# --- rounds on the terminal ---


class RoundDisplay:
    """Finished rounds: a bar if standard output is the user's terminal, plain lines otherwise."""

    def __init__(self, rounds: int, first: int, interval: float, launched: bool = False):
        self._rounds, self._first, self._interval = rounds, first, interval
        self._started, self._shown = time.perf_counter(), float("-inf")
        self._bar: Progress | None = None
        if on_terminal() and not launched:
            place = Column(no_wrap=True, min_width=len(f"round {rounds}/{rounds}"))  # narrow terminals cut the facts
            shown = TextColumn("round {task.completed}/{task.total}", table_column=place)
            columns = (shown, BarColumn(12), "{task.fields[facts]}", TimeRemainingColumn(compact=True))
            self._bar = Progress(*columns, console=console())
            self._task = self._bar.add_task("", total=rounds, completed=first, facts="")
            self._bar.start()

    def update(self, record: Record) -> None:
        """Show a finished round."""
        now, done = time.perf_counter(), record["round"] + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, facts="  ".join(_facts(record)))
        elif now - self._shown >= self._interval or done == self._rounds:
            times, seconds = [], now - self._started
            if done == self._rounds:
                times = [f"total {readable_duration(seconds)}"]
            elif self._shown > 0:  # the first line has nothing to estimate from
                times = [f"{readable_duration(seconds / max(1, done - self._first) * (self._rounds - done))} left"]
            self._shown = now
            print("  ".join([f"round {done}/{self._rounds}", *_facts(record), *times]), flush=True)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.stop()


def _facts(record: Record) -> list[str]:
    facts = [f"loss {record['train_loss']:.4f}"] if record.get("train_loss") is not None else []
    for part, name in (("test", ""), ("val", "validation ")):
        if f"{part}_accuracy" in record:
            facts.append(f"{name}accuracy {_number(record[f'{part}_accuracy'])}")
        elif f"{part}_loss" in record:
            facts.append(f"{name or 'test '}loss {_number(record[f'{part}_loss'])}")
    if record.get("seconds") and record.get("participants") is not None:
        facts.append(f"{record['participants'] / record['seconds']:.0f} clients/s")
    return facts


def watch(folder: Path, interval: float = 2.0, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run's progress until it ends, and how it ended; the run is one of another process."""
    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} has no config.toml, so it is not a run folder. Name the folder of a run")
    rounds, records = read_toml(path)["rounds"], read_records(folder)
    seen = max(0, len(records) - 1)
    display = RoundDisplay(rounds, len(records), interval)
    try:
        while True:
            running = is_locked(folder)
            for record in read_records(folder)[seen:]:
                display.update(record)
                seen = record["round"] + 1
            if not running:
                break
            sleep(0.5)
    finally:
        display.close()
    if summary := read_summary(folder / "summary.json"):
        show_summary(summary, str(folder))
    else:
        print(f"stopped after round {seen} of {rounds}. Continue with --resume --out {folder}", flush=True)


def show_summary(summary: Record, folder: str) -> None:
    """Print the table at the end of a run, and where its results are."""
    table = Table(show_header=False)
    rows = {
        "rounds": summary["final"].get("round", -1) + 1,
        **({"ended because": summary["ended_because"]} if "ended_because" in summary else {}),
        **_scores(summary),
        "wall time": readable_duration(summary["wall_seconds"]),
        "ranks": summary["ranks"],
        "simulated traffic": f"{summary['bytes_total'] / 1e6:.1f} MB",
        "MPI traffic": f"{summary['mpi_bytes']['total'] / 1e6:.1f} MB",
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


def _scores(summary: Record) -> dict[str, str]:
    """Return the final scores on each evaluated part and on clients, and those of the best round."""
    best = f"round {(summary['best_round'] or 0) + 1}"
    best += ", the best on validation" if summary["best_chosen_on"] == "val" else ""
    rows = {key: _number(value) for key, value in summary["final"].items() if key.startswith(SCORES)}
    for key, value in summary.items():
        if key.startswith(("best_test_", "best_val_")) and value is not None:
            rows[key] = f"{_number(value)} ({best})"
    return {
        key.replace("_", " ").replace("val ", "validation ").replace("macro f1", "macro-F1"): text
        for key, text in rows.items()
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


@contextmanager
def shown_warnings() -> Iterator[None]:
    """Print fedmpi's warnings on standard error within the context."""
    handler = TerminalWarnings(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class TerminalWarnings(logging.Handler):
    """Handler that prints warnings on standard error, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the warning; the stream is looked up now because the progress bar exchanges it."""
        with suppress(*UNWRITABLE):  # full, or closed: no reason to end a run
            sys.stderr.write(f"warning: {record.getMessage()}\n")  # in one piece, as the guard's
            sys.stderr.flush()


# --- RUN/run.log ---


class RunLog(logging.FileHandler):
    """Handler of fedmpi's log until it is closed; if the file cannot be written, it warns once."""

    _warned = False

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # a path need not be text
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._before = log.level
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once, without a traceback."""
        if not self._warned:
            self._warned = True
            log.warning("%s cannot be written", self.baseFilename)

    def failed(self, error: Exception) -> None:
        """Log the error that ends the run to the file only."""
        self.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "ended by: %s", (raised(error),), None))

    def close(self) -> None:
        """Restore the logger, and close the file."""
        if self in log.handlers:
            log.removeHandler(self)
            log.setLevel(self._before)
        super().close()


# --- TensorBoard ---


def tags(record: Record) -> dict[str, float]:
    """Return the numbers of a record by tag: "test/accuracy" of "test_accuracy", "round/lr" of "lr"."""
    phases = {f"phase_{name}": value for name, value in record.get("phase_seconds", {}).items()}
    numbers = {key: value for key, value in (record | phases).items() if key != "round" and is_number(value)}
    return {key.replace("_", "/", 1) if "_" in key else f"round/{key}": float(x) for key, x in numbers.items()}


def is_number(value: Any) -> bool:
    """Check whether a value of a record is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)
