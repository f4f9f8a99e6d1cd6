"""Work that is done beside the rounds: one piece at a time, in a thread, whose failure is raised by the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Beside:
    """A thread for one piece of work after another, each waited for before the next begins."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work; waits for the one before and raises what that one raised."""
        self.wait()

        def done() -> None:
            try:
                work()
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=done, name="fedmpi-checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Raise what the work has raised, if it is over; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the work, and raise what it raised."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure is not None:
            raise failure
