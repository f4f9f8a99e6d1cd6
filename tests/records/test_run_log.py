"""run.log: what ended a run is noted on one line, for the file alone; whatever the file holds, it is read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.errors import Divergence, RanksDisagree
from fedmpi.records.run_log import RunLog, ended_by, read_log
from fedmpi.report import curves as panels
from fedmpi.results.loading import OneRun


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("the disk\nis full"), "the disk is full"),
        (Divergence("the loss\r\nis not finite"), "the loss  is not finite"),
        (ClientFailure(3, 1, ValueError("no rows")), "client 3 on rank 1: ValueError: no rows"),
        (ComponentFailure("sampler", "mine", "it returned 2"), "the sampler mine"),
        (RanksDisagree("rank 1 does other work"), "rank 1 does other work"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (OSError("no folder /tmp/\udcff"), "OSError: no folder /tmp/\\udcff"),
    ],
)
def test_what_ended_a_run_is_noted_on_one_line_for_the_file_alone(
    error: Exception, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path / "run.log")
    log.failed(error)
    log.close()
    [(level, words)] = read_log(tmp_path / "run.log")
    assert level == "ERROR" and words.startswith(f"ended by: {message}") and ended_by(tmp_path / "run.log") == words
    assert not caplog.records


def lines(*texts: str) -> str:
    return "".join(f"2026-01-01 10:00:00,1 {line}\n" for line in texts)


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        (lines("INFO begins", "ERROR ended by: a", "WARNING slow disk"), "ended by: a"),
        (lines("ERROR ended by: a", "INFO begins"), ""),
        (lines("ERROR ended by: a", "INFO begins", "ERROR ended by: b"), "ended by: b"),
        (lines("ERROR ended by: a", "ERROR a file is damaged"), "ended by: a"),
        (lines("INFO begins", "WARNING ended by: a", "ERROR a file is damaged"), ""),
        (lines("ERROR ended by: a") + "  a line of a traceback\n\nINFO\n", "ended by: a"),
        ("\0\0" * 1000, ""),
    ],
)
def test_the_latest_attempt_counts(said: str, ended: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(said)
    assert ended_by(tmp_path / "run.log") == ended


def test_what_a_report_warns_of_is_shortened(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(lines("INFO a", "WARNING b", "ERROR c", "CRITICAL d", "WARNING " + "e" * 900))
    found = panels.warnings([OneRun(tmp_path, {}, [], {}, "stopped")])
    assert sorted(warning["text"] for warning in found) == ["b", "c", "d", "e" * 500]


def test_a_log_that_cannot_be_written_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log, handler = logging.getLogger("fedmpi"), RunLog(Path("/dev/full"))
    log.addHandler(handler)
    try:
        for _ in range(3):
            log.warning("slow disk")
    finally:
        log.removeHandler(handler)
    assert [record.getMessage() for record in caplog.records].count("/dev/full cannot be written") == 1
    with pytest.raises(OSError, match="No space left"):
        handler.close()
