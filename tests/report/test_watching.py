"""`fedmpi watch` shows every round as it is written, and ends with the run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.report.watching import Tail, watch

SMALL: dict[str, Any] = {"rounds": 3, "logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 1}


def lines(*rounds: int) -> bytes:
    return b"".join(json.dumps({"round": t}).encode() + b"\n" for t in rounds)


def test_only_whole_lines_are_taken_and_a_restarted_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(lines(0, 1) + b'{"rou')
    assert [record["round"] for record in tail.new()] == [0, 1]
    path.write_bytes(lines(0, 1, 2))
    assert [record["round"] for record in tail.new()] == [2] and tail.new() == []
    path.write_bytes(lines(0))
    assert [record["round"] for record in tail.new()] == [0]
    for damaged in (b"[1]\n", b'{"round": "1"}\n', b"[" * 100_000 + b"\n"):
        path.write_bytes(lines(0) + damaged)
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \("):
            Tail(path).new()
    path.unlink()
    for make in (os.mkfifo, lambda there: there.symlink_to(tmp_path / "nowhere")):
        make(path)
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(.*not a plain file"):
            Tail(path).new()
        path.unlink()


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
        """Instead of time passing, the run does another round, and in the end leaves the folder."""
        nonlocal looks
        looks += 1
        may_go_on.release()
        if looks < SMALL["rounds"]:
            settled.acquire()
        else:
            run.join()

    watch(tmp_path, interval=0, sleep=look)
    shown = capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    for key in ("final", "wall_seconds", "best_test_accuracy"):
        (tmp_path / "summary.json").write_text(json.dumps({name: summary[name] for name in summary if name != key}))
        with pytest.raises(UserError, match=rf"summary.json is damaged: it has no '{key}'"):
            watch(tmp_path, sleep=look)
    assert [f"round {t}/3" in shown for t in (1, 2, 3)] == [True] * 3
    assert "accuracy" in shown and "results in" in shown and looks == SMALL["rounds"]


def test_the_last_round_of_a_stalled_run_is_printed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = iter((False, False, True, True))
    done = len(fedmpi.run("fedavg", SMALL | {"rounds": 5}, out=tmp_path, stop=lambda: next(asked)).records)

    def never(seconds: float) -> None:
        raise AssertionError("no process writes to the folder: there is nothing to wait for")

    watch(tmp_path, sleep=never)
    shown = capsys.readouterr().out
    assert (
        done in (2, 3)
        and "round 1/" not in shown
        and " left" not in shown
        and f"round {done}/5" in shown
        and f"continue with --resume --out {tmp_path}" in shown
    )
    assert f"stopped after round {done} of 5: continue" in shown
    with pytest.raises(UserError, match="holds no run"):
        watch(tmp_path / "none")


def test_the_cause_of_a_failure_is_shown_until_the_run_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(record: object) -> None:
        raise OSError("no room in here")

    with pytest.raises(fedmpi.ComponentFailure, match="no room in here"):
        fedmpi.run("fedavg", SMALL, out=tmp_path, on_round=fails)
    watch(tmp_path)
    first = capsys.readouterr().out
    assert "stopped after round 0 of 3 (ended by: the function on_round" in first and "no room in here)" in first
    (tmp_path / "sweep.json").write_text('{"labels": {}, "failure": "on_round failed"}')
    watch(tmp_path)
    output = capsys.readouterr().out
    assert "(reported by its sweep: on_round failed): continue" in output and "ended by" not in output
    (tmp_path / "sweep.json").unlink()
    fedmpi.run("fedavg", SMALL, out=tmp_path, resume=True, stop=lambda: True)
    watch(tmp_path)
    assert "ended by" not in capsys.readouterr().out
