"""A sampler sees for every client the result of its last selection, and how many rounds ago that was."""

from __future__ import annotations

import numpy as np
import pytest

import fedmpi
from fedmpi import Cohort
from fedmpi.clients.sampler import View
from fedmpi.data.opening import open_store

DATA, VALUES, ROUNDS = "digits:clients=9,alpha=0.5", 460, 5
NAMES = ("loss", "accuracy", "update_norm", "gradient_norm", "seconds")
views: list[dict[str, tuple[np.ndarray, np.ndarray]]] = []


def drawn(t: int) -> list[int]:
    """Three clients, other ones in every round; client 8 never."""
    return sorted({t, 2 * t % 5, 7 - t})


@fedmpi.client_sampler(needs=NAMES)
def listening(view: View) -> Cohort:
    """Keeps what it is given."""
    views.append({name: (view.last(name), view.age(name)) for name in NAMES})
    return Cohort(np.array(drawn(view.round)))


def test_a_sampler_sees_the_last_selection_of_a_client():
    views.clear()
    fedmpi.run(
        {"rounds": ROUNDS, "model.hidden": [6], "clients.sampler": listening, "clients.count": 3},
        {"devices": True, "devices.speed.median": 50.0, "local.epochs": 2},
        data=DATA,
    )
    sizes = open_store(DATA).sizes
    seconds = 2 * sizes / 50 + 4 * VALUES * (1 / 1e6 + 1 / 4e6)
    assert len(views) == ROUNDS
    for t, values in enumerate(views):
        past = {k: max((s for s in range(t) if k in drawn(s)), default=None) for k in range(9)}
        for name, (last, age) in values.items():
            assert age.tolist() == [-1 if s is None else t - s for s in past.values()], name
            assert np.isnan(last).tolist() == [s is None for s in past.values()], name
        known = [k for k, s in past.items() if s is not None]
        assert values["seconds"][0][known] == pytest.approx(seconds[known])
