"""Any number of ranks gives the same plans, the same rows and, to rounding, the same weights.

Weights are compared to rounding only where a step depends smoothly on the weights: models have tanh units, since a
rounding can switch a ReLU on or off; clients' Adam has a large epsilon; the server's optimizer is SGD or momentum,
since Adagrad, Adam and Yogi divide by small numbers and Yogi takes a sign. With exact sums all give the same bits.
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
ASTRAEA = f"preset=astraea participation.count=8 topology.clients_per_mediator=3 {SMALL}"
MASKED = f"preset=fedavg participation.count=7 model.dropout=0.3 {SMALL}"
CONFIGURATIONS = {
    "fedavg": f"preset=fedavg participation.count=7 {SMALL}",
    "fedavg with dropout": f"preset=fedavg model.name=tests.mpi.user_models:dropout_mlp participation.count=5 {SHORT}",
    "sequential": f"{MASKED} local.engine=sequential",
    "batched": f"{MASKED} local.engine=batched",
    "merged": f"{MASKED} local.engine=merged local.steps=1 local.batch_size=all",
    "shared": f"preset=fedavg participation.count=7 topology.placement=shared {SMALL}",
    "owned": f"preset=fedavg participation.count=7 topology.placement=owner {SMALL}",
    "all train": "preset=fedsampling aggregation.lr=0.05 samples.wanted=300 samples.threshold=150 "
    f"topology.placement=shared server.trains=always {SMALL}",
    "hardly anybody there": "preset=fedavg participation.count=3 samples.rule=bernoulli samples.wanted=100 "
    "topology.placement=shared server.trains=always system.availability=bernoulli system.probability=0.04 "
    f"evaluation.every=1 {SMALL}",
    "exact and shared": "preset=fedavg aggregation.exact=true participation.count=7 topology.placement=shared "
    f"server.trains=always {SMALL}",
    "weighted": f"preset=fedavg-weighted participation.count=7 {SMALL}",
    "fedsampling": f"preset=fedsampling aggregation.lr=0.05 samples.wanted=300 samples.threshold=150 {SMALL}",
    "naive": f"preset=fedsampling-naive aggregation.lr=0.05 samples.ratio=0.1 {SMALL}",
    "centralized": f"preset=centralized aggregation.lr=0.05 samples.wanted=100 {SMALL}",
    "adam and samples": "preset=fedavg local.optimizer=adam local.lr=0.005 samples.rule=bernoulli "
    f"samples.wanted=60 local.epsilon=1e-3 {SMALL}",
    "fedsts": f"preset=fedsts participation.count=6 participation.strata=4 local.lr=0.1 {SMALL}",
    "stale strata": "preset=fedsts participation.count=6 participation.strata=4 local.lr=0.1 "
    f"participation.refresh_who=participants {SMALL}",
    "fedsso": f"preset=fedsso local.lr=0.01 participation.fraction=0.3 {SMALL}",
    "astraea": f"{ASTRAEA} local.epsilon=1e-3",
    "exact astraea": f"{ASTRAEA} aggregation.exact=true",
    "exact placed astraea": f"{ASTRAEA} topology.placement=mediator aggregation.exact=true",
    "system": "preset=fedavg participation.count=9 system.availability=bernoulli system.probability=0.8 "
    "system.drop_out=0.2 system.clock=true system.over_selection=1.3 "
    f"aggregation.optimizer=momentum aggregation.lr=0.5 {SMALL}",
    "exact int8": f"preset=fedavg participation.count=7 aggregation.exact=true transport.kind=int8 {SMALL}",
    "exact top-k": "preset=fedavg participation.count=7 aggregation.exact=true transport.kind=topk "
    f"transport.fraction=0.05 transport.error_feedback=true {SMALL}",
    "exact fedavg": f"preset=fedavg aggregation.exact=true participation.count=7 {SMALL}",
    "exact bfloat16": f"preset=fedavg aggregation.exact=true local.precision=bfloat16 participation.count=7 {SMALL}",
    "exact bfloat16 astraea": f"{ASTRAEA} aggregation.exact=true local.precision=bfloat16",
    "exact fedsampling": "preset=fedsampling aggregation.lr=0.05 aggregation.exact=true samples.wanted=300 "
    f"samples.threshold=150 {SMALL}",
} | {
    f"exact {optimizer}": f"preset=fedavg aggregation.exact=true aggregation.optimizer={optimizer} aggregation.lr=0.02 "
    f"participation.count=7 model.activation=relu {SHORT}"
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
EXACT = [case for case in CASES if str(case.values[0]).startswith("exact")]
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
def test_plans_and_rows_do_not_depend_on_the_number_of_ranks(name: str, ranks: int, traces: Traces):
    for key in ("cohorts", "facts", "rows"):
        assert np.array_equal(traces(name, 1)[key], traces(name, ranks)[key]), key
    assert len(traces(name, 1)["rows"]) > 0


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_weights_agree_to_rounding(name: str, ranks: int, traces: Traces):
    """Up to 160 roundings (2**-24), of which the ranks' sums and a smooth model's training leave a few."""
    one, many = traces(name, 1)["model"], traces(name, ranks)["model"]
    assert np.linalg.norm(one - many) <= 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize(("name", "ranks"), EXACT)
def test_exact_sums_give_the_same_bits_on_any_number_of_ranks(name: str, ranks: int, traces: Traces):
    assert np.array_equal(traces(name, 1)["model"], traces(name, ranks)["model"])
