"""What the commands print on real terminals of 40 to 200 columns, with and without colours, and where there is none."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fedmpi.common.terminal import readable_duration
from fedmpi.records.progress import Outlook, _Bar, open_display
from tests.end_to_end.runs import SECONDS, run_on_terminal
from tests.mpi.launch import run_alone

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (40, 60, 80, 200)
COMMANDS = {
    "presets": ["presets"],
    "parts": ["parts", "--kind", "client sampler"],
    "part": ["parts", "oort"],
    "keys": ["show", "--help-keys"],
    "shards": ["inspect", "digits"],
    "sizes": ["estimate", "--sizes", "digits", "--epsilon", "3", "--threshold", "150"],
}
# One process shows everything at all widths: its terminal is made narrower and wider.
SHOW_ALL = """
import fcntl, json, struct, sys, termios
from fedmpi.cli import app

for width in json.loads(sys.argv[1]):
    fcntl.ioctl(sys.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    for name, arguments in json.loads(sys.argv[2]).items():
        print(f"@@@ {width} {name}")
        app(arguments, standalone_mode=False)
"""


def shown(env: dict[str, str], widths: tuple[int, ...], commands: dict[str, list[str]]) -> dict[tuple[int, str], str]:
    code, printed = run_on_terminal(["-c", SHOW_ALL, json.dumps(widths), json.dumps(commands)], env)
    assert code == 0, printed
    found = {}
    for block in printed.replace("\r\n", "\n").split("@@@ ")[1:]:
        head, _, text = block.partition("\n")
        width, name = head.split()
        found[int(width), name] = text
    return found


def words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s│┃]+", ESCAPE.sub("", text)) if re.search(r"\w", word)]


@pytest.mark.slow
def test_lists_and_tables_fit_the_terminal_and_break_no_word(tmp_path: Path) -> None:
    found = shown({}, WIDTHS, COMMANDS)
    assert len(found) == len(WIDTHS) * len(COMMANDS)
    for (width, name), text in found.items():
        longest = max(len(ESCAPE.sub("", line)) for line in text.splitlines())
        assert longest <= width or longest <= max(map(len, words(text))) + 12, (width, name, longest)
        if name not in ("keys", "sizes"):  # whose own words hold one; the eight columns of the sizes are cut below 80
            assert "…" not in text, (width, name)
        assert sorted(words(text)) == sorted(words(found[200, name])) or name == "sizes", (width, name)


def test_no_color_leaves_no_style(tmp_path: Path) -> None:
    brief = {name: COMMANDS[name] for name in ("presets", "sizes")}
    assert STYLE.search("".join(shown({"NO_COLOR": ""}, (80,), brief).values()))
    assert not ESCAPE.search("".join(shown({"NO_COLOR": "1"}, (80,), brief).values()))


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
    display = open_display(3, 0, 0.0, launched=True)
    for t in range(3):
        display.update({"round": t, "train_loss": 1.5, "test_accuracy": 0.25, "participants": 4, "seconds": 2.0})
    display.close()
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "round 1/3  loss 1.5000  accuracy 0.2500  2 clients/s"
    assert second.startswith("round 2/3") and second.endswith(" left")
    assert last.startswith("round 3/3") and last.endswith(" in all")


def test_plain_lines_are_the_first_those_due_and_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    display = open_display(5, 0, 3.0)
    for t, now in enumerate((0.0, 1.0, 3.5, 4.0, 4.5)):
        monkeypatch.setattr("fedmpi.records.progress.time.perf_counter", lambda now=now: 100.0 + now)
        display.update({"round": t, "participants": 4, "seconds": 1.0})
    display.close()
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "round 1/5",
        "round 3/5",
        "round 5/5",
    ]


def test_what_a_record_does_not_tell_is_left_out_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    display = open_display(5, 0, 0.0)
    records: list[dict[str, Any]] = [
        {"participants": 4},
        {"participants": 4, "seconds": 0.0},
        {"participants": None, "seconds": 1.0},
        {"val_accuracy": None, "test_loss": None},
    ]
    for t, facts in enumerate(records):
        display.update({"round": t} | facts)
    *without, last = capsys.readouterr().out.splitlines()
    assert len(without) == 3 and not any("clients/s" in line for line in without)
    assert "  test loss -  validation accuracy -  " in last


def test_a_run_that_is_watched_on_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    display = open_display(2, 0, 0.0)
    display.close()
    assert isinstance(display, _Bar)


def test_times_are_said_in_the_unit_that_suits_them() -> None:
    times = (4.4, 240, 9000, 3 * 86_400, 30 * 86_400, 1e9)
    assert [readable_duration(seconds) for seconds in times] == [
        "4 s",
        "4 min",
        "2.5 h",
        "3.0 days",
        "30 days",
        "32 years",
    ]


@pytest.mark.slow
def test_light_commands_do_not_import_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds; the interpreter itself tells what it has imported."""
    for command in (["show", "--set", "preset=scaffold"], ["presets"], ["parts", "--help"], ["--version"], ["--help"]):
        done = run_alone(["-X", "importtime", "-m", "fedmpi", *command], timeout=SECONDS)
        assert done.returncode == 0 and done.stdout
        loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "fedmpi.cli" in loaded and not loaded & {"torch", "scipy", "sklearn", "h5py"}, command


def test_the_version_and_the_shells_completion_are_there() -> None:
    assert re.fullmatch(r"fedmpi \d+\.\d+\.\d+\n", run_alone(["-m", "fedmpi", "--version"], timeout=SECONDS).stdout)
    if shutil.which("bash"):
        env = {"_FEDMPI_COMPLETE": "complete_bash", "COMP_WORDS": "fedmpi pre", "COMP_CWORD": "1"}
        program = "import sys; sys.argv = ['fedmpi']; from fedmpi.__main__ import main; main()"
        assert run_alone(["-c", program], timeout=SECONDS, env=env).stdout.split() == ["presets", "prepare"]


def test_work_of_days_is_announced_once_after_the_first_rounds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        for rounds in (10**9, 10**6):
            outlook = Outlook(rounds, 0)
            for t in range(9):
                outlook.update({"round": t, "seconds": 99.0 if t == 0 and rounds < 10**9 else 0.1})
    assert [record.message for record in caplog.records] == [
        f"{left} rounds are left, at {each} s each about 3 years: set fewer rounds, or count on --resume"
        for left, each in (("999,999,995 of 1,000,000,000", "0.1"), ("999,999 of 1,000,000", "99"))
    ]
