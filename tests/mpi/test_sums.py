"""Combiners, attacks, q-FFL and parts of one's own on several ranks: as in a plain loop, resumed to the bit."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.algorithm_runs import run
from tests.mpi.test_algorithms import DOUBLE, EXACT, assert_as_in_the_plain_loop, job, on_ranks

OWN = "tests.end_to_end.own_sums:"
FLIPS, NOISE, LABELS = (
    ["attack.kind=sign-flip", "attack.scale=2"],
    ["attack.kind=noise", "attack.scale=0.02", "attack.fraction=0.3"],
    ["attack.kind=label-flip", "attack.fraction=0.4"],
)
REPLAYED = {
    "median": [*DOUBLE, *FLIPS, "aggregation.rule=median"],
    "trimmed-mean": [*DOUBLE, *NOISE, "aggregation.rule=trimmed-mean", "aggregation.trim=0.3"],
    "krum": [*DOUBLE, *LABELS, "aggregation.rule=krum", "aggregation.byzantine=1", "aggregation.keep=2"],
    "norm-clip": [
        *(*DOUBLE, *FLIPS, "aggregation.rule=norm-clip", "aggregation.bound=0.1", "aggregation.optimizer=adam"),
        *("aggregation.lr=0.05", "system.drop_out=0.3", "participation.clients=weighted"),
    ],
    "q-ffl": [*DOUBLE, *LABELS, "aggregation.weights=q-ffl", "aggregation.q=2", "participation.clients=weighted"],
    "mean": [*DOUBLE, *NOISE],
}
RARE = [f"samples.rule={OWN}rare_first", "samples.share=0.6", f"aggregation.weights={OWN}root"]
PARTS = {
    "median": [*EXACT, *FLIPS, *RARE, f"aggregation.rule={OWN}median"],
    "two phases": [*EXACT, *NOISE, f"aggregation.weights={OWN}root_of_used", f"aggregation.rule={OWN}Nearest"],
    "judged": [*EXACT, *RARE[:2], f"aggregation.weights={OWN}Loud", f"aggregation.optimizer={OWN}Nesterov"],
    "krum": [*EXACT, *LABELS, "aggregation.rule=krum", "aggregation.byzantine=1", "aggregation.optimizer=yogi"],
    "pooled": [*EXACT, f"samples.rule={OWN}every_other", "samples.step=3", f"aggregation.optimizer={OWN}capped"],
    "q-ffl": [*EXACT, "aggregation.weights=q-ffl", "aggregation.optimizer=momentum"],
    "mediators": [*EXACT, *LABELS, *RARE, "topology.kind=mediators", "topology.placement=mediator"],
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_run_is_that_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    assert_as_in_the_plain_loop(REPLAYED[name], run(REPLAYED[name], str(tmp_path / "run"))["model"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_is_that_of_the_plain_loop(ranks: int, tmp_path: Path) -> None:
    found = on_ranks(ranks, [job(s, tmp_path / name) for name, s in REPLAYED.items()], tmp_path)
    for settings, one in zip(REPLAYED.values(), found, strict=True):
        assert_as_in_the_plain_loop(settings, one["model"])


@pytest.mark.parametrize(
    "name", [name if name in ("median", "judged") else pytest.param(name, marks=pytest.mark.slow) for name in PARTS]
)
def test_a_resumed_run_repeats_the_bits(name: str, tmp_path: Path) -> None:
    whole = run(PARTS[name], str(tmp_path / "whole"))
    run(PARTS[name], str(tmp_path / "parts"), stop_after=2)
    parts = run(PARTS[name], str(tmp_path / "parts"), resume=True)
    assert np.array_equal(whole["model"], parts["model"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_parts_of_ones_own_give_the_same_bits_on_three_ranks_also_resumed(tmp_path: Path) -> None:
    jobs = [job(settings, tmp_path / f"{name}3") for name, settings in PARTS.items()]
    jobs += [job(settings, tmp_path / f"{name}1", stop_after=2) for name, settings in PARTS.items()]
    of_three = on_ranks(3, jobs, tmp_path)
    for settings, name, found in zip(PARTS.values(), PARTS, of_three, strict=False):
        alone = run(settings, str(tmp_path / f"{name}1"), resume=True)
        assert np.array_equal(alone["model"], found["model"]), name
