"""docs/design.md: "Where to put your own", followed as it says; data_prep imports what the page says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tests.mpi.launch import run_mpi

ROOT = Path(__file__).parents[1]

OWN = """
import numpy as np
from fedmpi import Cohort, client_sampler, row_rule, weights


@client_sampler
def in_turn(view):
    return Cohort(np.roll(view.available, -view.round * view.count)[: view.count])


@row_rule
def every_second(client, *, start: int = 0):
    return np.arange(start, len(client.labels), 2)


@weights(per_sample=False, normalised=True)
def root(cohort, sizes):
    return np.sqrt(sizes[cohort.clients] / sizes.sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_parts_of_ones_own_run_as_the_guide_says(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "own.py").write_text(OWN)
    settings = ["participation.clients=own:in_turn", "participation.count=3", "samples.rule=own:every_second"]
    settings += ["aggregation.weights=own:root", "logging.tensorboard=false", "rounds=3", "samples.start=1"]
    settings += ["data.shards=digits:clients=9", "server.trains=always", "checkpoint.every=0"]
    command = ["-m", "fedmpi", "train", "--out", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    done = run_mpi(ranks, command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["participants"] for record in records] == [3, 3, 3]
    assert sum(record["samples"] for record in records) == pytest.approx(1442 / 2, abs=9)


def test_the_guide_names_all_that_data_prep_imports_of_fedmpi() -> None:
    row = next(line for line in (ROOT / "docs" / "design.md").read_text().splitlines() if "| `data_prep/` |" in line)
    used = set()
    for path in (ROOT / "data_prep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            used |= {name.removeprefix("fedmpi.") for name in names if name.startswith("fedmpi.")}
    files = {name: "cluster/" if name == "cluster" else f"{name.replace('.', '/')}.py" for name in used}
    assert used and not [name for name in used if f"`{files[name]}`" not in row]
    importing = {
        str(path.relative_to(ROOT / "fedmpi"))
        for path in (ROOT / "fedmpi").rglob("*.py")
        if re.search(r"(import|from) data_prep", path.read_text())
    }
    _, _, told = row.partition("Of fedmpi only")
    assert importing == set(re.findall(r"`(\S+\.py)`", told))
