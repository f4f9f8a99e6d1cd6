"""Workers announce, in every round but the first and the last, those new clients that they train in the next one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mpi.launch import run_mpi

PROGRAM = Path(__file__).parent / "announced.py"
ROUNDS = 6
SMALL = f"participation.count=7 rounds={ROUNDS} logging.tensorboard=false server.trains=never"
RUNS = {
    "owner": f"preset=fedavg topology.placement=owner {SMALL}",
    "shared": f"preset=fedavg topology.placement=shared {SMALL}",
    "mediators": f"preset=astraea topology.clients_per_mediator=3 rounds={ROUNDS} participation.count=7 "
    "logging.tensorboard=false",
}

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Pairs of round and client by run and rank: announced for, and trained in."""
    out = tmp_path_factory.mktemp("announced") / "noted.npz"
    result = run_mpi(3, [PROGRAM, out, *RUNS.values()], timeout=150)
    assert result.returncode == 0, result.stderr
    return dict(np.load(out))


def pairs(noted: dict[str, np.ndarray], name: str, run: str, rank: int) -> set[tuple[int, ...]]:
    return set(map(tuple, noted[f"{name}{list(RUNS).index(run)}.{rank}"].tolist()))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_worker_announces_what_it_trains_next_and_has_not_announced_before(run: str, rank: int, noted: dict):
    announced = pairs(noted, "announced", run, rank)
    trained = pairs(noted, "trained", run, rank)
    assert announced and announced <= trained
    assert min(round for round, _ in announced) == 2  # round 0 plans nothing ahead: its own clients are read first
    assert not pairs(noted, "announced", run, 0)


@pytest.mark.parametrize("run", RUNS)
def test_together_they_announce_every_client_once(run: str, noted: dict):
    both = [pairs(noted, name, run, 1) | pairs(noted, name, run, 2) for name in ("announced", "trained")]
    announced = [client for _, client in both[0]]
    assert len(set(announced)) == len(announced)
    assert set(announced) == {client for round, client in both[1] if round >= 2}
