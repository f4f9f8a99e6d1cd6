"""Draws inside one population: inclusion probabilities by enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi import UserError
from fedmpi.clients.designs import draw_by_norm, proportional_inclusion
from fedmpi.common.streams import Purpose, Streams
from tests.statistical.weighed import every_draw


def stream(round: int = 0) -> np.random.Generator:
    return Streams(0).generator(Purpose.STRATUM_DRAW, round)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("norms", [[0.5, 3.0, 1.0, 2.0, 1.5], [1e-6, 1.0, 1e6, 2.0, 1.0], [1.0] * 5])
def test_draws_include_every_client_with_its_stated_probability(norms: list[float], count: int) -> None:
    given, measured = np.array(norms), np.zeros(len(norms))
    for probability, drawn in every_draw(given, count):
        assert len(set(drawn.tolist())) == count
        measured[drawn] += probability
    assert measured == pytest.approx(proportional_inclusion(given, count), abs=1e-9)
    assert proportional_inclusion(np.array([100.0, 1.0, 2.0, 1.0]), 2) == pytest.approx([1.0, 0.25, 0.5, 0.25])


@pytest.mark.parametrize("design", ["systematic", "sequential"])
def test_norm_zero_is_drawn_only_when_the_others_do_not_suffice(design: str) -> None:
    norms = np.array([0.0, 2.0, 0.0, 1.0, 0.0])
    assert draw_by_norm(norms, 2, stream(), design).tolist() == [1, 3]  # type: ignore[arg-type]
    drawn = draw_by_norm(norms, 4, stream(), design)  # type: ignore[arg-type]
    assert {1, 3} <= set(drawn.tolist())
    assert proportional_inclusion(norms, 4) == pytest.approx([2 / 3, 1, 2 / 3, 1, 2 / 3])
    assert proportional_inclusion(np.zeros(4), 3) == pytest.approx(np.full(4, 0.75))
    with pytest.raises(UserError, match="norm"):
        draw_by_norm(np.array([1.0, np.nan]), 1, stream(), design)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-300, 1e-8, 0.1, 1 / 3, 1.0, 7.0, 1e12]), min_size=1, max_size=30), st.data())
def test_any_norms_give_a_sample_of_the_requested_size(norms: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(norms)))
    design = data.draw(st.sampled_from(["systematic", "sequential"]))
    drawn = draw_by_norm(np.array(norms), count, stream(data.draw(st.integers(0, 9))), design)
    assert len(drawn) == len(set(drawn.tolist())) == count
    inclusion = proportional_inclusion(np.array(norms), count)
    assert inclusion.sum() == pytest.approx(count)
    assert ((inclusion >= 0) & (inclusion <= 1)).all()
