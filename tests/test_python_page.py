"""docs/reference/python.md runs as written."""

import re
from pathlib import Path
from typing import Any

import pytest

import fedmpi

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "python.md").read_text()


@pytest.mark.slow
def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) >= 6
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/reference/python.md, snippet {number + 1}", "exec"), names)
    assert capsys.readouterr().out.startswith("<Run of 5 rounds, finished: test_accuracy 0.")
    assert names["run"].ending == "ended", "0.8 is reached in the snippet about on_round"
    assert isinstance(names["runs"][2], fedmpi.Run) and names["runs"][2].folder == tmp_path / "runs" / "seed2"
