"""Availability models."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import ComponentFailure, UserError
from fedmpi.clients.sampler import View
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Streams
from fedmpi.config.loading import given_config
from fedmpi.privacy.updates import draws_in_secret
from tests.statistical.weighed import there

STREAMS = Streams(7)


def test_more_generous_models_have_all_clients_of_the_stricter_ones_however_many_clients_follow() -> None:
    law = "bernoulli clients.availability.probability={}"
    strict, generous, many = (there(law.format(p), STREAMS, 4, n) for p, n in ((0.3, 500), (0.6, 500), (0.6, 900)))
    assert np.isin(strict, generous).all() and len(strict) < len(generous)
    assert np.array_equal(generous, many[many < 500])


@pytest.mark.parametrize(
    "law",
    [
        "bernoulli clients.availability.probability=1.5",
        "label-group",
        "label-group clients.availability.by_label=[]",
        "label-group clients.availability.by_label=[0.5,-1.0]",
    ],
)
def test_impossible_models_are_rejected(law: str) -> None:
    with pytest.raises(UserError, match=r"clients\.availability"):
        there(law, STREAMS, 0, 3, np.arange(3))


def odd_rounds(view: View, *, rest: float = 0.0) -> np.ndarray:
    """Return probability 1 for large clients in odd rounds and 0 in others, and `rest` for small ones."""
    chance = np.full(len(view.sizes), rest)
    chance[view.sizes > 5] = view.round % 2
    return chance


def test_a_custom_model_gives_the_available_clients() -> None:
    settings = {"clients.count": 2, "clients.availability": odd_rounds, "server.weights": "unbiased"}
    draw = CohortDraw(given_config("fedavg", settings), np.array([3, 9, 4, 8, 7]), None, STREAMS, values=10)
    assert draw.draw(0, None).present.tolist() == []  # type: ignore[union-attr]
    turnout = draw.draw(1, None)
    assert turnout.present.tolist() == [1, 3, 4]  # type: ignore[union-attr]
    assert turnout.cohort.presence is not None and turnout.cohort.presence.chance is not None
    assert turnout.cohort.presence.chance.tolist() == [0, 1, 0, 1, 1]
    assert not draws_in_secret(given_config("fedavg", settings))


@pytest.mark.parametrize("found", [np.ones(4), np.full(5, 1.5), np.full(5, -0.1), np.full(5, np.nan), np.ones(5, "U1")])
def test_what_is_no_probability_for_each_client_is_rejected(found: np.ndarray) -> None:
    config = given_config("fedavg", {"clients.availability": lambda view: found})
    with pytest.raises(ComponentFailure, match="probabilities"):
        CohortDraw(config, np.full(5, 3), None, STREAMS, values=10).draw(2, None)
