"""Equal planned work: each participant has one worker, and no worker has much more than others."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.placement import (
    LONGEST_FIRST_UP_TO,
    STEP_ROWS,
    WORK_WORTH_THREADS,
    Layout,
    equal_parts,
    lay_out,
    longest_first,
    planned_cost,
    prepare_device,
    server_trains,
    settle_threads,
    shares_data,
)
from fedmpi.data.schema import DataDescription
from fedmpi.local.work import LocalRule, schedule
from fedmpi.mpi import Cluster

COSTS = st.lists(st.integers(0, 1000), min_size=1, max_size=60).map(lambda costs: np.array(costs, np.float64))


def test_the_head_start_of_worker_0_is_compensated():
    owners = longest_first(np.ones(30), np.ones(3), head_start=6.0)
    assert np.bincount(owners).tolist() == [6, 12, 12]
    assert (longest_first(np.ones(4), np.ones(3), head_start=50.0) > 0).all()


SPEEDS = st.lists(st.floats(0.2, 5), min_size=2, max_size=9).map(np.array)


@settings(max_examples=60, deadline=None)
@given(COSTS, SPEEDS, st.floats(0, 500))
def test_no_other_worker_would_have_finished_the_last_client_of_a_worker_earlier(
    costs: np.ndarray, speeds: np.ndarray, head: float
):
    owners = longest_first(costs, speeds, head)
    loads = np.bincount(owners, costs, minlength=len(speeds)) + head * (np.arange(len(speeds)) == 0)
    for worker in np.unique(owners):
        last = costs[owners == worker].min()
        others = np.delete((loads + last) / speeds, worker)
        assert loads[worker] / speeds[worker] <= others.min() * (1 + 1e-9)


@pytest.mark.parametrize("workers", [2, 7, 100])
def test_a_large_cohort_is_dealt_out_in_proportion_to_speeds(workers: int):
    generator = np.random.default_rng(0)
    costs, speeds = generator.lognormal(0, 1, 5 * LONGEST_FIRST_UP_TO), generator.uniform(0.5, 2, workers)
    owners = longest_first(costs, speeds)
    seconds = np.bincount(owners, costs, minlength=workers) / speeds
    assert seconds.max() < 1.02 * seconds.mean()
    assert np.bincount(longest_first(np.zeros(5 * LONGEST_FIRST_UP_TO), np.array([1.0, 2.0]))).min() > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), SPEEDS, st.floats(0, 500))
def test_parts_are_cut_in_proportion_to_speeds(sizes: list, speeds: np.ndarray, head: float):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    boundaries = equal_parts(offsets, speeds, head)
    assert boundaries[0] == 0 and boundaries[-1] == len(sizes) and (np.diff(boundaries) >= 0).all()
    seconds = (offsets[-1] + head) / speeds.sum()
    if seconds * speeds[0] > head:
        wanted = np.clip(seconds * np.concatenate([[0], np.cumsum(speeds)]) - head, 0, offsets[-1])
        assert np.abs(offsets[boundaries] - wanted).max() <= max(sizes)


@pytest.mark.parametrize(
    "rule",
    [
        LocalRule(epochs=2, batch_size=10),
        LocalRule(epochs=2, batch_size=10, drop_last=True),
        LocalRule(epochs=None, steps=3, batch_size=8),
        LocalRule(batch_size=None),
    ],
)
def test_planned_cost_counts_the_rows_and_steps_of_the_schedule(rule: LocalRule):
    rows = np.array([1, 7, 10, 25, 40])
    costs = planned_cost(rule, rows, merged=False)
    for n, cost in zip(rows.tolist(), costs.tolist(), strict=True):
        batches = schedule(rule, n, np.random.default_rng(0))
        seen = sum(n if batch is None else len(batch) for batch in batches)
        assert cost == seen + STEP_ROWS * len(batches)
        merged = 0 if len(batches) == 1 else len(batches)
        assert planned_cost(rule, np.array([n]), merged=True).tolist() == [seen + STEP_ROWS * merged]


def decide(*chosen: str, ranks: int = 2, cores: int = 2, samples: int = 1000) -> tuple[bool, bool]:
    cluster = SimpleNamespace(size=ranks, largest_node=ranks, fewest_cores=cores)
    config = load_config(None, ["preset=fedavg", *chosen])
    description = DataDescription((1, 28, 28), "uint8", 10, "image", 0, (0.5,), (0.5,))
    shared = shares_data(config, cluster, np.array([samples], np.int64), description)  # type: ignore[arg-type]
    return shared, server_trains(config, cluster, shared, cluster.fewest_cores)  # type: ignore[arg-type]


def test_small_data_is_shared_and_the_server_trains_where_its_core_would_idle():
    assert decide() == (True, True)
    assert decide(ranks=3) == (True, False)
    assert decide("cluster.placement=owner") == (False, False)
    top = ("compression=top-k", "compression.fraction=0.1")
    assert decide(*top) == (True, True)
    assert decide(*top, "compression.error_feedback=true") == (False, False)
    assert decide(samples=10**6) == (False, False)
    assert decide(samples=300_000) == (True, True)
    assert decide(samples=500_000) == (False, False)  # 1.5 GiB for each of two ranks
    assert decide("cluster.placement=shared", samples=10**6) == (True, True)


@pytest.mark.parametrize("rule", ["samples.sampler=exact", "samples.sampler=ratio"])
def test_who_evaluates_trains_fewer_of_the_rows_that_are_drawn(rule: str):
    """300 rows and an evaluation that costs 60 more among three workers: 60, 120 and 120, to a client's 5 rows."""
    drawn = (rule, "samples.budget=300") if rule.endswith("exact") else (rule, "samples.sampler.ratio=0.2088")
    shards = ("data.source=digits:clients=60,partition=iid", "clients.sampler=all", "evaluation.every=1")
    experiment = Experiment.connect(load_config(None, [*shards, *drawn, "model.hidden=[8]"]))
    worker, plan, rows = experiment.trainer.worker, experiment.decisions.plan(1), []
    sizes, worker.evaluation_cost = experiment.data.sizes, 60.0
    for index in range(3):
        worker.layout, worker._members = Layout(np.arange(4) * 20, index, True, True), None
        rows.append(300 * sizes[worker.members(plan)].sum() / sizes.sum())
    experiment.close()
    assert sum(rows) == pytest.approx(300) and rows == pytest.approx([60, 120, 120], abs=5)


SIZES = np.array([5, 3, 9, 1], np.int64)


@pytest.mark.parametrize("server_trains", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_client_has_one_owner_and_a_server_among_several_ranks_owns_none_unless_it_trains(
    ranks: int, server_trains: bool, caplog: pytest.LogCaptureFixture
):
    clusters = [SimpleNamespace(rank=rank, size=ranks, is_server=rank == 0) for rank in range(ranks)]
    with caplog.at_level(logging.WARNING, "fedmpi"):
        layouts = [lay_out(cluster, SIZES, np.array([0, 4], np.int64), server_trains) for cluster in clusters]
    owned = [range(*layout.owned) for layout in layouts]
    assert sorted(client for clients in owned for client in clients) == [0, 1, 2, 3]
    trains = server_trains or ranks == 1
    assert (layouts[0].worker is None) == (not owned[0]) == (not trains)
    workers = ranks - (not trains)
    warning = [f"{workers} workers for 4 clients: {workers - 4} stay idle"] if workers > 4 else []
    assert [record.message for record in caplog.records] == warning
    assert sum(not clients for clients in owned) == ranks - min(workers, 4)


@pytest.mark.parametrize(
    ("values", "chosen", "threads"),
    [
        (55_210, "cluster.threads=0", 1),
        (WORK_WORTH_THREADS, "cluster.threads=0", 4),
        (10, "cluster.threads=3", 3),
        (WORK_WORTH_THREADS, "server.exact=true", 1),
    ],
)
def test_small_steps_and_exact_sums_take_one_thread_unless_the_user_names_them(
    values: int, chosen: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node of four cores; a step that is large enough takes them all."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cluster, before = Cluster.connect(), torch.get_num_threads()
    monkeypatch.setattr(cluster, "threads_for_rank", lambda: 4)
    config = load_config(None, ["preset=fedavg", chosen])
    try:
        prepare_device(config, cluster)
        settle_threads(config, cluster, values, np.full(20, 50))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
