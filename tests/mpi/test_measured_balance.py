"""Work spread by measured seconds: a slow worker gets less of it, and the result of the run is the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpi.core.placement import STATE
from tests.mpi.launch import run_mpi

PROGRAM = Path(__file__).parent / "measured_balance.py"
SMALL = (
    "preset=fedavg clients.count=12 rounds=10 logging.tensorboard=false cluster.placement=shared "
    "cluster.server_trains=never local.engine=sequential local.batch_size=10 local.epochs=1 "
    "model.activation=tanh"
)
SAMPLED = f"{SMALL} samples.sampler=bernoulli samples.budget=300"
RUNS = [
    f"{base}{exact} cluster.balance={balance}"
    for base in (SMALL, SAMPLED)
    for exact in ("", " server.exact=true")
    for balance in ("planned", "measured")
]
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """All runs on a server and two workers, the first of them slow."""
    out = tmp_path_factory.mktemp("balance") / "found.npz"
    result = run_mpi(3, [PROGRAM, out, *RUNS])
    assert result.returncode == 0, result.stderr
    return dict(np.load(out))


@pytest.mark.parametrize("planned, measured", PAIRS)
def test_plans_and_rows_are_those_of_planned_costs(planned: int, measured: int, found: dict):
    for key in ("cohorts", "rows"):
        assert np.array_equal(found[f"{key}{planned}"], found[f"{key}{measured}"]), key
    assert len(found[f"rows{measured}"]) > 0


@pytest.mark.parametrize("planned, measured", PAIRS)
def test_weights_agree_to_rounding(planned: int, measured: int, found: dict):
    one, other = found[f"model{planned}"], found[f"model{measured}"]
    assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize("planned, measured", PAIRS[1::2])
def test_exact_sums_have_the_same_bits_whoever_trains_whom(planned: int, measured: int, found: dict):
    assert not np.array_equal(found[f"shares{planned}"], found[f"shares{measured}"])
    assert np.array_equal(found[f"model{planned}"], found[f"model{measured}"])


@pytest.mark.parametrize("planned, measured", PAIRS)
def test_the_slow_worker_is_found_out_and_gets_less(planned: int, measured: int, found: dict):
    """One third as quick, it gets about a quarter of the work."""
    _, slow, quick = found[f"shares{planned}"]
    assert slow == pytest.approx(quick, abs=0.1)
    _, slow, quick = found[f"shares{measured}"]
    assert slow < 0.6 * quick
    assert found[f"speeds{measured}"][-1] == pytest.approx([0.5, 1.5], rel=0.1)
    assert (found[f"speeds{measured}"][-3:] @ [1, -1] < 0).all()
    assert found[f"speeds{planned}"].size == 0
    assert found[f"saved{measured}"].tolist() == [STATE] and found[f"saved{planned}"].size == 0
