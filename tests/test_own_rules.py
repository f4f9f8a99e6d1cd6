"""docs/design.md: "Where to put your own", followed in a copy of the package; data_prep imports what the page says."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest

from tests.mpi.launch import run_mpi

ROOT = Path(__file__).parents[1]

IN_TURN = """
import numpy as np
from fedmpi import Cohort, client_sampler


@client_sampler
def in_turn(view):
    return Cohort(np.roll(view.available, -view.round * view.count)[: view.count])
"""
EVERY_SECOND = """
def every_second(sizes: IntArray, start: int, stop: int | None) -> IntArray:
    return np.arange(start + start % 2, sizes.sum() if stop is None else stop, 2)
"""
ROWS = {
    "samples/rules.py": [
        ("\ndef sampled_positions(", EVERY_SECOND + "\n\ndef sampled_positions("),
        (
            '    if rule == "bernoulli":',
            '    if rule == "every-second":\n        return every_second(sizes, start, stop)\n'
            '    if rule == "bernoulli":',
        ),
    ],
    "config/client_parts.py": [('rule: Literal["all", ', 'rule: Literal["all", "every-second", ')],
}
WEIGHTS = {
    "aggregation/weights.py": [
        (
            '        case "stratified":\n',
            '        case "root":\n'
            "            return sending * _on_grid(np.sqrt(sizes[cohort.clients] / sizes.sum()))\n"
            '        case "stratified":\n',
        ),
        ('"uniform", "normalised")', '"uniform", "normalised", "root")'),
    ],
    "config/server_parts.py": [('weights: Literal["samples", ', 'weights: Literal["samples", "root", ')],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_rules_of_ones_own_run_where_the_guide_puts_them(tmp_path: Path, ranks: int) -> None:
    shutil.copytree(ROOT / "fedmpi", tmp_path / "fedmpi", ignore=shutil.ignore_patterns("__pycache__"))
    guide = (ROOT / "docs" / "design.md").read_text()
    (tmp_path / "samplers.py").write_text(IN_TURN)
    for recipe in (ROWS, WEIGHTS):
        for name, edits in recipe.items():
            assert f"`{name}`" in guide
            path = tmp_path / "fedmpi" / name
            text = path.read_text()
            for place, replacement in edits:
                assert text.count(place) == 1, f"{name}: {place}"
                text = text.replace(place, replacement)
            path.write_text(text)
    settings = ["participation.clients=samplers:in_turn", "participation.count=3", "samples.rule=every-second"]
    settings += ["aggregation.weights=root", "logging.diagnostics=true", "logging.tensorboard=false", "rounds=3"]
    settings += ["data.shards=digits:clients=9", "server.trains=always", "checkpoint.every=0"]
    command = ["-m", "fedmpi", "train", "--out", str(tmp_path / "run")]
    for setting in settings:
        command += ["--set", setting]
    done = run_mpi(ranks, command, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["participants"] for record in records] == [3, 3, 3]
    assert sum(record["samples"] for record in records) == pytest.approx(1442 / 2, abs=2)


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
    for path in (ROOT / "fedmpi").rglob("*.py"):
        assert "import data_prep" not in path.read_text() and "from data_prep" not in path.read_text(), path
