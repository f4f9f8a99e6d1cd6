"""docs/examples/selection: every sampler of the gallery is short and selects the same clients on one and three ranks.

`mpiexec -n RANKS python -m tests.mpi.test_selection_gallery FOLDER` writes all selections to FOLDER/RANKS.json. The
first line of a file names its component and the settings that it needs, as key = value.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.__main__ import run as prepare
from fedmpi.common.registry import KINDS
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from tests.mpi.launch import REPOSITORY, run_mpi
from tests.quick_end import end_quickly

GALLERY = REPOSITORY / "docs" / "examples" / "selection"
PAGE = REPOSITORY / "docs" / "howto" / "samplers-gallery.md"
FILES = sorted(GALLERY.glob("*.py"))
LONGEST = 40
SMALL = (
    *("preset=fedavg", "rounds=4", "clients.count=4", "local.epochs=1", "model.hidden=[8]", "server.exact=true"),
    *("cluster.threads=1", "checkpoint.every=0", "logging.tensorboard=false"),
    "clients.availability=tests.mpi.test_selection_gallery:mostly",
)


def mostly(view: Any) -> Any:
    """Return the clients' probabilities to be available: 0.8, but 0 in round 1."""
    return np.full(len(view.sizes), 0.8 * (view.round != 1))


def settings_of(path: Path) -> dict[str, str]:
    """Return the settings in the first line of a file."""
    return dict(re.findall(r'([a-z_.]+) = ("[^"]+"|\w+(?:\.\w+)?)', path.read_text().partition("\n")[0]))


def selected(path: Path, folder: Path) -> list[Any]:
    """Return the selected clients, the samples used and the loss of every round; rank 0's are complete."""
    settings = [f"{key}={value}" for key, value in settings_of(path).items()]
    experiment = Experiment.connect(load_config(None, [*SMALL, f"data.source={folder / 'digits'}", *settings]))
    rounds, records, plan = list[list[int]](), list[dict[str, Any]](), experiment.decisions.plan

    def planned(t: int) -> Any:
        found = plan(t)
        rounds.append(found.clients.tolist())
        return found

    experiment.decisions.plan = planned  # type: ignore[method-assign]
    Simulation(experiment, on_round=records.append).run()
    experiment.close()
    return [rounds, [[record["samples"], record.get("train_loss")] for record in records]]


def main() -> None:
    from mpi4py import MPI

    os.chdir(GALLERY)
    sys.path.insert(0, str(GALLERY))
    folder, world = Path(sys.argv[1]), MPI.COMM_WORLD
    found = {path.stem: selected(path, folder) for path in FILES}
    if world.Get_rank() == 0:
        (folder / f"{world.Get_size()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gallery")
    digits = f"digits --partition dirichlet --alpha 0.5 --clients 12 --val 0.25 --out {folder / 'digits'}"
    assert prepare(digits.split()) == 0
    for ranks in (1, 3):
        job = run_mpi(ranks, ["-m", "tests.mpi.test_selection_gallery", folder])
        assert not job.returncode, job.stderr
    return [json.loads((folder / f"{ranks}.json").read_text()) for ranks in (1, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_selects_the_same_clients_on_one_and_three_ranks(path: Path, found: list[dict[str, Any]]) -> None:
    alone, together = (one[path.stem] for one in found)
    assert alone == together
    assert any(alone[0]) and len(alone[0]) == 4


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_is_short_and_has_a_row_on_the_page(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST
    [(key, component)] = [item for item in settings_of(path).items() if item[0] in KEYS]
    assert component.strip('"').partition(":")[0] == path.stem
    thing = component.strip('"').partition(":")[2]
    [made] = [node for node in ast.parse(text).body if getattr(node, "name", "") == thing]
    assert isinstance(made, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(made)
    assert f"(../examples/selection/{path.name})" in PAGE.read_text()


KEYS = {KINDS[kind].key for kind in ("client sampler", "data sampler")}

if __name__ == "__main__":
    end_quickly()
    main()
