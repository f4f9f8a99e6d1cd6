"""Samplers in a file of one's own, and those that remember or measure clients, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedmpi import UserError
from fedmpi.clients.view import View
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.local.client_metrics import ClientMeasures

MINE = """
import numpy as np
from fedmpi import Cohort, client_sampler


@client_sampler(needs=("loss",))
def loudest(view, *, keep: float = 0.5) -> Cohort:
    "The clients with the highest last loss, the rest at random."
    last = view.last("loss")[view.available]
    order = np.argsort(-np.nan_to_num(last, nan=-1.0), kind="stable")
    loud = view.available[order[: int(keep * view.count)]]
    rest = np.setdiff1d(view.available, loud)
    count = min(view.count - len(loud), len(rest))
    return Cohort(np.concatenate([loud, view.generator.choice(rest, count, replace=False)]))


@client_sampler(measures=("loss",))
class PowerOfChoice:
    def __init__(self, *, candidates: int = 30):
        self.d = candidates

    def candidates(self, view):
        n = view.sizes[view.available]
        return view.generator.choice(view.available, min(self.d, len(n)), replace=False, p=n / n.sum())

    def draw(self, view):
        loss = np.nan_to_num(view.fresh("loss"), nan=-1.0)
        return Cohort(np.argsort(-loss, kind="stable")[: view.count])


@client_sampler(measures=("seconds", "update_norm", "loss"))
class OnTrial:
    def candidates(self, view):
        return view.generator.choice(view.available, min(9, len(view.available)), replace=False)

    def draw(self, view):
        gain = view.fresh("update_norm") / view.fresh("seconds") + view.fresh("loss")
        return Cohort(np.argsort(-np.nan_to_num(gain, nan=-1.0), kind="stable")[: view.count])


@client_sampler(needs=("loss", "accuracy", "update_norm", "gradient_norm", "seconds"))
def looks_at_all(view) -> Cohort:
    score = np.zeros(len(view.sizes))
    for name in ("loss", "accuracy", "update_norm", "gradient_norm", "seconds"):
        values, age = view.last(name), view.age(name)
        assert values.shape == age.shape == view.sizes.shape
        assert (np.isnan(values) == (age < 0)).all() and (age != 0).all() and (age <= view.round).all()
        score += np.nan_to_num(values, nan=1.0)
    assert view.class_counts.sum(axis=1).tolist() == view.sizes.tolist()
    p = score[view.available] / score[view.available].sum()
    return Cohort(view.generator.choice(view.available, min(view.count, len(p)), replace=False, p=p))


@client_sampler(needs=("strata",))
def one_of_each(view) -> Cohort:
    "One client of every stratum."
    groups = [view.available[view.strata.labels[view.available] == h] for h in range(len(view.strata.sizes))]
    return Cohort([int(view.generator.choice(group)) for group in groups], [1 / len(group) for group in groups])


@client_sampler
def fails(view, *, at: int = 2):
    if view.round == at:
        raise ValueError("no clients today")
    return Cohort(view.available[: view.count])
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MINE)
    return folder


def test_measures_are_those_of_plain_loops_in_float64() -> None:
    config = load_config(None, ["data.source=digits:clients=6", "clients.count=2"])
    data = ClientData(open_store(config.data.source.choice), torch.device("cpu"), standardise=True)
    measures = ClientMeasures(config, data, Streams(0), torch.device("cpu"), 0)
    w = measures.model.initial + 0.01
    clients = np.array([1, 4], np.int64)
    found = measures(3, w, clients, ("gradient_norm", "loss", "accuracy"))
    module = measures.model.module.double()
    for row, k in zip(found, clients.tolist(), strict=True):
        x, y = data.load(k)
        values = [p.double().clone().requires_grad_() for p in measures.model._cut(w)]
        names = [name for name, _ in module.named_parameters()]
        outputs = torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x.double(),))
        loss = functional.cross_entropy(outputs, y)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, values)])
        expected = [float(gradient.norm()), float(loss.detach()), float((outputs.argmax(1) == y).double().mean())]
        np.testing.assert_allclose(row, expected, rtol=1e-5)


def test_what_is_measured_of_an_attacker_is_on_the_labels_that_it_trains_on() -> None:
    settings = ["data.source=digits:clients=6", "clients.sampler=power-of-choice", "clients.count=2"]
    experiment = Experiment.connect(load_config(None, [*settings, "attack=label-flip", "clients.attack_fraction=0.5"]))
    measure, w = experiment.decisions.inquiry.measure, experiment.model.initial
    assert measure is not None and len(experiment.data_facts.attackers) == 3
    found = measure(0, w, np.arange(6), ("accuracy",))[:, 0]
    experiment.model.bind(w)
    for k in range(6):
        x, y = experiment.data.load(k)
        trained_on = 9 - y if k in experiment.data_facts.attackers else y
        with torch.no_grad():
            right = experiment.model.module.eval()(x).argmax(1) == trained_on
        assert found[k] == pytest.approx(float(right.double().mean()))
    experiment.close()


def test_labels_of_attackers_are_flipped_for_the_gradients_that_clients_are_drawn_by() -> None:
    settings = ["data.source=digits:clients=6", "clients.sampler=importance", "clients.count=2"]
    settings += ["clients.sampler.features.probe=full", "clients.sampler.features=full-gradient"]
    experiment = Experiment.connect(load_config(None, [*settings, "attack=label-flip", "clients.attack_fraction=0.5"]))
    attackers, model = experiment.data_facts.attackers, experiment.model
    experiment.decisions.observe(0, model.initial)
    strata = experiment.decisions.stratifier.strata
    assert len(attackers) == 3 and strata is not None and strata.norms is not None
    for k in range(6):
        x, y = experiment.data.load(k)
        expected = {}
        for flipped, labels in ((False, y), (True, 9 - y)):
            model.bind(model.initial)
            _, gradients = model.loss_gradient(x, labels)
            expected[flipped] = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        assert strata.norms[k] == pytest.approx(expected[k in attackers], rel=1e-4)
        assert expected[True] != pytest.approx(expected[False], rel=1e-3)
    experiment.close()


def test_the_losses_remembered_are_those_of_the_model_that_was_sent(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(mine)
    settings = ["clients.sampler=mine:loudest", "clients.count=3", "rounds=3", "local.lr=0.2"]
    quiet = ["data.source=digits:clients=8", "evaluation.every=9", "logging.tensorboard=false", "checkpoint.every=0"]
    experiment = Experiment.connect(load_config(None, [*settings, *quiet]))
    simulation = Simulation(experiment, None)
    latest: dict[int, tuple[int, float]] = {}
    inquire, measure = experiment.decisions.inquire, experiment.decisions.inquiry.measure
    assert measure is not None

    def noting(plan: Any, model: torch.Tensor) -> None:
        values = measure(plan.round, simulation.model, plan.clients, ("loss",))[:, 0]
        latest.update({int(k): (plan.round, float(v)) for k, v in zip(plan.clients, values, strict=True)})
        inquire(plan, model)

    experiment.decisions.inquire = noting  # type: ignore[method-assign]
    simulation.run()
    numbers = experiment.decisions.inquiry.numbers
    ages, last = numbers.age("loss", 3), numbers.last("loss")
    for k in range(8):
        expected = (3 - latest[k][0], latest[k][1]) if k in latest else (-1, np.nan)
        np.testing.assert_array_equal((ages[k], last[k]), expected)
    experiment.close()


def test_norms_and_seconds_remembered_are_those_of_the_only_participant(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(mine)
    settings = ["clients.sampler=mine:looks_at_all", "clients.count=1", "rounds=1", "devices=true"]
    quiet = ["data.source=digits:clients=5", "logging.tensorboard=false", "checkpoint.every=0", "local.lr=0.2"]
    experiment = Experiment.connect(load_config(None, [*settings, *quiet]))
    records: list[dict[str, Any]] = []
    simulation = Simulation(experiment, on_round=records.append)
    before = simulation.model.clone()
    simulation.run()
    numbers = experiment.decisions.inquiry.numbers
    (k,) = np.flatnonzero(numbers.age("update_norm", 1) == 1)
    assert numbers.last("update_norm")[k] == pytest.approx(float((simulation.model - before).norm()), rel=1e-5)
    assert numbers.last("seconds")[k] == records[0]["virtual_seconds"] > 0
    experiment.close()


def test_those_who_take_part_have_the_highest_losses_of_the_candidates() -> None:
    settings = ["clients.sampler=power-of-choice", "clients.sampler.candidates=6", "clients.count=2"]
    quiet = ["rounds=3", "data.source=digits:clients=9", "evaluation.every=9", "checkpoint.every=0", "local.lr=0.2"]
    experiment = Experiment.connect(load_config(None, [*settings, *quiet, "logging.tensorboard=false"]))
    simulation, seen = Simulation(experiment, None), []
    measure, plan = experiment.decisions.inquiry.measure, experiment.decisions.plan
    assert measure is not None

    def planned(t: int) -> Any:
        everybody = np.arange(9, dtype=np.int64)
        candidates = experiment.decisions.planner.cohorts._views[t]
        losses = measure(t, simulation.model, everybody, ("loss",))[:, 0]
        fresh = candidates.fresh("loss")
        measured = np.flatnonzero(~np.isnan(fresh))
        np.testing.assert_array_equal(fresh[measured], losses[measured])
        found = plan(t)
        best = measured[np.argsort(-losses[measured])][:2]
        seen.append((len(measured), found.clients.tolist() == sorted(best.tolist())))
        return found

    experiment.decisions.plan = planned  # type: ignore[method-assign]
    simulation.run()
    assert seen == [(6, True)] * 3
    experiment.close()


# The configuration


@pytest.fixture
def here(mine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(mine)
    monkeypatch.syspath_prepend(mine)
    return mine


def test_weights_that_need_inclusion_probabilities_are_refused_where_nobody_knows_them(here: Path) -> None:
    settings = [
        "clients.sampler=mine:loudest",
        "clients.count=3",
        "rounds=1",
        "data.source=digits:clients=8",
    ]
    experiment = Experiment.connect(load_config(None, [*settings, "server.weights=unbiased"]))
    with pytest.raises(UserError, match=r'server.weights = "unbiased" divides by inclusion probabilities'):
        experiment.decisions.plan(0)
    experiment.close()


def test_what_a_sampler_sees_cannot_be_changed() -> None:
    sizes, present, counts = np.arange(4), np.array([0, 2]), np.ones((4, 2), np.int64)
    measured = {"loss": np.full(4, 0.5)}
    view = View(0, 1, sizes, present, Streams(0), measured=measured, counts=lambda: counts)
    for array in (view.sizes, view.available, view.class_counts, view.fresh("loss")):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    for array in (sizes, present, counts, measured["loss"]):
        array += 1  # whose they are may
