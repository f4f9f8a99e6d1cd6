"""Bytes on the simulated links against the papers' formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.updates.traffic import (
    RoundTraffic,
    TargetCost,
    astraea_formula,
    cost_to_target,
    keeps_moments,
    paper_formula,
    round_links,
)

STAR, CHAIN = load_config(None, ["preset=fedavg"]), load_config(None, ["preset=astraea-mediator"])
MODEL: Any = SimpleNamespace(size=100, trainable=100)
STAR_OF_FOUR = RoundTraffic(4 * 400, 4 * 400)
CHAIN_OF_FOUR = RoundTraffic(8 * 400, 8 * 400, 2 * 400, 2 * 400)
"""The models of four clients in a star, and of two mediators with two clients each that are visited twice."""


def links(*settings: str, model: Any = MODEL) -> RoundTraffic:
    """Bytes of a round of four of twenty clients."""
    preset = () if any(setting.startswith("preset=") for setting in settings) else ("preset=fedavg",)
    config, members = load_config(None, [*preset, *settings]), np.arange(4)
    plan = Plan(1, 0.1, members, np.ones(4), True, True, mediators=members // 2)
    return round_links(config, model, 20, 10, plan, 0, visits=8)


MEDIATORS = "preset=astraea-mediator"
KEPT = (MEDIATORS, "topology.keep_optimizer=true", "local.optimizer=adam")


def test_links_carry_the_models_of_a_round_and_adams_moments_without_those_of_buffers() -> None:
    """`tests/reference` counts everything that is sent beside them."""
    assert links() == STAR_OF_FOUR and links(MEDIATORS) == CHAIN_OF_FOUR
    with_buffers: Any = SimpleNamespace(size=100, trainable=90)
    assert links(*KEPT, model=with_buffers) == CHAIN_OF_FOUR + RoundTraffic(8 * 720, 8 * 720)


def test_rounds_send_what_the_formulas_say() -> None:
    """The paper's formula has no E_m; a round of Astraea with γ = 1 and one epoch doubles the traffic of FedAvg."""
    assert STAR_OF_FOUR.total == paper_formula(STAR, 100, 4)
    assert CHAIN_OF_FOUR.total == astraea_formula(100, 4, 2, 2)
    assert astraea_formula(100, 7, 1) == 2 * paper_formula(STAR, 100, 7)
    most = CHAIN.topology.clients_per_mediator  # type: ignore[union-attr]
    assert paper_formula(CHAIN, 100, 47) == astraea_formula(100, 47, most) == 800 * (-(-47 // most) + 47)


def test_moments_travel_where_adam_keeps_them_and_not_in_an_opening_step() -> None:
    kept, anew = (load_config(None, [*KEPT, f"topology.keep_optimizer={keep}"]) for keep in ("true", "false"))
    assert keeps_moments(kept, one_step=False)
    assert not keeps_moments(kept, one_step=True) and not keeps_moments(anew, one_step=False)


def test_the_cost_of_a_target_counts_every_round_up_to_its_first_evaluation() -> None:
    accuracies, sent = [None, 0.4, 0.8, 0.7, 0.9], [2_000_000] * 5
    assert cost_to_target(accuracies, sent, 0.75) == TargetCost(3, 6.0)
    assert cost_to_target(accuracies, sent, 0.85) == TargetCost(5, pytest.approx(10.0))
    assert cost_to_target(accuracies, sent, 0.95) is None
