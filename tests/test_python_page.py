"""Pages of the reference run as written, from one snippet to the next."""

import re
from pathlib import Path
from typing import Any

import pytest

import fedmpi

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [("python.md", 6), ("tasks.md", 3)])
def test_every_snippet_runs(
    page: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", (REFERENCE / page).read_text(), re.DOTALL)
    assert len(snippets) >= count
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/reference/{page}, snippet {number + 1}", "exec"), names)
    printed = capsys.readouterr().out
    if page == "tasks.md":
        perplexity, precision, r2 = printed.splitlines()
        assert 1 < float(perplexity) < 26 and 0 < float(precision) <= 1 and float(r2) < 1
        return
    assert printed.startswith("<Run of 5 rounds, finished: test_accuracy 0.")
    assert names["run"].ending == "ended", "0.8 is reached in the snippet about on_round"
    assert isinstance(names["runs"][2], fedmpi.Run) and names["runs"][2].folder == tmp_path / "runs" / "seed2"
