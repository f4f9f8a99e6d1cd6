"""The plan of the relays: no rank can deadlock, and every visit happens once and in order for any owners.

What the relays compute is compared with Algorithm 1 in tests/reference, on any number of ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmpi import ClientFailure
from fedmpi.aggregation.exact import FixedPointSum
from fedmpi.common.streams import Streams
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.mediators.relay import Leg, RelayReport, place_mediators, plan_relay, run_relay, visiting_order
from fedmpi.mediators.scheduling import grouped_at_random
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, np.ndarray, int]:
    """owners, clients, mediators, epochs, costs, workers of a round with random ownership on up to 8 workers."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    workers, count = draw(st.integers(1, 8)), draw(st.integers(1, 25))
    clients = np.sort(generator.choice(200, count, replace=False))
    owners = generator.integers(0, workers, count)
    if draw(st.booleans()):
        owners.sort()  # contiguous ranges, as in a run
    mediators = grouped_at_random(np.ones((count, 1), np.int64), draw(st.integers(1, 10)), generator, None)
    costs = generator.pareto(1.5, count) if draw(st.booleans()) else np.ones(count)
    return owners, clients, mediators, draw(st.integers(1, 3)), costs, workers


def follow(plan: list[Leg], seconds: np.random.Generator) -> list[Leg]:
    """Run the plan with random true durations: workers keep their order, wait for their model, send without waiting."""
    queues = [[leg for leg in plan if leg.worker == worker] for worker in range(1 + max(leg.worker for leg in plan))]
    clock, arrived, done = [0.0] * len(queues), {}, []
    while any(queues):
        able = [
            worker
            for worker, queue in enumerate(queues)
            if queue and (queue[0].previous is None or (queue[0].mediator, worker) in arrived)
        ]
        assert able, "deadlock: no worker has the model that its next leg needs"
        worker = able[int(seconds.integers(len(able)))]
        leg = queues[worker].pop(0)
        begin = max(clock[worker], arrived.pop((leg.mediator, worker), 0.0))
        clock[worker] = begin + seconds.exponential()
        if leg.following is not None:
            assert (leg.mediator, leg.following) not in arrived
            arrived[leg.mediator, leg.following] = clock[worker]
        done.append(leg)
    assert not arrived, "a model was sent that no rank received"
    return done


def hops(plan: list[Leg]) -> int:
    """Return the number of moves of a model between workers."""
    return sum(leg.previous is not None for leg in plan)


@settings(max_examples=150, deadline=None)
@given(rounds(), st.integers(0, 2**32))
def test_any_durations_lead_to_the_end_and_each_model_visits_its_ring_in_order(case: tuple, seed: int) -> None:
    owners, clients, mediators, epochs, _, _ = case
    done = follow(plan_relay(*case), np.random.default_rng(seed))
    owner_of = dict(zip(clients.tolist(), owners.tolist(), strict=True))
    for mediator, ring in enumerate(visiting_order(clients, mediators)):
        legs = [leg for leg in done if leg.mediator == mediator]
        visits = [visit for leg in legs for visit in zip(leg.epochs, leg.clients, strict=True)]
        assert visits == [(epoch, client) for epoch in range(epochs) for client in ring.tolist()]
        assert all(owner_of[client] == leg.worker for leg in legs for client in leg.clients)
        assert [leg.previous for leg in legs] == [None, *(leg.worker for leg in legs[:-1])]
        assert [leg.following for leg in legs] == [*(leg.worker for leg in legs[1:]), None]


@settings(max_examples=60, deadline=None)
@given(rounds())
def test_the_planned_times_are_possible(case: tuple) -> None:
    plan = plan_relay(*case)
    for key in ("worker", "mediator"):
        for value in {getattr(leg, key) for leg in plan}:
            legs = [leg for leg in plan if getattr(leg, key) == value]
            assert all(a.finish <= b.start for a, b in zip(legs, legs[1:], strict=False))
    costs = dict(zip(case[1].tolist(), case[4].tolist(), strict=True))
    assert all(leg.finish - leg.start == pytest.approx(sum(costs[k] for k in leg.clients)) for leg in plan)


def test_a_ring_is_in_cyclic_order_and_the_starts_are_spread() -> None:
    # Mediator 0 starts at its first client, 1 at the third of its four clients.
    rings = visiting_order(np.arange(1, 9), np.array([0, 1, 0, 1, 0, 1, 0, 1]))
    assert [ring.tolist() for ring in rings] == [[1, 3, 5, 7], [6, 8, 2, 4]]


def test_two_workers_and_two_mediators_swap_models_and_never_idle() -> None:
    # Worker 0 owns clients 0 and 1, worker 1 clients 2 and 3. Mediator 0 (0, 2) starts at 0, mediator 1 (1, 3) at 3.
    plan = plan_relay(np.array([0, 0, 1, 1]), np.arange(4), np.array([0, 1, 0, 1]), 1, np.ones(4), 2)
    assert [(leg.worker, leg.mediator, leg.clients) for leg in plan] == [
        (0, 0, (0,)),
        (1, 1, (3,)),
        (1, 0, (2,)),
        (0, 1, (1,)),
    ]
    assert max(leg.finish for leg in plan) == 2 and hops(plan) == 2
    # Both mediators start at worker 0, which first trains the model that worker 1 needs next.
    plan = plan_relay(np.array([0, 0, 1]), np.arange(3), np.array([0, 1, 0]), 1, np.ones(3), 2)
    assert [leg.mediator for leg in plan[:1]] == [0] and max(leg.finish for leg in plan) == 2


def test_whole_mediators_go_to_the_least_loaded_worker_the_costliest_first() -> None:
    # Mediators cost 3, 4, 5: 2 goes to worker 0, 1 to worker 1, then 0 to worker 1, which has 4 against 5.
    place = place_mediators(np.array([3.0, 1, 3, 5]), np.array([0, 1, 1, 2]), 2)
    np.testing.assert_array_equal(place, [1, 1, 1, 0])


@settings(max_examples=40, deadline=None)
@given(rounds())
def test_a_mediator_placed_on_one_worker_needs_no_hop(case: tuple) -> None:
    _, clients, mediators, epochs, costs, workers = case
    plan = plan_relay(place_mediators(costs, mediators, workers), clients, mediators, epochs, costs, workers)
    assert hops(plan) == 0
    load = np.zeros(workers)
    for leg in plan:
        load[leg.worker] += leg.finish - leg.start
    largest = np.bincount(mediators, weights=costs).max()
    assert load.max() <= epochs * (costs.sum() / workers + largest) + 1e-9


def engine() -> SequentialEngine:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return SequentialEngine(FlatModel(module), ClientData(open_store("digits:clients=4")), Streams(11))


def relayed(tasks: dict[int, ClientTask], lr: float) -> tuple[RelayReport, np.ndarray]:
    """Relay two mediators with two clients each on one rank."""
    made, cluster = engine(), Cluster(None, "none")
    plan = plan_relay(np.zeros(4, np.int64), np.arange(4), np.arange(4) % 2, 2, np.ones(4), 1)
    buffer = np.empty(made.model.size, np.int64)
    rule, total = LocalRule(lr=lr, batch_size=24), FixedPointSum(buffer)
    return run_relay(cluster, made, plan, tasks, made.model.initial, rule, 0, total), buffer


def test_a_client_that_diverges_is_named() -> None:
    with pytest.raises(ClientFailure, match=r"client \d+ on rank 0.*lower local.lr"):
        relayed({k: ClientTask(k, None, 0.25) for k in range(4)}, 1e30)


def test_mediators_without_any_rows_change_nothing() -> None:
    report, buffer = relayed({}, 0.1)
    assert not buffer.any()
    assert (report.visits, report.work.clients, report.work.weight) == (0, 0, 0.0)
