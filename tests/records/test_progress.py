"""Output of a run: records and logs read again, TensorBoard's events, and a run followed to its end."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

import fedmpi
from fedmpi import UserError
from fedmpi.records.history import clients_as_text, clients_from_text, read_records, read_summary
from fedmpi.records.progress import RunLog, tags, watch

SMALL: dict[str, Any] = {
    "rounds": 5,
    "checkpoint.every": 2,
    "clients.count": 4,
    "local.engine": "sequential",
    "logging.tensorboard": False,
    "cluster.threads": 1,
}

# Records


def test_a_last_line_that_is_not_whole_is_left_out_and_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(tmp_path) == []
    for half in ('{"round": 1', '{"round": 1}'):
        path.write_text('{"round": 0}\n' + half)
        assert read_records(tmp_path) == [{"round": 0}]
    for damage in ("{\n", "\0\n", "[" * 100_000 + "\n"):
        for name, read in (("metrics.jsonl", lambda: read_records(tmp_path)), ("summary.json", None)):
            (tmp_path / name).write_text(damage)
            with pytest.raises(UserError, match=f"{name} cannot be read"):
                read() if read else read_summary(tmp_path / name)


@pytest.mark.parametrize(
    ("clients", "text"),
    [([], ""), ([0], "0"), ([0, 1, 2], "0-2"), ([3, 5, 6, 9], "3 5-6 9"), ([7, 8, 9, 11], "7-9 11")],
)
def test_selected_clients_are_written_as_runs_of_neighbors_and_read_again(clients: list[int], text: str) -> None:
    assert clients_as_text(np.array(clients, np.int64)) == text
    assert clients_from_text(text).tolist() == clients


# run.log


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("the disk\nis full"), "UserError: the disk is full"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (OSError("no folder /tmp/\udcff"), "OSError: no folder /tmp/\\udcff"),
    ],
)
def test_the_error_that_ended_a_run_is_noted_on_one_line_in_the_file_only(
    error: Exception, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(tmp_path / "run.log")
    log.failed(error)
    log.close()
    [line] = (tmp_path / "run.log").read_text().splitlines()
    assert f" ERROR ended by: {message}" in line
    assert not caplog.records


def test_the_log_listens_from_information_on_and_leaves_the_logger_as_it_was(tmp_path: Path) -> None:
    log = logging.getLogger("fedmpi")
    before = log.level, log.propagate, list(log.handlers)
    file = RunLog(tmp_path / "run.log")
    log.info("quiet")
    log.warning("loud")
    file.close()
    assert (log.level, log.propagate, log.handlers) == before
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == ["INFO quiet", "WARNING loud"]


def test_a_log_that_cannot_be_written_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    log, handler = logging.getLogger("fedmpi"), RunLog(Path("/dev/full"))
    for _ in range(3):
        log.warning("slow disk")
    with pytest.raises(OSError, match="No space left"):
        handler.close()
    assert [record.getMessage() for record in caplog.records].count("/dev/full cannot be written") == 1


# TensorBoard


def test_tensorboard_shows_the_numbers_of_every_round_once_across_a_resumption(tmp_path: Path) -> None:
    config = SMALL | {"logging.tensorboard": True}
    assert fedmpi.run("fedavg", config, out=tmp_path, stop=iter([False] * 3 + [True]).__next__).ending == "stopped"
    time.sleep(1.1)  # TensorBoard reads files in the order of their names, which contain the second of their start
    records = fedmpi.run("fedavg", config, out=tmp_path, resume=True).records
    events = EventAccumulator(str(tmp_path), size_guidance={SCALARS: 0}).Reload()
    names = tags(records[-1])
    assert {"test/accuracy", "train/loss", "round/participants", "phase/train", "bytes/client_up"} <= set(names)
    assert "round/round" not in names and len(names) == len(set(names))
    for name in names:
        assert [one.step for one in events.Scalars(name)] == list(range(5)), name
    shown = [one.value for one in events.Scalars("test/accuracy")]
    assert shown == pytest.approx([record["test_accuracy"] for record in records])


# watch


def test_a_run_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    may_go_on, settled = threading.Semaphore(0), threading.Semaphore(0)

    def paced(record: dict[str, Any]) -> None:
        settled.release()
        may_go_on.acquire()

    run = threading.Thread(target=lambda: fedmpi.run("fedavg", SMALL, out=tmp_path, on_round=paced))
    run.start()
    settled.acquire()
    looks = 0

    def look(seconds: float) -> None:
        """Let the run do another round, and in the end leave the folder."""
        nonlocal looks
        looks += 1
        may_go_on.release()
        settled.acquire() if looks < SMALL["rounds"] else run.join()

    watch(tmp_path, interval=0, sleep=look)
    shown = capsys.readouterr().out
    assert [shown.count(f"round {t}/5") for t in range(1, 6)] == [1] * 5
    assert "accuracy" in shown and "results in" in shown and looks == SMALL["rounds"]


def test_a_stopped_run_is_shown_with_the_command_that_continues_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fedmpi.run("fedavg", SMALL, out=tmp_path, stop=lambda: True)
    watch(tmp_path)
    assert f"of 5. Continue with --resume --out {tmp_path}" in capsys.readouterr().out
    with pytest.raises(UserError, match="config.toml"):
        watch(tmp_path / "none")
