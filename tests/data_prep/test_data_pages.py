"""The tables of the pages about data are those of the program; tests/test_documentation.py runs their commands."""

from __future__ import annotations

import re
from pathlib import Path

from data_prep.datasets import DATASETS
from fedmpi import components

DOCS = Path(__file__).parents[2] / "docs"
SETS, LAWS = (DOCS / "reference" / f"{name}.md" for name in ("data-sets", "partitions"))


def rows(page: Path) -> dict[str, list[str]]:
    """Cells of every row of the page's tables by the first one."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_table_of_data_sets_is_that_of_the_program() -> None:
    table = rows(SETS)
    assert [name for name in table if name in DATASETS] == list(DATASETS)
    for name, known in DATASETS.items():
        samples, classes, _ = table[name]
        assert samples == known.samples and classes == known.classes
    kept = re.search(
        r"`--download` fetches all data sets except (.*?) and your own files", SETS.read_text(encoding="utf-8")
    )
    missing = {name for name, known in DATASETS.items() if not known.sources} - {"arrays", "imagefolder", "digits"}
    assert kept and set(re.findall(r"`([\w-]+)`", kept[1])) == missing


def test_the_table_of_partitions_has_each() -> None:
    names = {law.name for law in components("partition")}
    assert names <= set(rows(LAWS))
