"""Keys that mean something on several ranks: who trains whom, and how the sums travel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keys.entries import OF_RANKS, S
from tests.mpi.launch import run_mpi

PROGRAM = Path(__file__).parent / "ranks.py"
COHORT = f"{S} model.activation=tanh clients.sampler=uniform clients.count=6 rounds=4"
ALL_TRAIN = f"{COHORT} cluster.server_trains=always"
BASES = {
    "cluster.placement": (ALL_TRAIN, ("owner", "shared")),
    "cluster.balance": (f"{ALL_TRAIN} cluster.placement=shared", ("planned", "measured")),
    "cluster.server_trains": (COHORT, ("never", "always")),
    "cluster.reduction": (ALL_TRAIN, ("allreduce", "window")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Every base with both values, on two ranks."""
    out = tmp_path_factory.mktemp("ranks") / "seen.npz"
    pairs = [(name, value) for name, (_, values) in BASES.items() for value in values]
    result = run_mpi(2, [PROGRAM, out, *(f"{BASES[name][0]} {name}={value}" for name, value in pairs)])
    assert result.returncode == 0, result.stderr
    held = np.load(out)
    return {
        pair: {key: held[f"{key}{i}"] for key in ("trained", "model")} | json.loads(str(held[f"facts{i}"]))
        for i, pair in enumerate(pairs)
    }


def test_all_keys_of_ranks_are_tried():
    assert sorted(BASES) == sorted(OF_RANKS)


@pytest.mark.parametrize("name", BASES)
def test_it_changes_neither_the_selected_clients_nor_the_model(name: str, runs: dict[tuple[str, str], dict[str, Any]]):
    one, other = (runs[name, value] for value in BASES[name][1])
    cohorts = [sorted(map(tuple, run["trained"][:, :2].tolist())) for run in (one, other)]
    assert cohorts[0] == cohorts[1] and len(cohorts[0]) == 4 * 6
    assert np.linalg.norm(one["model"] - other["model"]) <= 1e-5 * np.linalg.norm(one["model"])


def test_owners_train_the_clients_they_own_and_shared_cohorts_are_spread(runs: dict[tuple[str, str], dict[str, Any]]):
    owner, shared = runs["cluster.placement", "owner"], runs["cluster.placement", "shared"]
    owners = [np.searchsorted(run["boundaries"], run["trained"][:, 1], side="right") - 1 for run in (owner, shared)]
    assert owners[0].tolist() == owner["trained"][:, 2].tolist()
    assert owners[1].tolist() != shared["trained"][:, 2].tolist()
    assert {(t, rank) for t, _, rank in shared["trained"].tolist()} == {(t, rank) for t in range(4) for rank in (0, 1)}


def test_a_measured_balance_is_sent(runs: dict[tuple[str, str], dict[str, Any]]):
    keys = [
        {key for record in runs["cluster.balance", value]["records"] for key in record}
        for value in ("planned", "measured")
    ]
    assert keys[1] - keys[0] == {"step_rows", "worker_speeds"}


def test_the_server_trains_or_does_not(runs: dict[tuple[str, str], dict[str, Any]]):
    ranks = {
        value: set(runs["cluster.server_trains", value]["trained"][:, 2].tolist()) for value in ("never", "always")
    }
    assert ranks == {"never": {1}, "always": {0, 1}}


def test_sums_go_the_way_that_is_asked_for(runs: dict[tuple[str, str], dict[str, Any]]):
    for way in ("allreduce", "window"):
        lines = [line for line in runs["cluster.reduction", way]["log"] if line.startswith("sums of")]
        assert lines and all(f"go through the {way}: as configured" in line for line in lines)
