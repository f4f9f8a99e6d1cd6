"""Any part goes with any other: 200 random valid configurations on 1 and on 3 ranks plan, draw and compute the same.

They are slow.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpi import Config
from fedmpi.config import config_toml
from tests.end_to_end.combinations import valid_configurations
from tests.mpi.launch import run_mpi

PROGRAM = Path(__file__).parent / "combinations.py"
PARTS = [(0, 75), (75, 200)]
WANTED = 0.82
"""Share of the drawn ones that run at least: some name an engine that the drawn model or data cannot use."""
DEPEND_ON_THE_RANKS = {"busy_seconds", "idle_seconds", "hops", "step_rows", "worker_speeds"}
OF_LOSSES = 5e-7
"""Γ is the small difference of two losses of about 2 and has their rounding."""
Traces = dict[str, np.ndarray]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def drawn() -> list[Config]:
    """All configurations."""
    return valid_configurations(PARTS[-1][1])


@pytest.fixture(scope="module", params=PARTS, ids=["first", "others"])
def part(request: pytest.FixtureRequest, drawn: list[Config]) -> dict[int, Config]:
    """Some of the configurations by their numbers."""
    return {number: drawn[number] for number in range(*request.param)}


@pytest.fixture(scope="module")
def traces(part: dict[int, Config], tmp_path_factory: pytest.TempPathFactory) -> tuple[Traces, Traces]:
    """Traces of all configurations, in one job of one rank and one of three."""
    folder, found = tmp_path_factory.mktemp("combinations"), []
    (folder / "configurations").write_bytes(pickle.dumps(part))
    for ranks in (1, 3):
        out = folder / f"{ranks}.npz"
        result = run_mpi(ranks, [PROGRAM, folder / "configurations", out], timeout=400)
        assert result.returncode == 0, result.stderr
        found.append(dict(np.load(out)))
    return found[0], found[1]


@pytest.fixture(scope="module")
def ran(part: dict[int, Config], traces: tuple[Traces, Traces]) -> list[tuple[int, Config]]:
    """The configurations that ran; the others were refused."""
    return [(number, config) for number, config in part.items() if f"model{number}" in traces[0]]


def different(one: Any, other: Any, path: str = "") -> str | None:
    """Where two records differ by more than rounding, None if they do not."""
    if isinstance(one, dict):
        keys = one.keys() - DEPEND_ON_THE_RANKS
        if keys != other.keys() - DEPEND_ON_THE_RANKS:
            return f"{path}: {sorted(one)} and {sorted(other)}"
        places = [different(one[key], other[key], f"{path}.{key}") for key in keys]
        return next(filter(None, places), None)
    if isinstance(one, list):
        if len(one) != len(other):
            return f"{path}: {one} and {other}"
        return next(filter(None, (different(*pair, path) for pair in zip(one, other, strict=True))), None)
    least = OF_LOSSES if path.endswith(".gamma") else 1e-9
    same = other == pytest.approx(one, rel=1e-5, abs=least) if isinstance(one, float) else one == other
    return None if same else f"{path}: {one} and {other}"


def test_enough_configurations_run_and_every_part_is_among_them(
    part: dict[int, Config], ran: list[tuple[int, Config]]
) -> None:
    assert len(ran) >= WANTED * len(part)
    configs = [config for _, config in ran]
    assert {c.clients.sampler.name for c in configs} == {"all", "uniform", "weighted", "importance", "stratified"}
    assert {c.samples.sampler.name for c in configs} == {"all", "bernoulli", "ratio", "exact"}
    assert {c.topology.name for c in configs} == {"star", "mediators"}
    assert len({c.server.weights.name for c in configs}) == 7
    assert len({c.aggregation.optimizer for c in configs}) == 5
    assert len({c.clients.availability.name for c in configs}) == 4
    assert len({c.local.engine for c in configs}) == 4
    assert len({c.cluster.reduction for c in configs}) == 4
    assert len({(c.local.precision, c.topology.name) for c in configs}) == 4
    assert {c.cluster.balance for c in configs} == {"planned", "measured"}
    for flags in (
        [c.privacy.clip_norm is not None for c in configs],
        [c.rebalance is not None for c in configs],
        [c.server.exact for c in configs],
        [c.logging.diagnostics for c in configs],
        [c.devices is not None for c in configs],
    ):
        assert set(flags) == {False, True}


def test_both_jobs_ran_the_same_configurations(traces: tuple[Traces, Traces]) -> None:
    assert traces[0].keys() == traces[1].keys()


def test_plans_and_rows_are_the_same(traces: tuple[Traces, Traces], ran: list[tuple[int, Config]]) -> None:
    for number, config in ran:
        for key in (f"cohorts{number}", f"facts{number}", f"rows{number}"):
            assert np.array_equal(traces[0][key], traces[1][key]), f"{key} of\n{config_toml(config)}"


def test_records_are_the_same_to_rounding(traces: tuple[Traces, Traces], ran: list[tuple[int, Config]]) -> None:
    for number, config in ran:
        one, three = (json.loads(str(found[f"records{number}"])) for found in traces)
        assert different(one, three) is None, f"{different(one, three)} of\n{config_toml(config)}"


def test_weights_are_the_same_to_rounding_and_with_exact_sums_to_the_bit(
    traces: tuple[Traces, Traces], ran: list[tuple[int, Config]]
) -> None:
    for number, config in ran:
        one, three = (found[f"model{number}"] for found in traces)
        assert np.isfinite(one).all()
        if config.server.exact:
            assert np.array_equal(one, three), config_toml(config)
        else:
            assert np.linalg.norm(one - three) <= 1e-5 * np.linalg.norm(one), config_toml(config)
