"""Candidates trained on trial: the norm of the update that they would make, and the seconds that it would take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import Cohort, client_sampler
from fedmpi.clients.sampler import View

CLIENTS = 9
DATA = f"digits:clients={CLIENTS},alpha=0.5"
SMALL: dict[str, Any] = {"rounds": 3, "clients.count": 3, "local.lr": 0.1, "local.epochs": 2}
SMALL |= {"evaluation.every": 9, "local.engine": "sequential"}
seen: list[dict[str, np.ndarray]] = []


def drawn(t: int) -> list[int]:
    return sorted({t, 2 * t + 1, 8 - t})


@client_sampler(measures=("update_norm", "seconds"), needs=("update_norm", "seconds"))
class Trying:
    """Draw the same clients whatever values arrive, and remember these values."""

    def candidates(self, view: View) -> np.ndarray:
        return np.arange(1 if view.round == 1 else 0, len(view.sizes))

    def draw(self, view: View) -> Cohort:
        names = ("update_norm", "seconds")
        seen.append({name: view.fresh(name) for name in names} | {f"last {n}": view.last(n) for n in names})
        return Cohort(np.array(drawn(view.round)))


@client_sampler
def untried(view: View) -> Cohort:
    """The same clients."""
    return Cohort(np.array(drawn(view.round)))


def tried(**more: Any) -> fedmpi.Run:
    seen.clear()
    """A run of these settings, "__" for each point, a small perceptron unless they name a model."""
    settings = {"devices": True, "devices.speed": "lognormal", "clients.sampler": Trying}
    settings |= {} if "model__name" in more else {"model.hidden": [6]}
    return fedmpi.run("fedavg", SMALL | settings | {k.replace("__", "."): v for k, v in more.items()}, data=DATA)


@pytest.mark.parametrize(
    "more",
    [
        {"local__optimizer": "adam", "local__schedule": "inverse"},
        {"local__algorithm": "feddyn", "server__weights": "uniform"},
        {"model__name": "tests.end_to_end.user_models:unhurried_mlp"},
    ],
    ids=str,
)
def test_a_selected_client_makes_the_very_update_that_was_measured(more: dict[str, Any]) -> None:
    tried(local__batch_size=40, **more)
    for t in range(SMALL["rounds"] - 1):
        for name in ("update_norm", "seconds"):
            np.testing.assert_array_equal(seen[t + 1][f"last {name}"][drawn(t)], seen[t][name][drawn(t)])


def test_only_candidates_have_numbers_and_nothing_of_a_trial_is_kept() -> None:
    measured = tried(local__algorithm="scaffold")
    for name in ("update_norm", "seconds"):
        assert [np.flatnonzero(np.isnan(found[name])).tolist() for found in seen] == [[], [0], []]
    plain = tried(local__algorithm="scaffold", clients__sampler=untried)
    for one, other in zip(measured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
