"""The pages about data: their tables are those of the program, and their commands and Python blocks run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedmpi
from data_prep.__main__ import flag
from data_prep.datasets import DATASETS
from fedmpi import components
from fedmpi.common.options import REQUIRED
from tests.data_prep.command import main

DOCS = Path(__file__).parents[2] / "docs"
PUBLIC, OWN = DOCS / "howto" / "public-data.md", DOCS / "howto" / "own-data.md"
SETS, LAWS, SHARDS = (DOCS / "reference" / f"{name}.md" for name in ("data-sets", "partitions", "shards"))
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def rows(page: Path) -> dict[str, list[str]]:
    """Cells of every row of the page's tables by the first one."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def preparations(page: Path) -> list[str]:
    """Every `python -m data_prep ...` of the page's shell blocks that prepares a data set."""
    text = "\n".join(text for kind, text in BLOCKS.findall(page.read_text(encoding="utf-8")) if kind == "sh")
    return [words for words in re.findall(r"python -m data_prep (.*)", text) if words != "list"]


SHOWN = [words for page in (PUBLIC, LAWS) for words in preparations(page)]


def test_the_table_of_data_sets_is_that_of_the_program() -> None:
    table = rows(SETS)
    assert [name for name in table if name in DATASETS] == list(DATASETS)
    for name, known in DATASETS.items():
        samples, classes, _, download, _ = table[name]
        assert samples == known.samples and classes == known.classes
        assert download == ("yes" if known.sources else "no"), name


def test_the_table_of_partitions_has_each_with_its_options_and_defaults() -> None:
    table, laws = rows(LAWS), components("partition")
    names = [law.name for law in laws]
    assert {name for name in table if name in names} == set(names)  # their order follows the imports
    for law in laws:
        assert re.findall(r"`(--[\w-]+)`", table[law.name][0]) == [flag(option.name) for option in law.options], (
            law.name
        )
        for option in law.options:
            match, default = re.search(rf"`{flag(option.name)}` \(([^:)]*)", table[law.name][0]), option.default
            shown = f"{default:g}" if isinstance(default, int | float) else default
            assert default is REQUIRED if match is None else match[1] == shown, (law.name, option.name)


@pytest.mark.parametrize("words", SHOWN)
def test_a_preparation_that_is_shown_is_understood(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(words), "--dry-run"]) == 0


def test_custom_data_are_prepared_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        path = tmp_path / "photos" / "catdog"[number % 2 * 3 :][:3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((30 + number, 40, 3), 6 * number, np.uint8)).save(path)
    for kind, block in BLOCKS.findall(OWN.read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(block, OWN.name, "exec"), {})
        for words in re.findall(r"python -m data_prep (.*)", block) if kind == "sh" else ():
            assert main(shlex.split(words)) == 0
    run = fedmpi.run("fedavg", {"rounds": 1, "clients.count": 4}, data="shards/patients")
    assert run.summary["clients"] == 12
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {"arrays", "patients", "mine", "photos"}


def test_shards_are_read_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [block] = [block for kind, block in BLOCKS.findall(SHARDS.read_text(encoding="utf-8")) if kind == "python"]
    found: dict[str, object] = {}
    exec(compile(block, SHARDS.name, "exec"), found)
    assert np.allclose(found["first_client"], found["x"][:10])
