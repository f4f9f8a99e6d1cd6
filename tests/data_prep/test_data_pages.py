"""The tables of the pages about data are those of the program; tests/test_documentation.py runs their commands."""

from __future__ import annotations

import re
from pathlib import Path

from data_prep.__main__ import flag
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
        samples, classes, _, download, _ = table[name]
        assert samples == known.samples and classes == known.classes
        assert download == ("yes" if known.sources else "no"), name


def test_the_table_of_partitions_has_each_with_its_options_and_defaults() -> None:
    table, laws = rows(LAWS), components("partition")
    names = [law.name for law in laws]
    assert {name for name in table if name in names} == set(names)  # their order follows the imports
    for law in laws:
        assert re.findall(r"`(--[\w-]+)`", table[law.name][0]) == [*map(flag, law.fields)], law.name
        for name, field in law.fields.items():
            match, default = re.search(rf"`{flag(name)}` \(([^:)]*)", table[law.name][0]), field.default
            shown = f"{default:g}" if isinstance(default, int | float) else default
            assert field.is_required() if match is None else match[1] == shown, (law.name, name)
