"""Measured candidates: the seconds that their work would take, and the losses on the current model."""

from __future__ import annotations

from typing import Any

import numpy as np
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


@client_sampler(measures=("loss", "seconds"), needs=("loss", "seconds"))
class Trying:
    """Draw the same clients whatever values arrive, and remember these values."""

    def candidates(self, view: View) -> np.ndarray:
        return np.arange(1 if view.round == 1 else 0, len(view.sizes))

    def draw(self, view: View) -> Cohort:
        names = ("loss", "seconds")
        seen.append({name: view.fresh(name) for name in names} | {f"last {n}": view.last(n) for n in names})
        return Cohort(np.array(drawn(view.round)))


@client_sampler
def untried(view: View) -> Cohort:
    """The same clients."""
    return Cohort(np.array(drawn(view.round)))


def tried(**more: Any) -> fedmpi.Run:
    """A run of these settings, "__" for each point."""
    seen.clear()
    settings = {"devices": True, "devices.speed": "lognormal", "clients.sampler": Trying, "model.hidden": [6]}
    return fedmpi.run("fedavg", SMALL | settings | {k.replace("__", "."): v for k, v in more.items()}, data=DATA)


def test_a_selected_client_has_the_very_numbers_that_were_measured() -> None:
    tried(local__batch_size=40, local__optimizer="adam", local__schedule="inverse")
    for t in range(SMALL["rounds"] - 1):
        for name in ("loss", "seconds"):
            np.testing.assert_array_equal(seen[t + 1][f"last {name}"][drawn(t)], seen[t][name][drawn(t)])


def test_only_candidates_have_numbers_and_measuring_changes_nothing() -> None:
    measured = tried(local__algorithm="scaffold")
    for name in ("loss", "seconds"):
        assert [np.flatnonzero(np.isnan(found[name])).tolist() for found in seen] == [[], [0], []]
    plain = tried(local__algorithm="scaffold", clients__sampler=untried)
    for one, other in zip(measured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
