"""The other commands as users type them, and every published method by its own example."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from fedmpi import api, presets
from fedmpi.config import Preset
from fedmpi.config.layers import dotted
from tests.end_to_end.runs import SECONDS, records
from tests.mpi.launch import run_alone

pytestmark = pytest.mark.timeout(600)  # seconds, with its fixtures, on a busy machine
PRESETS = presets()
NAMES = [preset.name for preset in PRESETS]
ROUNDS = 2

# One process runs all examples, so that torch is imported once; it prints the exit code of each as its last line.
RUN_EXAMPLES = """
import json, sys
from fedmpi.cli import app

codes = {}
for name, arguments in json.loads(sys.argv[1]).items():
    try:
        codes[name] = app(arguments, standalone_mode=False)
    except BaseException as error:
        codes[name] = f"{type(error).__name__}: {error}"
print(json.dumps(codes))
"""


def fedmpi(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_alone(["-m", "fedmpi", *arguments], timeout=SECONDS)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder of the examples' runs, and the exit code (or error) of each."""
    folder, arguments = tmp_path_factory.mktemp("examples"), {}
    for preset in PRESETS:
        program, *words = shlex.split(preset.example)
        assert program == "fedmpi"
        rounds = ["--set", f"rounds={ROUNDS}"]
        arguments[preset.name] = [*words, *rounds, "--out", str(folder / preset.name)]
    done = run_alone(["-c", RUN_EXAMPLES, json.dumps(arguments)], timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_every_preset_works_as_written(name: str, examples: tuple[Path, dict[str, object]]):
    folder, codes = examples
    assert codes[name] == 0
    recorded = records(folder / name)
    assert [record["round"] for record in recorded] == list(range(ROUNDS))
    assert all(record["train_loss"] > 0 and record["samples"] > 0 for record in recorded)


@pytest.mark.parametrize(
    "preset", [pytest.param(p, marks=() if p.name == "fedavg" else pytest.mark.slow) for p in PRESETS]
)
def test_every_preset_learns_the_digits_by_its_name_alone(preset: Preset, caplog: pytest.LogCaptureFixture):
    """Guessing scores 0.1, with a standard error of 0.016 on 355 images; 20 rounds scored 0.77 to 0.97."""
    with caplog.at_level(logging.INFO, "fedmpi"):
        run = api.run(preset.name, {"rounds": 20, "evaluation.every": 20, "cluster.threads": 1})
    assert run.summary["final"]["test_accuracy"] > 0.6
    messages = [record.message for record in caplog.records if "on the embedded digits" in record.message]
    keys = [f"{key} = {value}" for key, value in dotted(preset.digits).items()]
    assert len(messages) == bool(keys) and all(key in messages[0] for key in keys)


def test_show_prints_the_complete_configuration_as_toml(tmp_path: Path):
    (tmp_path / "run.toml").write_text('preset = "fedsampling"\nrounds = 7\n[samples]\nbudget = 100\n')
    shown = fedmpi("config", tmp_path / "run.toml", "--set", "samples.size.epsilon=1.5")
    assert (shown.returncode, shown.stderr) == (0, "")
    table = tomllib.loads(shown.stdout)
    assert (table["preset"], table["rounds"]) == ("fedsampling", 7)
    assert (table["samples"]["budget"], table["samples"]["size"]["epsilon"]) == (100, 1.5)
    assert table["server"]["weights"] == "gradient-sum"
    (tmp_path / "again.toml").write_text(shown.stdout)
    assert fedmpi("config", tmp_path / "again.toml").stdout == shown.stdout


def test_inspect_describes_the_embedded_digits():
    shown = fedmpi("inspect", "digits")
    assert (shown.returncode, shown.stderr) == (0, "")
    rows = {cells[1].strip(): cells[2] for line in shown.stdout.splitlines() if len(cells := line.split("│")) == 4}
    assert "digits" in rows["data set"] and "dirichlet" in rows["partition"]
    assert rows["clients"].split()[0] == "20"
    assert rows["samples"].split()[0] == "1,442"
    assert {"sizes", "classes per client", "KL to pooled labels"} <= rows.keys()


@pytest.mark.parametrize("command", ["train", "presets", "config", "inspect"])
def test_help_of_every_command_has_an_example(command: str):
    shown = fedmpi(command, "--help")
    assert shown.returncode == 0
    assert f"fedmpi {command}" in shown.stdout.split("Example:")[1]
