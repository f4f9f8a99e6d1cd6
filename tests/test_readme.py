"""The README says what the program does."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from fedmpi import presets

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_table_names_every_preset() -> None:
    section = README.split("## Methods")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"`([\w-]+)`", "".join(rows))) == sorted(preset.name for preset in presets())


def test_the_sampler_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Import from a file, as a component's source is kept with the run."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    importlib.import_module("mine")
    assert float(capsys.readouterr().out.split()[-1]) > 0.8
