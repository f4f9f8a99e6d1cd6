"""Bytes on the simulated links against the papers' formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.common.plan import Plan
from fedmpi.config import load_config
from fedmpi.updates.traffic import (
    RoundTraffic,
    TargetCost,
    astraea_formula,
    cost_to_target,
    keeps_moments,
    mediator_models,
    numbers_sent,
    paper_formula,
    round_links,
    star_models,
)

COUNTS = st.integers(1, 10_000)
STAR, CHAIN = load_config(None, ["preset=fedavg"]), load_config(None, ["preset=astraea-mediator"])
MODEL: Any = SimpleNamespace(size=100, trainable=100)


def plan_of(t: int, participants: int, **facts: int) -> Plan:
    members, none = np.arange(participants), np.empty(0)
    return Plan(t, 0.1, members, np.ones(participants), True, True, mediators=members // 2, balance=none, facts=facts)


def further_links(*settings: str, clients: int = 20, measured: int = 0, t: int = 0, **facts: int) -> RoundTraffic:
    """Bytes beside the models of four clients in a star."""
    config, models = load_config(None, ["preset=fedavg", *settings]), star_models(100, 4, 4)
    found = round_links(config, MODEL, clients, 10, plan_of(t, 4, **facts), measured)
    assert (found.mediator_up, found.mediator_down) == (0, 0)
    return RoundTraffic(found.client_up - models.client_up, found.client_down - models.client_down)


@given(COUNTS, COUNTS)
def test_a_round_of_fedavg_sends_what_the_formula_says(values: int, clients: int) -> None:
    assert star_models(values, clients, clients).total == paper_formula(STAR, values, clients)


@given(COUNTS, COUNTS, st.integers(1, 100), st.integers(1, 5))
def test_a_round_of_astraea_sends_what_the_formula_says(values: int, clients: int, most: int, epochs: int) -> None:
    counted = mediator_models(values, visits=epochs * clients, mediators=-(-clients // most))
    assert counted.total == astraea_formula(values, clients, most, epochs)
    assert counted.client_up == counted.client_down == 4 * values * epochs * clients


def test_gamma_one_with_one_epoch_doubles_the_traffic_of_fedavg() -> None:
    assert astraea_formula(100, 7, 1) == 2 * paper_formula(STAR, 100, 7)
    most = CHAIN.topology.clients_per_mediator  # type: ignore[union-attr]
    assert paper_formula(CHAIN, 100, 47) == astraea_formula(100, 47, most) == 800 * (-(-47 // most) + 47)


def test_clients_that_drop_out_receive_but_do_not_send() -> None:
    assert star_models(10, received=5, returned=3) == RoundTraffic(client_up=120, client_down=200)
    lossy = mediator_models(10, visits=6, mediators=2, lost=3)
    assert (lossy.client_up, lossy.client_down) == (6 * 40, 9 * 40)


def test_an_optimizers_state_travels_between_the_clients_only() -> None:
    plain, kept = mediator_models(10, 4, 2), mediator_models(10, 4, 2, optimizer_values=20)
    assert kept.client_up == kept.client_down == 3 * plain.client_up
    assert (kept.mediator_up, kept.mediator_down) == (plain.mediator_up, plain.mediator_down) == (80, 80)


def test_moments_travel_where_adam_keeps_them_and_not_in_an_opening_step() -> None:
    kept = load_config(None, ["preset=astraea-mediator", "topology.keep_optimizer=true", "local.optimizer=adam"])
    anew = load_config(None, ["preset=astraea-mediator", "topology.keep_optimizer=false", "local.optimizer=adam"])
    assert keeps_moments(kept, one_step=False)
    assert not keeps_moments(kept, one_step=True) and not keeps_moments(anew, one_step=False)
    normed: Any = SimpleNamespace(size=100, trainable=90)
    plan = plan_of(1, 4)
    assert round_links(kept, normed, 20, 10, plan, 0, visits=8) == mediator_models(100, 8, 2, optimizer_values=180)


def test_queried_clients_receive_and_selected_clients_send() -> None:
    plan = plan_of(1, 4, asked=7)
    assert round_links(STAR, MODEL, 20, 10, plan, 0) == star_models(100, received=7, returned=4)
    assert round_links(CHAIN, MODEL, 20, 10, plan, 0, visits=8) == mediator_models(100, 8, 2, lost=3)


def test_a_compressed_transport_shrinks_what_goes_up() -> None:
    assert star_models(10, 1, 1, upload_bits=16) == RoundTraffic(client_up=20, client_down=40)
    assert star_models(9, 1, 1, upload_bits=1).client_up == 2


STRATA = ("clients.sampler=stratified", "clients.sampler.within_stratum=uniform")


@pytest.mark.parametrize(
    ("expected", "settings", "more"),
    [
        (RoundTraffic(), (), {"t": 0}),
        (RoundTraffic(800, 800), ("rebalance=true",), {"t": 0}),  # class counts go up, numbers of copies come back
        (RoundTraffic(), ("rebalance=true",), {"t": 1}),
        (RoundTraffic(80, 4 * 2 * 4), (), {"size_asked": 20}),  # size reports; K and the estimate come back
        (RoundTraffic(6 * 4 * 10), (*STRATA, "clients.sampler.features=label-histogram"), {"measured": 6}),
        (RoundTraffic(2400, 2400), (*STRATA, "clients.sampler.features=full-gradient"), {"measured": 6}),
        # 9 centres and a norm of 4 bytes each, 100 indices of 4 bits; of 1 bit for two centres
        (RoundTraffic(6 * (40 + 50), 2400), STRATA, {"measured": 6}),
        (RoundTraffic(6 * 12 + 6 * 13, 2400), (*STRATA, "clients.sampler.features.codebook_size=2"), {"measured": 6}),
    ],
)
def test_what_is_sent_beside_the_models(expected: RoundTraffic, settings: tuple[str, ...], more: dict) -> None:
    assert further_links(*settings, **more) == expected


def test_mediators_need_the_class_counts_once() -> None:
    first, second = (round_links(CHAIN, MODEL, 20, 10, plan_of(t, 4), 0, visits=8) for t in (0, 1))
    assert first == second + numbers_sent(20 * 10)


def test_the_cost_of_a_target_counts_every_round_up_to_its_first_evaluation() -> None:
    accuracies, sent = [None, 0.4, 0.8, 0.7, 0.9], [2_000_000] * 5
    assert cost_to_target(accuracies, sent, 0.75) == TargetCost(3, 6.0)
    assert cost_to_target(accuracies, sent, 0.85) == TargetCost(5, pytest.approx(10.0))
    assert cost_to_target(accuracies, sent, 0.95) is None
