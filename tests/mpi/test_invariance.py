"""Any number of ranks gives the same plans, the same rows and, up to rounding, the same weights.

Weights are compared up to rounding only where a step depends smoothly on the weights: models have tanh units, since a
rounding can switch a ReLU on or off; clients' Adam has a large epsilon; the server's optimizer is SGD or momentum,
since Adagrad, Adam and Yogi divide by small numbers and Yogi takes a sign. With exact sums all are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.launch import run_mpi

TRACE = Path(__file__).parent / "trace.py"
SHORT = "rounds=6 logging.tensorboard=false"
SMALL = f"{SHORT} model.activation=tanh"
ASTRAEA = f"preset=astraea clients.count=8 topology.clients_per_mediator=3 {SMALL}"
MASKED = f"preset=fedavg clients.count=7 model.dropout=0.3 {SMALL}"
CONFIGURATIONS = {
    "fedavg": f"preset=fedavg clients.count=7 {SMALL}",
    "fedavg with dropout": f"preset=fedavg model.name=tests.mpi.user_models:dropout_mlp clients.count=5 {SHORT}",
    "sequential": f"{MASKED} local.engine=sequential",
    "batched": f"{MASKED} local.engine=batched",
    "merged": f"{MASKED} local.engine=merged local.steps=1 local.batch_size=all",
    "shared": f"preset=fedavg clients.count=7 cluster.placement=shared {SMALL}",
    "owned": f"preset=fedavg clients.count=7 cluster.placement=owner {SMALL}",
    "all train": "preset=fedsampling server.optimizer.lr=0.05 samples.budget=300 samples.size.max_size=150 "
    f"cluster.placement=shared cluster.server_trains=always {SMALL}",
    "hardly anybody there": "preset=fedavg clients.count=3 samples.sampler=bernoulli samples.budget=100 "
    "cluster.placement=shared cluster.server_trains=always clients.availability=bernoulli "
    "clients.availability.probability=0.04 "
    f"evaluation.every=1 {SMALL}",
    "exact and shared": "preset=fedavg server.exact=true clients.count=7 cluster.placement=shared "
    f"cluster.server_trains=always {SMALL}",
    "weighted": f"preset=fedavg-weighted clients.count=7 {SMALL}",
    "fedsampling": f"preset=fedsampling server.optimizer.lr=0.05 samples.budget=300 samples.size.max_size=150 {SMALL}",
    "naive": f"preset=fedsampling-naive server.optimizer.lr=0.05 samples.sampler.ratio=0.1 {SMALL}",
    "centralized": f"preset=centralized server.optimizer.lr=0.05 samples.budget=100 {SMALL}",
    "adam and samples": "preset=fedavg local.optimizer=adam local.lr=0.005 samples.sampler=bernoulli "
    f"samples.budget=60 local.optimizer.epsilon=1e-3 {SMALL}",
    "fedsts": f"preset=fedsts clients.count=6 clients.sampler.strata=4 local.lr=0.1 {SMALL}",
    "stale strata": "preset=fedsts clients.count=6 clients.sampler.strata=4 local.lr=0.1 "
    f"clients.sampler.refresh_clients=selected {SMALL}",
    "fedsso": f"preset=fedsso local.lr=0.01 clients.fraction=0.3 {SMALL}",
    "astraea": f"{ASTRAEA} local.optimizer.epsilon=1e-3",
    "exact astraea": f"{ASTRAEA} server.exact=true",
    "exact placed astraea": f"{ASTRAEA} cluster.placement=mediator server.exact=true",
    "system": "preset=fedavg clients.count=9 clients.availability=bernoulli clients.availability.probability=0.8 "
    "clients.failure_rate=0.2 devices=true clients.over_selection=1.3 "
    f"server.optimizer=momentum server.optimizer.lr=0.5 {SMALL}",
    "exact int8": f"preset=fedavg clients.count=7 server.exact=true compression=int8 {SMALL}",
    "exact top-k": "preset=fedavg clients.count=7 server.exact=true compression=top-k "
    f"compression.fraction=0.05 compression.error_feedback=true {SMALL}",
    "exact fedavg": f"preset=fedavg server.exact=true clients.count=7 {SMALL}",
    "exact bfloat16": f"preset=fedavg server.exact=true local.precision=bfloat16 clients.count=7 {SMALL}",
    "exact bfloat16 astraea": f"{ASTRAEA} server.exact=true local.precision=bfloat16",
    "exact fedsampling": "preset=fedsampling server.optimizer.lr=0.05 server.exact=true samples.budget=300 "
    f"samples.size.max_size=150 {SMALL}",
} | {
    f"exact {optimizer}": f"preset=fedavg server.exact=true server.optimizer={optimizer} server.optimizer.lr=0.02 "
    f"clients.count=7 model.activation=relu {SHORT}"
    for optimizer in ("momentum", "adagrad", "adam", "yogi")
}
NAMES = list(CONFIGURATIONS)
ALWAYS = ("system", "fedsts", "stale strata", "exact astraea", "exact top-k", "exact yogi")
"""On 3 ranks these are compared in every run of the tests; all others are slow."""
CASES = [
    pytest.param(name, ranks, marks=() if ranks == 3 and name in ALWAYS else pytest.mark.slow)
    for ranks in (3, 2, 8)
    for name in NAMES
]
Traces = Callable[[str, int], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """The trace of a configuration on so many ranks.

    On 1 and 3 ranks one job runs those that are always compared and another one the others; otherwise one runs all.
    """
    folder = tmp_path_factory.mktemp("traces")

    @cache
    def traced(names: tuple[str, ...], ranks: int) -> dict[str, dict[str, np.ndarray]]:
        out = folder / f"{len(names)}-{ranks}.npz"
        result = run_mpi(ranks, [TRACE, out, *(CONFIGURATIONS[name] for name in names)], timeout=400)
        assert result.returncode == 0, result.stderr
        found = dict(np.load(out))
        keys = ("cohorts", "facts", "rows", "model")
        return {name: {key: found[f"{key}{number}"] for key in keys} for number, name in enumerate(names)}

    def trace(name: str, ranks: int) -> dict[str, np.ndarray]:
        together = [other for other in NAMES if ranks not in (1, 3) or (other in ALWAYS) == (name in ALWAYS)]
        return traced(tuple(together), ranks)[name]

    return trace


pytestmark = pytest.mark.timeout(900)  # for two jobs; neither may hang longer than its own limit


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_number_of_ranks_does_not_matter(name: str, ranks: int, traces: Traces):
    """Models differ by up to 160 roundings (2**-24): those of the ranks' sums, and of a smooth model's training."""
    one, many = traces(name, 1), traces(name, ranks)
    for key in ("cohorts", "facts", "rows"):
        assert np.array_equal(one[key], many[key]), key
    assert len(one["rows"]) > 0
    assert np.linalg.norm(one["model"] - many["model"]) <= 1e-5 * np.linalg.norm(one["model"])
    if name.startswith("exact"):
        assert np.array_equal(one["model"], many["model"])
