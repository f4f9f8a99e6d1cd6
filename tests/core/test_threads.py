"""Number of threads of a rank: what the user names, else its share, the load and the size of the work."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from fedmpi.config import load_config
from fedmpi.core.placement import WORK_WORTH_THREADS, prepare_device, settle_threads
from fedmpi.mpi import Cluster

SIZES = np.full(20, 50)
LARGE = WORK_WORTH_THREADS


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settled(monkeypatch: pytest.MonkeyPatch, values: int, others: float, *settings: str) -> int:
    """A node of four cores, some of them busy with other processes."""
    cluster = Cluster.connect()
    monkeypatch.setattr(cluster, "threads_for_rank", lambda: 4)
    monkeypatch.setattr(cluster, "cores_of_others", lambda: others)
    cluster.fewest_cores = 4
    config = load_config(None, ["preset=fedavg", *settings])
    prepare_device(config, cluster)
    found = settle_threads(config, cluster, values, SIZES)
    assert found == torch.get_num_threads()
    return found


def test_small_steps_take_one_thread_large_ones_the_cores_that_are_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        assert settled(monkeypatch, 55_210, 0.0) == 1
        assert settled(monkeypatch, LARGE, 0.0) == 4
        assert not caplog.records
        assert settled(monkeypatch, LARGE, 2.0) == 2
    assert [record.message for record in caplog.records] == [
        "other processes keep 2.0 of the 4 cores busy: threads = 2, not 4 (cluster.threads sets another number)"
    ]


def test_named_threads_and_exact_sums_stay_whatever_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        assert settled(monkeypatch, 10, 3.0, "cluster.threads=3") == 3
        assert settled(monkeypatch, LARGE, 9.0, "server.exact=true") == 1
    assert [record.message for record in caplog.records] == [
        "other processes keep 3.0 of the 4 cores busy: the 3 threads asked for will wait for one another: ask for fewer"
    ]
