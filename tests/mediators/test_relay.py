"""The relay of models on 1, 2, 3 and 5 ranks against Algorithm 1 as plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi import ClientFailure
from fedmpi.aggregation.exact import FixedPointSum
from fedmpi.mediators.relay import plan_relay, run_relay
from fedmpi.mpi import Cluster
from tests.mediators.relay_runs import (
    ROUNDS,
    SGD,
    VARIANTS,
    Variant,
    cohort,
    digits_engine,
    plain,
    relayed,
)
from tests.mpi.launch import run_mpi

COUNTS = ("clients", "samples", "steps", "visits", "hops", "loss_sum", "weight", "moved")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Set the threads of each rank of the jobs: the bits of a matrix product depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected(one_thread: None) -> dict[str, np.ndarray]:
    engine = digits_engine()
    return {name: plain(variant, engine).numpy() for name, variant in VARIANTS.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_process_equals_the_plain_loop(name: str, expected: dict[str, np.ndarray]) -> None:
    w, report = relayed(VARIANTS[name], digits_engine(), Cluster(None, "none"))
    assert np.isfinite(expected[name]).all()
    check_equal(name, w.numpy(), expected[name])
    assert report.hops == 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Folder where a job left its results on all its ranks, and then on the first two of them."""

    @cache
    def ran(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("relay")
        done = run_mpi(ranks, ["-m", "tests.mediators.relay_runs", folder])
        assert done.returncode == 0, done.stderr
        return folder

    return ran


@pytest.mark.parametrize(("ranks", "of"), [(2, 3), (3, 3), pytest.param(5, 5, marks=pytest.mark.slow)])
def test_any_number_of_ranks_equals_the_plain_loop(
    ranks: int, of: int, expected: dict[str, np.ndarray], jobs: Callable[[int], Path]
) -> None:
    runs = np.load(jobs(of) / f"{ranks}.npz")
    moved_before = 0.0
    for name, variant in VARIANTS.items():
        check_equal(name, runs[name], expected[name])
        counts = dict(zip(COUNTS, runs[f"{name}-counts"].tolist(), strict=True))
        check_counts(variant, counts, counts["moved"] - moved_before, ranks)
        moved_before = counts["moved"]


def check_equal(name: str, w: np.ndarray, expected: np.ndarray) -> None:
    """Bits with exact sums; 1e-5 relative with float sums, whose order depends on the workers."""
    if VARIANTS[name].exact:
        np.testing.assert_array_equal(w, expected, err_msg=name)
    else:
        assert np.linalg.norm(w - expected) <= 1e-5 * np.linalg.norm(expected)


def check_counts(variant: Variant, counts: dict[str, float], moved: float, ranks: int) -> None:
    """The sums over the ranks are those of the cohorts, and MPI moved one model (with its memory) a hop."""
    engine = digits_engine()
    tasks = [task for t in range(ROUNDS) for task in cohort(engine, t, variant.most)[2].values()]
    assert counts["clients"] == len(tasks)
    assert counts["samples"] == sum(
        len(task.rows) if task.rows is not None else int(engine.source.sizes[task.client]) for task in tasks
    )
    assert counts["visits"] == variant.epochs * len(tasks)
    assert counts["weight"] == pytest.approx(ROUNDS)
    values = engine.model.size + (2 * engine.model.trainable if variant.keep else 0)
    assert moved == counts["hops"] * (4 * values + 16)
    assert (counts["hops"] > 0) == (ranks > 2 and variant.owners != "placed" and variant.most > 1)


def test_a_client_that_diverges_is_named() -> None:
    engine, cluster = digits_engine(), Cluster(None, "none")
    clients, mediators, tasks = cohort(engine, 0, 5)
    plan = plan_relay(np.zeros_like(clients), clients, mediators, 1, np.ones(len(clients)), 1)
    total = FixedPointSum(np.empty(engine.model.size, np.int64))
    wild = replace(SGD, lr=1e30)
    with pytest.raises(ClientFailure, match=r"client \d+ on rank 0.*lower local.lr"):
        run_relay(cluster, engine, plan, tasks, engine.model.initial, wild, 0, total)


def test_mediators_without_any_rows_change_nothing() -> None:
    engine, cluster = digits_engine(), Cluster(None, "none")
    clients, mediators, _ = cohort(engine, 0, 5)
    plan = plan_relay(np.zeros_like(clients), clients, mediators, 2, np.ones(len(clients)), 1)
    buffer = np.empty(engine.model.size, np.int64)
    total = FixedPointSum(buffer)
    report = run_relay(cluster, engine, plan, {}, engine.model.initial, SGD, 0, total)
    assert not buffer.any()
    assert (report.visits, report.work.clients, report.work.weight) == (0, 0, 0.0)
