"""Output of the commands on real terminals of 40 to 200 columns, with and without colors, and without a terminal."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fedmpi.records.progress import open_display
from tests.end_to_end.runs import SECONDS, run_on_terminal
from tests.mpi.launch import run_alone

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLE = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (40, 60, 80, 200)
COMMANDS = {
    "presets": ["presets"],
    "components": ["components", "--kind", "client sampler"],
    "component": ["components", "oort"],
    "keys": ["config", "--help-keys"],
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
        assert longest <= width or longest <= max(map(len, words(text))) + 16, (width, name, longest)
        if name not in ("keys", "sizes"):  # texts of keys contain "…"; sizes are cut below 80
            assert "…" not in text, (width, name)
        assert sorted(words(text)) == sorted(words(found[200, name])) or name == "sizes", (width, name)


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


@pytest.mark.slow
def test_light_commands_do_not_import_torch(tmp_path: Path) -> None:
    """Loading torch takes seconds; the interpreter itself reports what it has imported."""
    for command in (
        ["config", "--set", "preset=scaffold"],
        ["presets"],
        ["components", "--help"],
        ["--version"],
        ["--help"],
    ):
        done = run_alone(["-X", "importtime", "-m", "fedmpi", *command], timeout=SECONDS)
        assert done.returncode == 0 and done.stdout
        loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
        assert "fedmpi.cli" in loaded and not loaded & {"torch", "scipy", "sklearn", "h5py"}, command
