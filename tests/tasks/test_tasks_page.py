"""docs/reference/tasks.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedmpi.common.task_kinds import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tasks.md").read_text()


@pytest.mark.slow
def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 5
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"docs/reference/tasks.md, snippet {number + 1}", "exec"), names)
    perplexity, precision, r2, head = capsys.readouterr().out.splitlines()
    assert 1 < float(perplexity) < 26 and 0 < float(precision) <= 1 and float(r2) < 1
    assert head == "class,samples,predicted,precision,recall,f1"


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_table_tells_each_kind_with_its_own_loss_first(kind):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{kind.name}`")][:1]
    cells = row.split("|")
    assert f"`{kind.loss}`" in cells[4] or kind.name == "tokens"
