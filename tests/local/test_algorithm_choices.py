"""Choices that contradict an algorithm are rejected by name before anything runs; the run log names the engine."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import fedmpi
from fedmpi import Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.clients.sampler import View
from fedmpi.config import load_config
from fedmpi.core.records import log_setup
from tests.end_to_end.in_process import run

OWN = "tests.local.own_algorithms"
UNIFORM = "server.weights=uniform"
SMALL = (
    "data.source=digits:clients=9",
    "clients.count=4",
    "model.hidden=[6]",
    "model.activation=tanh",
    "rounds=2",
    UNIFORM,
)
PARTS = ("preset=scaffold", "preset=feddyn", "preset=fednova")


@pytest.mark.parametrize("preset", PARTS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["topology=mediators"], "each client's own update"),
        (["privacy.clip_norm=1.0", UNIFORM], "privacy.clip_norm does not bound"),
        (["compression=int8"], "compression does not compress"),
        (["server.aggregator=median"], '(server.aggregator does not combine|set server.aggregator = "mean")'),
        (
            [
                "clients.sampler=stratified",
                "clients.sampler.initial_step=true",
                "clients.sampler.features=one-step-change",
            ],
            "clients.sampler.initial_step makes round 0 a single step",
        ),
    ],
)
def test_what_bypasses_clients_own_work_is_rejected(preset: str, settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f'local.algorithm = "{preset[7:]}".*{said}'):
        load_config(None, [preset, *settings])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["preset=scaffold", "local.optimizer=adam"], "only SGD's steps give back"),
        (["preset=scaffold", "local.proximal_mu=0.1"], "local.proximal_mu does not go with it"),
        (["preset=fednova", "local.optimizer=adam"], "for SGD only"),
        (["preset=fednova", "server.weights=literal"], '"literal" makes no weighted mean'),
        (["preset=fednova", "server.weights=q-ffl"], '"q-ffl" makes no weighted mean'),
        (["preset=fednova", f"server.weights={OWN}:Judged"], 'Judged" makes no weighted mean'),
        (["preset=fednova", f"server.weights={OWN}:sum_of_models"], 'sum_of_models" makes no weighted mean'),
        (["preset=feddyn", "local.proximal_mu=0.1"], "leave local.proximal_mu at 0"),
        (["preset=feddyn", "server.weights=samples"], 'set server.weights = "uniform"'),
        (["preset=feddyn", "clients.sampler=weighted"], "without replacement"),
        (["preset=feddyn", "clients.sampler=clustered-md"], "without replacement"),
        (["preset=fednova", "attack=sign-flip"], 'attack = "sign-flip" changes only the update'),
        (["preset=scaffold", "attack=noise"], 'attack = "noise" changes only the update'),
        (["preset=feddyn", "server.optimizer=adam"], 'set server.optimizer = "sgd"'),
        (["preset=feddyn", "server.optimizer.lr=0.5"], "server.optimizer.lr = 1"),
        (["preset=fedavg", "local.algorithm=scafold"], "did you mean 'scaffold'"),
        (["preset=fedavg", f"local.algorithm={OWN}:Scafold"], "did you mean 'Scaffold'"),
        (["preset=fedavg", "local.algorithm=tests.local.stacks:Source"], "no subclass of fedmpi.LocalAlgorithm"),
    ],
)
def test_choices_without_effect_are_rejected(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["local.algorithm=scaffold"], "nothing is merged: local.algorithm = 'scaffold' has its own correction"),
        (["local.algorithm=fednova"], "nothing is merged: local.algorithm = 'fednova' has its own finish"),
        (
            [f"local.algorithm={OWN}:DynamicLoss"],
            f"sequential (local.algorithm = '{OWN}:DynamicLoss' has its own objective",
        ),
    ],
)
def test_the_log_says_which_engine_and_why(settings: list[str], said: str, caplog: pytest.LogCaptureFixture) -> None:
    done = run(*SMALL, *settings, "rounds=1")
    with caplog.at_level(logging.INFO, logger="fedmpi"):
        log_setup(done.experiment)
    assert any("algorithm: " in line for line in caplog.messages)
    (engine,) = [line for line in caplog.messages if line.startswith("engine: ")]
    assert said in engine


def test_the_log_says_what_nothing_reads(caplog: pytest.LogCaptureFixture) -> None:
    done = run(*SMALL, "local.algorithm=tests.testing.bad_parts:NearlyNamed", "rounds=1")
    with caplog.at_level(logging.INFO, logger="fedmpi"):
        log_setup(done.experiment)
    (line,) = [line for line in caplog.messages if line.startswith("algorithm: ")]
    assert line.endswith(":NearlyNamed; has 'proximal', which nothing reads (or proximal_mu?)")


@pytest.mark.parametrize("engine", ["merged", "batched"])
def test_an_engine_that_cannot_do_it_is_rejected(engine: str) -> None:
    with pytest.raises(UserError, match=f'local.engine = "{engine}" is not possible here: .*its own'):
        run(*SMALL, f"local.algorithm={OWN}:DynamicLoss", f"local.engine={engine}", "local.batch_size=all")


def test_feddyn_rejects_a_cohort_that_counts_a_client_twice_by_name() -> None:
    def doubling(view: View) -> Cohort:
        return Cohort(np.arange(3), None, np.array([1, 1 + view.round, 1]))

    settings = {"clients.sampler": client_sampler(doubling), "clients.count": 3, "model.hidden": [4]}
    with pytest.raises(UserError, match='"feddyn" counts every participant once.*doubling" drew client 1 .* round 1'):
        fedmpi.run("feddyn", {**settings, "rounds": 2}, data="digits:clients=5")


@pytest.mark.parametrize("sampler", ["weighted", "clustered-md", "power-of-choice", "uniform"])
def test_sizes_that_draw_and_weigh_are_warned_of_once(sampler: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"clients.sampler": sampler, "clients.count": 3, "model.hidden": [4], "rounds": 2}
    for weights, times in (("samples", int(sampler != "uniform")), ("uniform", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedmpi"):
            fedmpi.run({**settings, "server.weights": weights}, data="digits:clients=5")
        assert caplog.text.count("a client counts as n_k² on average") == times


def test_state_is_sent_and_counted() -> None:
    values = 64 * 6 + 6 + 60 + 10
    for settings, up, down in (
        (["local.algorithm=scaffold"], 2, 2),
        (["local.algorithm=feddyn"], 1, 1),
        (["local.algorithm=plain"], 1, 1),
    ):
        [first, _] = run(*SMALL, *settings).records
        assert first["bytes_client_up"] == 4 * 4 * values * up, settings
        assert first["bytes_client_down"] == 4 * 4 * values * down, settings


def test_a_failing_hook_ends_the_run_with_its_line() -> None:
    with pytest.raises(ComponentFailure, match=r"own_algorithms.py:\d+\) failed in round 1: ZeroDivisionError"):
        run(*SMALL, f"local.algorithm={OWN}:FailsOnTheServer")
