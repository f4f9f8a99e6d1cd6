"""Privacy accounts of the size query in planned rounds: those that disclose their size otherwise are charged without
bound. `tests/reference` recomputes what every answer costs, also after a resume."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from fedmpi import UserError
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core.accounts import Accounts
from fedmpi.core.plan import Planner
from fedmpi.privacy.sizes import estimate_total, exposure, saturations
from tests.end_to_end.in_process import run_into

SIZES = np.array([10, 1, 30, 5, 5, 20, 9, 20], np.int64)
PRIVATE = (
    *("preset=fedsampling", "samples.budget=25", "samples.size.estimate=duchi", "samples.size.max_size=40"),
    "samples.size.epsilon=3",
)
ASKED = (*PRIVATE[:-1], "samples.size.query=selected", "samples.size.epsilon=1")


def planner(*settings: str) -> Planner:
    config = load_config(None, settings)
    streams = Streams(config.seed)
    return Planner(config, SIZES, streams, CohortDraw(config, SIZES, None, streams, values=1000))


@pytest.mark.parametrize(
    "settings, named, known",
    [
        (["server.weights=samples"], "server.weights", 2),
        (["server.weights=unbiased"], "population", 8),
        (["server.weights=uniform", "clients.sampler=weighted"], "clients.sampler", 8),
        (["server.weights=uniform", "rebalance=true"], "rebalance", 8),
    ],
)
def test_sizes_sent_openly_elsewhere_are_reported_as_unprotected_and_said_once(
    settings: list[str], named: str, known: int, caplog: pytest.LogCaptureFixture
):
    drawn = ("clients.sampler=uniform", "clients.count=2")
    leaking = planner(*PRIVATE, *drawn, *settings)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        plans = [leaking.plan(t) for t in range(2)]
    assert plans[0].facts["size_unprotected"] == known
    for plan in plans:
        assert plan.facts["size_epsilon_max"] == plan.facts["size_epsilon_mean"] == math.inf
    assert len(caplog.records) == 1
    assert named in caplog.text and "not protect" in caplog.text


STRATA = ("clients.sampler=stratified", "clients.count=2")


@pytest.mark.parametrize(
    "settings, named",
    [
        (
            [*STRATA, "clients.sampler.features=label-histogram", "clients.sampler.within_stratum=uniform"],
            "clients.sampler.features",
        ),
        ([*STRATA, "clients.sampler.initial_step=true"], "clients.sampler.initial_step"),
        ([*STRATA, "server.weights=samples"], "server.weights"),
        (["server.weights=uniform", "topology=mediators"], "topology.scheduling"),
        (["server.weights=uniform", "topology=mediators", "topology.scheduling=random"], None),
        ([*STRATA, "server.weights=stratified"], None),
        (["server.weights=unbiased", "server.weights.population=clients"], None),
        (["clients.sampler=oort-loss", "clients.count=2"], "clients.sampler"),
    ],
)
def test_strata_of_labels_openings_and_schedules_by_label_disclose_sizes(settings: list[str], named: str | None):
    found = exposure(load_config(None, [*PRIVATE, *settings]))
    assert (found and found.setting.split(" = ")[0]) == named
    assert found is None or found.all_clients == named.startswith("clients.sampler")  # else of the participants only


def test_a_single_unclipped_client_is_reported():
    sizes = np.array([500, *[5] * 999])
    found = estimate_total("randomized-response", sizes, 1.0, 300, np.random.default_rng(3), clip=False)
    assert list(saturations(found, 10, 300)) == ["unclipped"]


@pytest.mark.parametrize("lost", ["ledger.answers", "usage.clients", "accountant.spent"])
def test_a_checkpoint_without_an_account_is_rejected_by_name(lost: str):
    pytest.importorskip("dp_accounting")
    noised = ("privacy.clip_norm=1", "privacy.noise_multiplier=1", "server.weights=uniform", "clients.sampler=all")
    counting = planner(*ASKED, *noised, "logging.diagnostics=true").accounts
    state = counting.state()
    counting.load(state)
    del state[lost]
    with pytest.raises(KeyError, match=lost):
        counting.load(state)


def test_a_run_does_not_resume_without_its_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = (*PRIVATE, "data.source=digits:clients=6", "rounds=3", "checkpoint.every=1", "model.hidden=[4]")
    with monkeypatch.context() as patch:
        patch.setattr(Accounts, "state", lambda self: {})
        assert run_into(tmp_path / "RUN", *settings, stop_after=1) == 75
    with pytest.raises(UserError, match="does not fit this run"):
        run_into(tmp_path / "RUN", *settings, resume=True)
