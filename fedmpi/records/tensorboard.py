"""TensorBoard: the numbers of every round in groups (test/…, train/…, clients/…, time/…), and the run's settings."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.config import Config
from fedmpi.config.writing import flat_table, is_default

Record = dict[str, Any]
GROUPS = (
    ("test", r"test_(.+)"),
    ("val", r"val_(.+)"),
    ("train", r"train_(loss)"),
    (
        "train",
        r"(lr|steps|samples|update_norm|gradient_diversity|client_drift|gamma|weight_divergence|clipped_updates)",
    ),
    ("clients", r"(participants|asked|available|attackers|diverged|strata|opening|client_.+|clients_.+|inclusion_.+)"),
    ("clients", r"(samples?_us.+|group.*)"),
    ("mediators", r"(mediators|visits|hops|kl_.+)"),
    ("sizes", r"(sampling_probability|clipped_fraction|size_(?!epsilon).+)"),
    ("privacy", r"(.*epsilon.*)"),
    ("traffic", r"(bytes_.+)"),
    ("local", r"local_(.+)"),
    ("sampler", r"sampler_(.+)"),
    ("time", r"(.*seconds)"),
)
"""Group and pattern of a record's keys. The first match counts; all other keys are in the group "other"."""
PHASES = "phase_seconds"
TARGETS = ("test/accuracy", "test/loss", "val/accuracy", "val/loss", "train/loss")
"""Metrics of the table of hyperparameters."""


def by_group(record: Record) -> dict[str, float]:
    """Return the numbers of a record by tag; the phases of a round are "time/plan", "time/train", …"""
    found = {tag(key): float(value) for key, value in record.items() if key != "round" and is_number(value)}
    return found | {f"time/{phase}": float(value) for phase, value in record.get(PHASES, {}).items()}


def tag(key: str) -> str:
    """Return the tag of a key: "test/accuracy" of "test_accuracy"."""
    for group, pattern in GROUPS:
        if match := re.fullmatch(pattern, key):
            return f"{group}/{match[1]}"
    return f"other/{key}"


def settings(config: Config) -> dict[str, bool | int | float | str]:
    """Return seed, preset and every key that is not at its default."""
    chosen = {key: value for key, value in flat_table(config).items() if not is_default(config, key)}
    values = {"seed": config.seed, **({"preset": config.preset} if config.preset else {}), **chosen}
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()}


def is_number(value: Any) -> bool:
    """Check whether a value of a record is a number, and not true or false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_folder(folder: Path) -> None:
    """Reject a folder whose name TensorBoard cannot write."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"TensorBoard cannot write to {folder}, whose name is not UTF-8. Choose another --out, or set "
            "logging.tensorboard = false"
        ) from None


class TensorBoard:
    """Events in the run's folder."""

    def __init__(self, folder: Path, config: Config, first: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import
        from torch.utils.tensorboard.summary import hparams

        _wait_for_a_later_name(folder)
        self._excepthook = threading.excepthook
        threading.excepthook = self._leave_to_the_writer
        self._writer = SummaryWriter(str(folder), purge_step=first)
        if first == 0:  # tags instead of values: the table then shows the newest value of each
            events: Any = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
            for summary in hparams(settings(config), dict.fromkeys(TARGETS, 0.0))[:2]:  # type: ignore[no-untyped-call]
                events.add_summary(summary)

    def record(self, record: Record) -> None:
        """Write the numbers of a finished round."""
        for name, value in by_group(record).items():
            self._writer.add_scalar(name, value, record["round"])

    def flush(self) -> None:
        """Bring the events to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write the last events and close the file."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _leave_to_the_writer(self, args: threading.ExceptHookArgs) -> None:
        """Ignore errors of TensorBoard's writing thread, which its next call raises again."""
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard")):
            self._excepthook(args)


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait for the next second if a file of events was begun in this one: readers sort the files by name."""
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
