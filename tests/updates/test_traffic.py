"""Bytes on the simulated links against the papers' formulas."""

from __future__ import annotations

from types import SimpleNamespace

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
    class_counts,
    compressed_probes,
    cost_to_target,
    fedavg_formula,
    full_probes,
    keeps_moments,
    mediator_models,
    rebalancing,
    round_links,
    size_answers,
    star_models,
)

COUNTS = st.integers(1, 10_000)


@given(COUNTS, COUNTS)
def test_a_round_of_fedavg_sends_what_the_formula_says(values: int, clients: int) -> None:
    assert star_models(values, clients, clients).total == fedavg_formula(values, clients)


@given(COUNTS, COUNTS, st.integers(1, 100), st.integers(1, 5))
def test_a_round_of_astraea_sends_what_the_formula_says(values: int, clients: int, most: int, epochs: int) -> None:
    counted = mediator_models(values, visits=epochs * clients, mediators=-(-clients // most))
    assert counted.total == astraea_formula(values, clients, most, epochs)
    assert counted.client_up == counted.client_down == 4 * values * epochs * clients


def test_gamma_one_with_one_epoch_doubles_the_traffic_of_fedavg() -> None:
    assert astraea_formula(100, 7, 1) == 2 * fedavg_formula(100, 7)


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
    normed, plan = SimpleNamespace(size=100, trainable=90), plan_of(1, 4)
    assert round_links(kept, normed, 20, 10, plan, 0, visits=8) == mediator_models(100, 8, 2, optimizer_values=180)


MODEL = SimpleNamespace(size=100, trainable=100)


def plan_of(t: int, participants: int, **facts: int) -> Plan:
    members, none = np.arange(participants), np.empty(0)
    return Plan(t, 0.1, members, np.ones(participants), True, True, mediators=members // 2, balance=none, facts=facts)


def test_rebalancing_is_agreed_on_before_the_first_round_alone() -> None:
    config = load_config(None, ["preset=fedavg", "rebalance=true"])
    first, second = (round_links(config, MODEL, 20, 10, plan_of(t, 4), 0) for t in (0, 1))
    assert first == second + rebalancing(20, 10) and second == star_models(100, 4, 4)


def test_queried_clients_receive_and_selected_clients_send() -> None:
    star, chain = load_config(None, ["preset=fedavg"]), load_config(None, ["preset=astraea-mediator"])
    plan = plan_of(1, 4, asked=7)
    assert round_links(star, MODEL, 20, 10, plan, 0) == star_models(100, received=7, returned=4)
    assert round_links(chain, MODEL, 20, 10, plan, 0, visits=8) == mediator_models(100, 8, 2, lost=3)


def test_a_compressed_transport_shrinks_what_goes_up() -> None:
    assert star_models(10, 1, 1, upload_bits=16) == RoundTraffic(client_up=20, client_down=40)
    assert star_models(9, 1, 1, upload_bits=1).client_up == 2


def test_class_counts_go_up_and_the_copies_come_back() -> None:
    assert class_counts(500, 47) == RoundTraffic(client_up=94_000)
    assert rebalancing(500, 47) == RoundTraffic(client_up=94_000, client_down=94_000)


def test_size_answers_go_up_and_the_estimate_comes_back() -> None:
    assert size_answers(asked=100, participants=30) == RoundTraffic(client_up=400, client_down=240)


def test_a_compressed_probe_sends_centres_indices_and_a_norm() -> None:
    # 9 centres and a norm of 4 bytes each, 1,000 indices of 4 bits.
    assert compressed_probes(2, 1000, 9) == RoundTraffic(client_up=2 * (40 + 500), client_down=8000)
    assert compressed_probes(1, 1000, 2).client_up == 12 + 125
    assert full_probes(2, 1000) == RoundTraffic(client_up=8000, client_down=8000)


def test_the_cost_of_a_target_counts_every_round_up_to_its_first_evaluation() -> None:
    accuracies, sent = [None, 0.4, 0.8, 0.7, 0.9], [2_000_000] * 5
    assert cost_to_target(accuracies, sent, 0.75) == TargetCost(3, 6.0)
    assert cost_to_target(accuracies, sent, 0.85) == TargetCost(5, pytest.approx(10.0))
    assert cost_to_target(accuracies, sent, 0.95) is None
