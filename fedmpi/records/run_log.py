"""RUN/run.log: written during a run, and read again for its warnings and its end."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from fedmpi.common.errors import (
    ClientFailure,
    ComponentFailure,
    Divergence,
    RanksDisagree,
    UserError,
    on_one_line,
    raised,
)
from fedmpi.common.files import read_plain

log = logging.getLogger("fedmpi")
LINE = re.compile(r"^\S+ \S+ ([A-Z]+) (.*)$")
SELF_EXPLANATORY = (UserError, Divergence, ClientFailure, ComponentFailure, RanksDisagree)
"""Exceptions with a message that needs no type."""


class Onwards(logging.Handler):
    """Handler that passes records from a level on to the handlers above fedmpi's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, unless the logger does so itself."""
        if not log.propagate and log.parent is not None and log.parent.hasHandlers():
            log.parent.callHandlers(record)


_onwards = Onwards()


class RunLog(logging.FileHandler):
    """Handler that writes the file; if that fails, it warns once and the run continues.

    While it listens, fedmpi's logger passes INFO records, but the program's own handlers get no more than without it.
    """

    _failed = False

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # a path need not be text
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def listen(self) -> None:
        """Write fedmpi's records from now on."""
        self._before = log.level, log.propagate
        log.addHandler(self)
        if log.propagate:  # False within another run, or if the user has switched propagation off
            _onwards.setLevel(log.getEffectiveLevel())
            log.addHandler(_onwards)
        log.setLevel(logging.INFO)
        log.propagate = False

    def leave(self) -> None:
        """Restore the logger."""
        log.removeHandler(self)
        level, propagates = self._before
        log.setLevel(level)
        log.propagate = propagates
        if propagates:
            log.removeHandler(_onwards)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once, without a traceback."""
        if not self._failed:
            self._failed = True
            log.warning("%s cannot be written", self.baseFilename)

    def failed(self, error: Exception) -> None:
        """Log the error that ends the run to the file only."""
        why = on_one_line(str(error)) if isinstance(error, SELF_EXPLANATORY) else raised(error)
        self.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "ended by: %s", (why,), None))


def read_log(path: Path) -> list[tuple[str, str]]:
    """Return level and text of every line; nothing if the file cannot be read."""
    try:
        lines = read_plain(path).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [(match[1], match[2]) for match in map(LINE.match, lines) if match]


def ended_by(path: Path) -> str:
    """Return the error that ended the latest attempt of a run; "" if the log has none."""
    for level, words in reversed(read_log(path)):
        if level == "INFO":
            break
        if level == "ERROR" and words.startswith("ended by: "):
            return words
    return ""
