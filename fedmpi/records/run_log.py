"""RUN/run.log: written line by line while a run lives, and read again for its warnings and for what ended it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from fedmpi.common.errors import (
    ClientFailure,
    Divergence,
    PartFailure,
    RanksDisagree,
    UserError,
    on_one_line,
    raised,
)
from fedmpi.common.files import read_plain

log = logging.getLogger("fedmpi")
LINE = re.compile(r"^\S+ \S+ ([A-Z]+) (.*)$")
SELF_EXPLANATORY = (UserError, Divergence, ClientFailure, PartFailure, RanksDisagree)
"""Exceptions whose words are a whole sentence."""


class RunLog(logging.FileHandler):
    """Writes the file; where it cannot be written, that is warned of once and the run goes on."""

    _failed = False

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # a path need not be text
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def handleError(self, record: logging.LogRecord) -> None:
        """Say it once, without a traceback."""
        if not self._failed:
            self._failed = True
            log.warning("%s cannot be written", self.baseFilename)

    def failed(self, error: Exception) -> None:
        """Note what ends the run, here alone: whoever catches it shows it elsewhere."""
        why = on_one_line(str(error)) if isinstance(error, SELF_EXPLANATORY) else raised(error)
        self.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "ended by: %s", (why,), None))


def read_log(path: Path) -> list[tuple[str, str]]:
    """Level and words of every line; none where there is no such file, or it cannot be read."""
    try:
        lines = read_plain(path).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [(match[1], match[2]) for match in map(LINE.match, lines) if match]


def ended_by(path: Path) -> str:
    """What ended the latest attempt of a run, as its log says; "" where it says nothing, as of one that was killed."""
    for level, words in reversed(read_log(path)):
        if level == "INFO":
            break
        if level == "ERROR" and words.startswith("ended by: "):
            return words
    return ""
