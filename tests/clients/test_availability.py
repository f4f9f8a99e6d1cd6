"""Laws of availability."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi import ComponentFailure, UserError
from fedmpi.clients.availability import PHASES, TimeOfDay, dominant_label
from fedmpi.clients.sampler import View
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config.loading import given_config
from fedmpi.privacy.updates import draws_in_secret
from tests.statistical.weighed import there

STREAMS = Streams(7)


def test_more_generous_laws_have_all_clients_of_the_stricter_ones() -> None:
    strict, generous = (there(f"bernoulli clients.availability.probability={p}", STREAMS, 4, 500) for p in (0.3, 0.6))
    assert np.isin(strict, generous).all()
    assert len(strict) < len(generous)


def test_a_client_s_availability_does_not_depend_on_how_many_clients_follow() -> None:
    law = "time-of-day clients.availability.probability=0.9 clients.availability.lowest=0.1"
    few, many = (there(law, STREAMS, 2, clients) for clients in (100, 1000))
    assert np.array_equal(few, many[many < 100])


def test_the_time_of_day_swings_between_its_bounds_once_a_period() -> None:
    law = TimeOfDay(probability=0.8, lowest=0.2, period=24)
    day = np.array([law(View(t, 50, np.ones(50, np.int64), 50, STREAMS)) for t in range(25)])
    assert day.min() >= 0.2
    assert day.max() <= 0.8
    assert day.mean(axis=0) == pytest.approx(np.full(50, 0.5), abs=0.02)
    assert day[24] == pytest.approx(day[0])
    assert day[0].std() > 0.1
    phases = STREAMS.generator(Purpose.DEVICE, client=PHASES).random(50)
    likeliest = np.rint(24 * phases).astype(int)
    assert day[likeliest, np.arange(50)] == pytest.approx(np.full(50, 0.8), abs=0.003)


def test_label_groups_have_separate_probabilities() -> None:
    labels = dominant_label(np.array([[5, 1, 0], [0, 0, 9], [2, 2, 1]]))
    assert labels.tolist() == [0, 2, 0]
    for by_label, chances in {"[1.0,0.5,0.0]": [1, 0, 1], "[1.0,0.0]": [1, 1, 1]}.items():  # beyond the end they repeat
        found = there(f"label-group clients.availability.by_label={by_label}", STREAMS, 0, 3, labels)
        assert found.tolist() == np.flatnonzero(chances).tolist()


@pytest.mark.parametrize(
    "law",
    [
        "bernoulli clients.availability.probability=1.5",
        "time-of-day clients.availability.period=0",
        "time-of-day clients.availability.probability=0.1 clients.availability.lowest=0.5",
        "label-group",
        "label-group clients.availability.by_label=[0.5,-1.0]",
    ],
)
def test_impossible_laws_are_rejected(law: str) -> None:
    with pytest.raises(UserError, match="availability|system"):
        there(law, STREAMS, 0, 3, np.arange(3))


def odd_rounds(view: View, *, rest: float = 0.0) -> np.ndarray:
    """Return probability 1 for large clients in odd rounds and 0 in others, and `rest` for small ones."""
    chance = np.full(len(view.sizes), rest)
    chance[view.sizes > 5] = view.round % 2
    return chance


def test_a_custom_law_gives_the_available_clients() -> None:
    sizes = np.array([3, 9, 4, 8, 7])
    settings = {"clients.count": 2, "clients.availability": odd_rounds, "server.weights": "unbiased"}
    draw = CohortDraw(given_config("fedavg", settings), sizes, None, STREAMS, values=10)
    assert draw.draw(0, None).present.tolist() == []  # type: ignore[union-attr]
    turnout = draw.draw(1, None)
    assert turnout.present.tolist() == [1, 3, 4]  # type: ignore[union-attr]
    assert turnout.cohort.presence is not None and turnout.cohort.presence.chance is not None
    assert turnout.cohort.presence.chance.tolist() == [0, 1, 0, 1, 1]
    everybody = CohortDraw(
        given_config("fedavg", settings | {"clients.availability.rest": 1}), sizes, None, STREAMS, values=10
    )
    assert everybody.draw(1, None).present.tolist() == [0, 1, 2, 3, 4]  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"clients\.availability\.rset is unknown to .*odd_rounds: did you mean rest"):
        given_config("fedavg", settings | {"clients.availability.rset": 1})
    assert not draws_in_secret(given_config("fedavg", settings))


@pytest.mark.parametrize("found", [np.ones(4), np.full(5, 1.5), np.full(5, -0.1), np.full(5, np.nan), np.ones(5, "U1")])
def test_what_is_no_probability_for_each_client_is_rejected(found: np.ndarray) -> None:
    config = given_config("fedavg", {"clients.availability": lambda view: found})
    with pytest.raises(ComponentFailure, match="probabilities"):
        CohortDraw(config, np.full(5, 3), None, STREAMS, values=10).draw(2, None)
