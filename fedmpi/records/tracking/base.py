"""What a tracker is told: settings at the start, numbers round by round, a picture of the clients, how it ended."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fedmpi.common.types import AnyArray

Settings = dict[str, bool | int | float | str]


class Tracker(ABC):
    """A program that shows a run while it lasts."""

    title: str
    """What messages call it."""
    raises: tuple[type[Exception], ...] = ()
    """What it raises where it cannot be reached: the run then goes on without it."""

    @abstractmethod
    def record(self, round: int, numbers: dict[str, float]) -> None:
        """Take in a finished round; one that it has had already, before the run was resumed, is not shown twice."""

    @abstractmethod
    def show(self, picture: AnyArray) -> None:
        """Take in the picture of the clients' data, uint8 (height, width, 3)."""

    def flush(self) -> None:  # noqa: B027
        """Bring to the disk what was told so far."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Let go of the run, which is finished, or to be continued."""
