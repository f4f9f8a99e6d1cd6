"""Custom samplers, weights, aggregators, attacks and server steps in real runs: what is passed, recorded, rejected."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.updates.attacks import PoisonedLabels
from tests.end_to_end import own_sums
from tests.end_to_end.in_process import QUIET, run
from tests.reference.program import traced

OWN = "tests.end_to_end.own_sums:"
FEW = ["data.source=digits:clients=9,alpha=0.4", "model.hidden=[8]", "model.activation=tanh", "rounds=2"]
FEW += ["local.lr=0.02"]
ALL = [*FEW, "clients.sampler=all"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


@pytest.mark.parametrize("weights", ["root", "root_of_used"])
def test_custom_rows_and_weights_are_those_that_are_trained_and_summed(weights: str, tmp_path: Path) -> None:
    settings = [
        *ALL,
        "seed=5",
        f"samples.sampler={OWN}rare_first",
        "samples.sampler.share=0.4",
        f"server.weights={OWN}{weights}",
    ]
    trace = traced(load_config(None, [*QUIET, *settings]), tmp_path / "run")
    assert trace is not None
    data = run(*settings, "rounds=1").experiment.data
    for t in range(2):
        factors = dict(trace["factors"][trace["factors"][:, 0] == t][:, 1:].tolist())
        for k in range(9):
            rows = trace["rows"][(trace["rows"][:, :2] == [t, k]).all(1), 2]
            client = type("Client", (), {})()
            client.labels, client.expected = data.labels(k), float(data.sizes[k])
            client.generator = Streams(5).generator(Purpose.ROWS, t, k)
            assert rows.tolist() == own_sums.rare_first(client, share=0.4).tolist()
            factors[k] /= np.sqrt(data.sizes[k]) if weights == "root" else len(rows) / np.sqrt(data.sizes[k])
        assert list(factors.values()) == pytest.approx([factors[0]] * 9, rel=1e-9)


def test_diagnostics_leave_out_what_the_server_does_not_know() -> None:
    def recorded(*settings: str) -> dict[str, Any]:
        return run(*ALL, "logging.diagnostics=true", *settings).records[-1]

    plain, own = recorded(), recorded(f"samples.sampler={OWN}rare_first")
    assert set(plain) == set(own) and own["clients_used"] == 1
    assert set(plain) - set(recorded("server.aggregator=median")) == {"gradient_diversity", "client_drift"}


def test_the_same_clients_attack_in_every_round_and_are_recorded(tmp_path: Path) -> None:
    settings = {"clients.sampler": "uniform", "clients.count": 4, "rounds": 6, "attack": "sign-flip"}
    settings |= {"clients.attack_fraction": 0.3, "model.hidden": [8]}
    done = fedmpi.run(settings, data="digits:clients=10", out=tmp_path / "run")
    drawn = Streams(0).generator(Purpose.ATTACK).choice(10, 3, replace=False, shuffle=False)
    assert done.summary["attackers"] == sorted(drawn.tolist())
    assert len({record["attackers"] for record in done.records}) > 1  # those that were selected


def test_labels_are_flipped_in_whichever_way_samples_are_loaded() -> None:
    data = ClientData(open_store("digits:clients=5"), torch.device("cpu"), standardize=True)
    flipped, attackers = PoisonedLabels(data, Component("attack", "label-flip"), np.array([0, 3])), (0, 3)
    rows = [np.arange(k, data.sizes[k], 2) for k in range(5)]
    alone = [flipped.load(k)[1] for k in range(5)]
    for k in range(5):
        own = data.load(k)[1]
        assert alone[k].tolist() == (9 - own if k in attackers else own).tolist()
    first = np.cumsum(data.sizes) - data.sizes
    together = flipped.load_positions(np.concatenate([first[k] + rows[k] for k in range(5)]))[1].tolist()
    assert together == [label for k in range(5) for label in alone[k][rows[k]].tolist()]
    assert flipped.load_positions(np.arange(data.sizes.sum()))[1].tolist() == torch.cat(alone).tolist()


class KeepsTotals(fedmpi.LocalAlgorithm):
    """Plain steps; keeps the totals of every round."""

    def server_step(self, server: Any, update: torch.Tensor, sums: Any, totals: Any, generator: Any) -> torch.Tensor:
        RECEIVED_TOTALS.append(totals)
        return update


RECEIVED_TOTALS: list[Any] = []


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_computed_after_the_work_are_divided_by_as_they_are(normalized: bool) -> None:
    unit = 3e-3

    class Judging:
        def __call__(self, cohort: Any, sizes: np.ndarray) -> np.ndarray:
            return np.ones(len(cohort.clients))

        def after(self, work: Any) -> float:
            return unit * (work.client + 1) * work.coefficient

    def planned(cohort: Any, sizes: np.ndarray) -> np.ndarray:
        return unit * (cohort.clients + 1)

    RECEIVED_TOTALS.clear()
    keys = {"clients.sampler": "all", "rounds": 2, "model.hidden": [6], "server.optimizer.lr": min(1, 1 / unit / 15)}
    given = []
    for algorithm, own in ((KeepsTotals, Judging), ("plain", planned)):
        chosen = {"local.algorithm": algorithm, "server.weights": fedmpi.weights(normalized=normalized)(own)}
        given.append(fedmpi.run({**keys, **chosen}, data="digits:clients=5"))
    weight = 1.0 if normalized else 15 * unit  # normalized sums are divided before the server's step
    assert [totals.weight for totals in RECEIVED_TOTALS] == pytest.approx([weight] * 2, rel=1e-12)
    assert [totals.divisor for totals in RECEIVED_TOTALS] == [1.0] * 2
    judged, plain = (torch.cat([value.flatten() for value in run.model.state_dict().values()]) for run in given)
    torch.testing.assert_close(judged, plain, rtol=1e-4, atol=1e-6)
