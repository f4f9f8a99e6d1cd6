"""Output of a run on a narrow terminal, and light commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fedmpi.records.progress import RoundDisplay
from tests.end_to_end.runs import SECONDS, run_on_terminal
from tests.mpi.launch import run_alone

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def test_a_run_on_a_narrow_terminal_shows_its_progress_in_one_line(tmp_path: Path) -> None:
    settings = ("preset=fedavg", "rounds=3", "logging.tensorboard=false", "cluster.threads=1", "model.hidden=[8]")
    choices = [word for setting in settings for word in ("--set", setting)]
    command = ["-m", "fedmpi", "train", *choices, "--out", str(tmp_path / "[/run]")]
    code, printed = run_on_terminal(command, {"NO_COLOR": "1"}, columns=40)
    assert code == 0 and not STYLE.search(printed)
    lines = [part for line in ESCAPE.sub("\r", printed).splitlines() for part in line.split("\r") if part]
    assert lines[0].startswith("fedmpi ") and "one process, loading" in lines[0]
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 40
    bars = [line for line in lines if line.startswith("round ")]
    assert bars[-1].startswith("round 3/3") and "loss" in bars[-1]
    assert "[/run]" in printed  # as it is, though it looks like markup


def test_a_launched_run_prints_plain_lines_even_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    display = RoundDisplay(3, 0, 0.0, launched=True)
    for t in range(3):
        display.update({"round": t, "train_loss": 1.5, "test_accuracy": 0.25, "participants": 4, "seconds": 2.0})
    display.close()
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "round 1/3  loss 1.5000  accuracy 0.2500  2 clients/s"
    assert second.startswith("round 2/3") and second.endswith(" left")
    assert last.startswith("round 3/3") and re.search(r"total \d+ (ms|s)$", last)


@pytest.mark.slow
def test_light_commands_do_not_import_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds; the interpreter itself reports what it has imported."""
    for command in (["config", "--set", "preset=scaffold"], ["presets"], ["components", "--help"]):
        done = run_alone(["-X", "importtime", "-m", "fedmpi", *command], timeout=SECONDS)
        assert done.returncode == 0 and done.stdout
        loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "fedmpi.cli" in loaded and not loaded & {"torch", "scipy", "sklearn", "h5py"}, command
