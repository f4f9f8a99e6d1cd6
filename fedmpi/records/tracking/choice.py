"""Which trackers a run has, and what becomes of one that cannot be reached."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray
from fedmpi.config import Config
from fedmpi.records.tracking.base import Tracker
from fedmpi.records.tracking.names import settings

log = logging.getLogger("fedmpi")
EXTRAS = {"mlflow": "MLflow", "wandb": "Weights & Biases"}
"""Trackers that are packages of their own: the key of `[logging]`, the module and the extra of one name."""


def refuse_unusable(config: Config, folder: Path) -> None:
    """Refuse a tracker whose package is not installed, and TensorBoard in a folder whose name it cannot write.

    Raises
    ------
    UserError
    """
    if config.logging.tensorboard and not _is_utf8(str(folder)):
        raise UserError(
            f"TensorBoard writes to no folder whose name is no UTF-8, as {folder} is: choose another --out, or set "
            "logging.tensorboard = false"
        )
    for name, title in EXTRAS.items():
        if getattr(config.logging, name) and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.{name} needs {title}: pip install 'fedmpi[{name}]', or set logging.{name} = false"
            )


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Trackers:
    """All trackers of a run; one that cannot be reached is reported in the log once, and left out from then on.

    Parameters
    ----------
    chosen : sequence of (class, arguments)
    """

    def __init__(self, chosen: Sequence[tuple[type[Tracker], tuple[Any, ...]]]):
        self._trackers: list[Tracker] = []
        for kind, arguments in chosen:
            try:
                self._trackers.append(kind(*arguments))
            except kind.raises as error:
                _warn(kind.title, error)

    def record(self, round: int, numbers: dict[str, float]) -> None:
        """Report a finished round to all."""
        self._each(lambda tracker: tracker.record(round, numbers))

    def show(self, picture: Callable[[], AnyArray]) -> None:
        """Show all the clients' data; the picture is made only where somebody looks at it."""
        if self._trackers:
            drawn = picture()
            self._each(lambda tracker: tracker.show(drawn))

    def flush(self) -> None:
        """Write what all have received to the disk."""
        self._each(lambda tracker: tracker.flush())

    def close(self, finished: bool) -> None:
        """Let go of the run, which is finished, or to be continued."""
        self._each(lambda tracker: tracker.close(finished))
        self._trackers = []

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                action(tracker)
            except tracker.raises as error:
                _warn(tracker.title, error)
                self._trackers.remove(tracker)


def open_trackers(folder: Path, config: Config, first: int) -> Trackers:
    """The trackers that a configuration names.

    Parameters
    ----------
    folder : Path
        RUN.
    config : Config
    first : int
        The first round that will be reported.
    """
    chosen, part = settings(config), config.logging
    wanted = {
        "to_tensorboard:TensorBoard": (part.tensorboard, (folder, chosen, first)),
        "to_mlflow:MLflow": (part.mlflow, (folder, chosen, part.project)),
        "to_wandb:WeightsAndBiases": (part.wandb, (folder, chosen, part.project)),
    }
    return Trackers([(_class(name), arguments) for name, (wished, arguments) in wanted.items() if wished])


def _class(name: str) -> type[Tracker]:
    """A tracker; its package is slow to import, and not wanted by everybody."""
    module, _, kind = name.partition(":")
    found: type[Tracker] = getattr(importlib.import_module(f"fedmpi.records.tracking.{module}"), kind)
    return found


def _warn(title: str, error: Exception) -> None:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    log.warning("%s cannot be reached (%s): the run goes on, and is told in its folder alone", title, words)
