"""The sampling methods as whole runs: their state after a resume, noise clients."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import fedmpi
from tests.end_to_end.in_process import run_into
from tests.end_to_end.runs import curve

SMALL = ("data.source=digits:clients=12,alpha=0.4", "model.hidden=[8]")
QUIET = {"logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 0, "data.normalize": False}


STATEFUL = (
    *SMALL, "preset=fedstas-dp", "clients.sampler.strata=3", "clients.count=4",
    "clients.sampler.refresh_clients=selected", "samples.budget=200", "samples.size.reuse_reports=true",
    "server.optimizer=momentum", "logging.diagnostics=true", "devices=true", "local.engine=batched",
    "rounds=6",
)  # fmt: skip


def test_a_run_with_stale_gradients_ledger_and_usage_continues_bit_for_bit(tmp_path: Path):
    assert run_into(tmp_path / "whole", *STATEFUL) == 0
    assert run_into(tmp_path / "parts", *STATEFUL, stop_after=3) == 75
    assert run_into(tmp_path / "parts", *STATEFUL, resume=True) == 0
    assert len(curve(tmp_path / "whole")) == 6
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def kinds(loners: int, each: int = 4) -> fedmpi.ClientArrays:
    """Clients of three kinds, `each` of class 0, 1 or 2 alone, and loners: 3 samples of a kind, 7 of an own class."""
    held = [[kind] * 10 for kind in range(3) for _ in range(each)]
    held += [[k % 3] * 3 + [3 + k] * 7 for k in range(loners)]
    y, owner = np.concatenate(held), np.repeat(np.arange(len(held)), 10)
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    return fedmpi.ClientArrays(x, y, owner, test=(x, y), classes=12)


BY_LABELS = QUIET | {
    "rounds": 3, "model.hidden": [3], "clients.sampler.features": "label-histogram", "clients.count": 3,
    "clients.sampler.initial_step": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings, loners, sizes, counted",
    [
        ({"clients.sampler.clustering.outliers": "nearest"}, 5, [6, 6, 5], [5, None, None]),
        ({"clients.sampler.clustering.outliers": "nearest"}, 0, [4, 4, 4], [0, None, None]),
        ({"clients.sampler.clustering.outliers": "singletons"}, 3, [4, 4, 4, 1, 1, 1], [3, None, None]),
        ({"clients.sampler.clustering.outliers": "stratum"}, 3, [4, 4, 4, 3], [3, None, None]),
        ({"clients.sampler.clustering.outliers": "drop"}, 3, [4, 4, 4], [3, None, None]),
        ({"clients.sampler.refresh": 2}, 3, [5, 5, 5], [3, None, 3]),
        ({"clients.sampler.clustering.outliers": "drop"}, 4, [4, 4, 4], [4, None, None]),
    ],
)
def test_the_record_counts_noise_clients_and_the_option_places_them(
    settings: dict[str, object],
    loners: int,
    sizes: list[int],
    counted: list[int | None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """More than a quarter of the clients, such as 5 of 17, are warned of once; 4 of 16 are not."""
    with caplog.at_level(logging.WARNING, "fedmpi"):
        records = fedmpi.run("fedsso", BY_LABELS | settings, data=kinds(loners)).records
    assert sum(f"{loners} of {12 + loners} clients" in text for text in caplog.messages) == (loners == 5)
    assert [record["stratum_sizes"] for record in records] == [sizes] * 3
    assert [record.get("noise_clients") for record in records] == counted
