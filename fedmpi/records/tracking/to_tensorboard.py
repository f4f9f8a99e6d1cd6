"""TensorBoard's events, in the run's own folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fedmpi.common.types import AnyArray
from fedmpi.records.tracking.base import Settings, Tracker
from fedmpi.records.tracking.names import TARGETS


class TensorBoard(Tracker):
    """Scalars by group, the settings as hyperparameters, the clients' data as an image.

    Parameters
    ----------
    folder : Path
        RUN.
    settings : dict
    first : int
        The round from which on the run goes on: what earlier events tell of it and later ones is dropped.
    """

    title = "TensorBoard"

    def __init__(self, folder: Path, settings: Settings, first: int):
        _wait_for_a_later_name(folder)
        self._excepthook = threading.excepthook
        threading.excepthook = self._leave_to_the_writer
        self._writer = SummaryWriter(str(folder), purge_step=first)
        if first == 0:  # tags of scalars in the place of values: the table then shows the newest of each
            events: Any = self._writer._get_file_writer()  # type: ignore[no-untyped-call]
            for summary in hparams(settings, dict.fromkeys(TARGETS, 0.0))[:2]:  # type: ignore[no-untyped-call]
                events.add_summary(summary)

    def record(self, round: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def show(self, picture: AnyArray) -> None:
        self._writer.add_image("clients/samples of each class", picture, dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._excepthook

    def _leave_to_the_writer(self, args: threading.ExceptHookArgs) -> None:
        """What fails in TensorBoard's writing thread is raised again by its next call: not to be told twice."""
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard")):
            self._excepthook(args)


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait for the next second where a file of events was begun in this one.

    Readers take the files by name: the second, the host, the process, a running number. Within a second 10 comes before
    9, and what was written first would be dropped as out of order.
    """
    while any(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.05)
