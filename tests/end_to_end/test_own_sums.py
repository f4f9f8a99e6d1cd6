"""Rows, weights, combiners, attacks and server steps in real runs: what is told, what is recorded, what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.updates.attacks import FlippedLabels
from tests.end_to_end import own_sums
from tests.end_to_end.in_process import run, run_into
from tests.end_to_end.own_sums import rare_first
from tests.mpi.launch import run_mpi
from tests.reference.program import traced

OWN = "tests.end_to_end.own_sums:"
FEW = [
    "data.source=digits:clients=9,alpha=0.4",
    "model.hidden=[8]",
    "model.activation=tanh",
    "rounds=2",
    "local.lr=0.02",
]
ALL = [*FEW, "clients.sampler=all"]
QUIET = ["logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)


def test_rows_and_weights_of_ones_own_are_those_that_are_trained_and_summed(tmp_path: Path) -> None:
    settings = [*ALL, f"samples.sampler={OWN}rare_first", "samples.sampler.share=0.4", f"server.weights={OWN}root"]
    config = load_config(None, [*QUIET, *settings, "seed=5"])
    trace = traced(config, tmp_path / "run")
    assert trace is not None
    experiment_labels = run(*settings, "rounds=1").experiment.data
    sizes = experiment_labels.sizes
    for t in range(2):
        factors = dict(trace["factors"][trace["factors"][:, 0] == t][:, 1:].tolist())
        ratio = np.array([factors[k] for k in range(9)]) / np.sqrt(sizes)
        assert ratio == pytest.approx(ratio[0], rel=1e-11)
        for k in range(9):
            rows = trace["rows"][(trace["rows"][:, :2] == [t, k]).all(1), 2]
            client = type("Client", (), {})()
            client.labels, client.expected = experiment_labels.labels(k), float(sizes[k])
            client.generator = Streams(5).generator(Purpose.ROWS, t, k)
            assert rows.tolist() == rare_first(client, share=0.4).tolist()


def test_weights_that_count_samples_count_the_rows_that_a_rule_gives(tmp_path: Path) -> None:
    settings = [*ALL, f"samples.sampler={OWN}rare_first", f"server.weights={OWN}root_of_used"]
    trace = traced(load_config(None, [*QUIET, *settings]), tmp_path / "run")
    assert trace is not None
    used = np.bincount(trace["rows"][trace["rows"][:, 0] == 0][:, 1])
    factors = trace["factors"][trace["factors"][:, 0] == 0]
    sizes = run(*ALL, "rounds=1").experiment.data.sizes
    ratio = factors[:, 2] / (used / np.sqrt(sizes))[factors[:, 1].astype(int)]
    assert ratio == pytest.approx(ratio[0], rel=1e-9)


def test_one_step_on_rows_of_ones_own_is_the_same_merged_and_alone() -> None:
    settings = [*ALL, f"samples.sampler={OWN}rare_first", "local.steps=1", "local.batch_size=all"]
    merged, alone = run(*settings), run(*settings, "local.engine=sequential")
    assert merged.experiment.trainer.engine.description.count("merged")
    moved = float((alone.model - alone.start).norm())
    assert float((merged.model - alone.model).norm()) < 1e-5 * moved


def test_a_rule_sees_the_labels_of_copies_too() -> None:
    settings = [*ALL, "rebalance=true", f"samples.sampler={OWN}rare_first"]
    data = run(*settings, "rounds=1").experiment.data
    for k in range(9):
        assert data.labels(k).tolist() == data.load(k)[1].tolist()


def test_diagnostics_leave_out_the_samples_that_the_server_does_not_know() -> None:
    last = run(*ALL, "logging.diagnostics=true").records[-1]
    own = run(*ALL, "logging.diagnostics=true", f"samples.sampler={OWN}rare_first").records[-1]
    pooled = run(*ALL, "logging.diagnostics=true", f"samples.sampler={OWN}every_other").records[-1]
    samples = {"samples_used", "sample_use_effective", "sample_use_gini"}
    assert set(last) - set(own) == samples
    assert own["clients_used"] == 1 and pooled["samples_used"] == pytest.approx(0.5, abs=1e-3)


def test_diagnostics_of_combined_updates_leave_out_what_compares_with_a_mean() -> None:
    record = run(*ALL, "logging.diagnostics=true", "server.aggregator=median").records[-1]
    assert record["update_norm"] > 0 and "gamma" in record
    assert not {"gradient_diversity", "client_drift"} & set(record)


@pytest.mark.parametrize("attack", [[], ["attack=sign-flip", "clients.attack_fraction=0.3"]])
def test_clients_keep_vectors_beside_a_combiner_as_beside_the_mean(attack: list[str]) -> None:
    settings = [*ALL, *attack, f"local.algorithm={OWN}Persistent", "rounds=4"]
    mean, combined = run(*settings), run(*settings, f"server.aggregator={OWN}weighted")
    plain = run(*ALL, *attack, "rounds=4")
    moved = float((mean.model - mean.start).norm())
    assert float((combined.model - mean.model).norm()) < 1e-5 * moved
    assert float((plain.model - mean.model).norm()) > 1e-2 * moved


def test_a_part_of_ones_own_keeps_its_defaults_where_a_built_in_one_has_the_same_option() -> None:
    config = load_config(None, [*ALL, f"server.optimizer={OWN}capped"])
    assert config.server.optimizer.options == {"lr": 0.5, "largest": 0.01}
    faster = load_config(None, [*ALL, f"server.optimizer={OWN}capped", "server.optimizer.lr=0.2"])
    assert faster.server.optimizer.options["lr"] == 0.2
    moved = run(*ALL, "rounds=1", f"server.optimizer={OWN}capped")
    assert float((moved.model - moved.start).abs().max()) == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_a_part_that_takes_any_option_is_given_none_of_another_part() -> None:
    settings = [
        f"server.aggregator={OWN}any_options",
        f"server.optimizer={OWN}capped",
        "server.aggregator.largest=0.02",
    ]
    config = load_config(None, [*ALL, *settings, "server.aggregator.sharpness=3"])
    assert config.server.aggregator.options == {"sharpness": 3}
    assert config.server.optimizer.options["largest"] == 0.02


def test_a_server_step_that_fails_after_a_resume_names_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*ALL, "rounds=3", f"server.optimizer={OWN}fragile"]
    run_into(tmp_path / "run", *settings, stop_after=2)
    monkeypatch.setattr(own_sums, "BROKEN", ["yes"])
    with pytest.raises(fedmpi.ComponentFailure, match="fragile .*failed in round 2: ArithmeticError"):
        run_into(tmp_path / "run", *settings, resume=True)


def test_objects_take_the_place_of_names() -> None:
    given = {"samples.sampler": own_sums.rare_first, "samples.sampler.share": 0.3, "server.weights": own_sums.root}
    given |= {"server.aggregator": own_sums.median, "server.optimizer": own_sums.Nesterov}
    names = {key: f"{OWN}{value.__name__}" if callable(value) else value for key, value in given.items()}
    common = {"rounds": 2, "clients.sampler": "all", "local.engine": "sequential", "model.hidden": [8]}
    by_object, by_name = (fedmpi.run({**common, **parts}, data="digits:clients=9") for parts in (given, names))
    for one, other in zip(by_object.model.parameters(), by_name.model.parameters(), strict=True):
        assert torch.equal(one, other)


# ---- attacks


def test_the_same_clients_lie_in_every_round_and_are_recorded(tmp_path: Path) -> None:
    settings = {"clients.sampler": "uniform", "clients.count": 4, "rounds": 6, "attack": "sign-flip"}
    done = fedmpi.run(
        {**settings, "clients.attack_fraction": 0.3, "model.hidden": [8]},
        data="digits:clients=10",
        out=tmp_path / "run",
    )
    attackers = done.summary["attackers"]
    assert attackers == sorted(set(attackers)) and len(attackers) == 3
    drawn = Streams(0).generator(Purpose.ATTACK).choice(10, 3, replace=False, shuffle=False)
    assert attackers == sorted(drawn.tolist())
    assert [0 <= record["attackers"] <= 3 for record in done.records] == [True] * 6
    assert len({record["attackers"] for record in done.records}) > 1  # those who took part


def test_labels_are_flipped_in_whichever_way_samples_are_loaded() -> None:
    data = ClientData(open_store("digits:clients=5"), torch.device("cpu"), standardise=True)
    flipped, attackers = FlippedLabels(data, np.array([0, 3])), (0, 3)
    rows = [np.arange(k, data.sizes[k], 2) for k in range(5)]
    alone = [flipped.load(k)[1] for k in range(5)]
    for k in range(5):
        own = data.load(k)[1]
        assert alone[k].tolist() == (9 - own if k in attackers else own).tolist()
    together = flipped.load_many(range(5), [None, *rows[1:]])[1].tolist()
    assert together == [label for k in range(5) for label in alone[k][rows[k] if k else slice(None)].tolist()]
    assert flipped.load_positions(np.arange(data.sizes.sum()))[1].tolist() == torch.cat(alone).tolist()


def test_what_an_attacker_gains_is_measured_on_the_labels_that_it_trains_on() -> None:
    alone = ["data.source=digits:clients=1", "model.hidden=[8]", "rounds=1", "clients.sampler=all"]
    flipped = run(*alone, "logging.diagnostics=true", "attack=label-flip", "clients.attack_fraction=1")
    x, y = flipped.experiment.data.load(0)
    model = flipped.experiment.model
    losses = {}
    for name, values in (("before", flipped.start), ("after", flipped.model)):
        model.bind(values)
        with torch.no_grad():
            losses[name] = float(torch.nn.functional.cross_entropy(model.module.eval()(x), 9 - y))
    gain = losses["before"] - losses["after"]
    assert flipped.records[0]["gamma"] == pytest.approx(gain, rel=1e-4) and gain > 0


@pytest.mark.slow
def test_robust_rules_learn_where_the_mean_is_led_astray() -> None:
    """Three of ten clients send what is eight times longer and the wrong way."""
    common = ["data.source=digits:clients=10,partition=iid", "model.hidden=[16]", "rounds=8", "local.lr=0.1"]
    attacks = ["clients.sampler=all", "attack=sign-flip", "clients.attack_fraction=0.3", "attack.scale=8"]
    rules = {
        "mean": [],
        "median": ["server.aggregator=median"],
        "trimmed-mean": ["server.aggregator=trimmed-mean", "server.aggregator.trim=0.3"],
        "krum": ["server.aggregator=krum", "server.aggregator.byzantine=3"],
    }
    losses = {name: run(*common, *attacks, *rule, evaluate=True).test_losses[-1] for name, rule in rules.items()}
    assert losses["mean"] > 2.3
    assert all(losses[name] < 1.0 for name in ("median", "trimmed-mean", "krum")), losses


def test_labels_can_be_flipped_where_mediators_train() -> None:
    settings = [*ALL, "topology=mediators", "topology.clients_per_mediator=3"]
    flipped = run(*settings, "attack=label-flip", "clients.attack_fraction=0.5")
    assert flipped.records[-1]["attackers"] == 5  # 4.5 rounded half up
    assert not torch.equal(flipped.model, run(*settings).model)


# ---- what does not go together

MEDIATORS = ["topology=mediators"]
REFUSED: dict[str, tuple[list[str], str]] = {
    "combiners with mediators": ([*MEDIATORS, "server.aggregator=median"], 'rule = "median" needs each.*never forms'),
    "q-FFL with mediators": ([*MEDIATORS, "server.weights=q-ffl"], 'weights = "q-ffl" needs each.*never forms'),
    "noise with mediators": (
        [*MEDIATORS, "attack=noise"],
        'attack = "noise" changes.*"label-flip" does',
    ),
    "combiners of merged gradients": (
        ["local.engine=merged", "local.steps=1", "server.aggregator=median"],
        'never forms each client\'s own update, which server.aggregator = "median" needs',
    ),
    "q-FFL of merged gradients": (
        ["local.engine=merged", "local.steps=1", "server.weights=q-ffl"],
        'never forms each client\'s own update, which server.weights = "q-ffl" needs',
    ),
    "attacks in merged gradients": (
        ["local.engine=merged", "local.steps=1", "attack=sign-flip"],
        'never forms each client\'s own update, which attack = "sign-flip" needs',
    ),
    "combiners of what is clipped for privacy": (
        ["server.aggregator=median", "privacy.clip_norm=1", "server.weights=uniform"],
        'privacy.clip_norm bounds.*server.aggregator = "median" does not form',
    ),
    "combiners of models": (["server.aggregator=median", "server.weights=literal"], '"literal" averages models'),
    "combiners and q-FFL": (["server.aggregator=median", "server.weights=q-ffl"], '"q-ffl" divides a sum by'),
    "diagnostics of q-FFL": (["server.weights=q-ffl", "logging.diagnostics=true"], 'which.*"q-ffl" changes'),
    "a clock that needs rows": (
        [f"samples.sampler={OWN}rare_first", "devices=true"],
        f'devices counts.*samples.sampler = "{OWN}rare_first" does not tell',
    ),
    "noise on rows that others decide": (
        [
            *(f"samples.sampler={OWN}every_other", "server.weights=uniform", "privacy.clip_norm=1"),
            "privacy.noise_multiplier=1",
        ],
        "sees the sizes of the whole cohort",
    ),
    "scale of flipped labels": (["attack=label-flip", "attack.scale=2"], "attack.scale.*means nothing here"),
    "a share of no attack": (
        ["clients.attack_fraction=0.2"],
        "clients.attack_fraction.*means nothing here: it needs attack",
    ),
    "a trim of the median": (
        ["server.aggregator=median", "server.aggregator.trim=0.2"],
        'server.aggregator = "trimmed-mean"',
    ),
    "krum without f": (["server.aggregator=krum"], "'krum' needs server.aggregator.byzantine, which has no default"),
    "a rule that nobody knows": (["server.aggregator=medain"], "did you mean 'median'"),
    "an option that a rule of one's own has not": (
        [f"samples.sampler={OWN}rare_first", "samples.shrae=0.2"],
        f"samples.shrae.*unknown to {OWN}rare_first: did you mean samples.sampler.share",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_means_nothing_together_is_refused_by_name(case: str) -> None:
    settings, reason = REFUSED[case]
    with pytest.raises(UserError) as caught:
        load_config(None, [*ALL, *settings])
    assert re.search(reason, str(caught.value)), caught.value


def test_krum_ends_a_run_whose_rounds_have_too_few_participants() -> None:
    with pytest.raises(UserError, match="needs more than 8 participants that send an update, but a round has 4"):
        run(*FEW, "clients.count=4", "server.aggregator=krum", "server.aggregator.byzantine=3")


FAILING = """
import numpy as np
import torch
from fedmpi import aggregator, data_sampler, weights

@data_sampler
def unsorted(client):
    return np.arange(len(client.labels))[::-1]

@data_sampler
def draws(client):
    return np.arange(2)[::0] if client.index == 4 else np.arange(len(client.labels))  # on one rank only

@aggregator
def broken(updates, coefficients):
    return updates.mean(0)[1:]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, message",
    [
        (["samples.sampler=failing:unsorted"], r"failing:unsorted.*rows that are not sorted"),
        (
            ["samples.sampler=failing:draws"],
            r"failing:draws \(.*failing.py:12\) failed in round 0, client 4: Val",
        ),
        (["server.aggregator=failing:broken"], r"failing:broken.*returned a tensor of shape"),
    ],
)
def test_a_failing_part_ends_three_ranks_with_one_and_its_name(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    words: list[Any] = [word for setting in [*ALL, *settings] for word in ("--set", setting)]
    done = run_mpi(3, ["-m", "fedmpi", "train", *words, "--out", tmp_path / "run"], cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
    assert "round 0" in done.stderr and "failing.py" in done.stderr


@pytest.mark.slow
def test_attackers_and_what_clients_keep_are_the_same_on_three_ranks(tmp_path: Path) -> None:
    settings = [*ALL, "attack=noise", "clients.attack_fraction=0.4", "server.aggregator=median", "server.exact=true"]
    settings += [f"local.algorithm={OWN}Persistent"]
    words: list[Any] = [word for setting in settings for word in ("--set", setting)]
    found = []
    for ranks in (1, 3):
        out = tmp_path / str(ranks)
        assert run_mpi(ranks, ["-m", "fedmpi", "train", *words, "--out", out]).returncode == 0
        summary = json.loads((out / "summary.json").read_text())
        found.append((summary["attackers"], (out / "model.safetensors").read_bytes()))
    assert found[0] == found[1] and len(found[0][0]) == 4


class KeepsTotals(fedmpi.LocalAlgorithm):
    """Plain steps; keeps what the server is told of a round."""

    def server_step(self, server: Any, update: torch.Tensor, sums: Any, totals: Any) -> torch.Tensor:
        RECEIVED_TOTALS.append(totals)
        return update


RECEIVED_TOTALS: list[Any] = []


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("unit", [3e-3, 40.0, 2.0**-300])
def test_judged_weights_are_passed_on_and_divided_by_as_they_are(normalized: bool, unit: float) -> None:
    class Judging:
        def __call__(self, cohort: Any, sizes: np.ndarray) -> np.ndarray:
            return np.ones(len(cohort.clients))

        def after(self, work: Any) -> float:
            return unit * (work.client + 1) * work.coefficient

    def planned(cohort: Any, sizes: np.ndarray) -> np.ndarray:
        return unit * (cohort.clients + 1)

    RECEIVED_TOTALS.clear()
    settings = {
        "clients.sampler": "all",
        "rounds": 2,
        "model.hidden": [6],
        "server.optimizer.lr": min(1, 1 / unit / 15),
    }
    given = [
        fedmpi.run(
            {
                **settings,
                "local.algorithm": algorithm,
                "server.weights": fedmpi.weights(normalized=normalized)(own),
            },
            data="digits:clients=5",
        )
        for algorithm, own in ((KeepsTotals, Judging), ("plain", planned))
    ]
    assert [totals.weight for totals in RECEIVED_TOTALS] == pytest.approx([15 * unit] * 2, rel=1e-12)
    assert [totals.divisor for totals in RECEIVED_TOTALS] == pytest.approx(
        [15 * unit if normalized else 1.0] * 2, rel=1e-12
    )
    judged, plain = (torch.cat([value.flatten() for value in run.model.state_dict().values()]) for run in given)
    torch.testing.assert_close(judged, plain, rtol=1e-4, atol=1e-6)


def test_weights_that_judge_are_given_the_losses_of_the_runs_own_loss() -> None:
    """(1 − p)² · −log p is smaller than −log p, whatever p in (0, 1)."""
    found: dict[str, dict[int, float]] = {"cross-entropy": {}, "focal": {}}
    for name, losses in found.items():

        class Listening:
            def __call__(self, cohort: Any, sizes: np.ndarray) -> np.ndarray:
                return np.ones(len(cohort.clients))

            def after(self, work: Any, losses: dict[int, float] = losses) -> float:
                losses[work.client] = work.loss
                return 1.0

        settings = {"server.weights": fedmpi.weights(Listening), "clients.sampler": "all", "rounds": 1}
        fedmpi.run({**settings, "task.loss": name, "model.hidden": [8]}, data="digits:clients=5")
    assert sorted(found["focal"]) == list(range(5))
    assert all(0 < found["focal"][k] < 0.95 * found["cross-entropy"][k] for k in range(5))
