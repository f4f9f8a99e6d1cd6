"""Numbers of clients that samplers remember or measure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.local.measures import ClientMeasures
from fedmpi.models.flat import FlatModel


def test_measures_are_those_of_plain_loops_in_float64() -> None:
    config = load_config(None, ["data.source=digits:clients=6", "clients.count=2"])
    data = ClientData(
        open_store(config.data.source.choice, config.data.source.options), torch.device("cpu"), standardize=True
    )
    model = FlatModel.built(config.model.choice, config.model.options, data.description, config.seed)
    measures = ClientMeasures(model, data, Streams(0), 0)
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


def test_the_losses_remembered_are_those_of_the_model_that_was_sent() -> None:
    settings = ["clients.sampler=oort", "clients.count=3", "rounds=3", "local.lr=0.2"]
    quiet = ["data.source=digits:clients=8", "evaluation.every=9", "logging.tensorboard=false", "checkpoint.every=0"]
    experiment = Experiment.connect(load_config(None, [*settings, *quiet]))
    simulation = Simulation(experiment, None)
    latest: dict[int, tuple[int, float]] = {}
    inquire, measure = experiment.decisions.inquire, experiment.decisions.measure
    assert measure is not None

    def noting(plan: Any, model: torch.Tensor) -> None:
        values = measure(plan.round, simulation.model, plan.clients, ("loss",))[:, 0]
        latest.update({int(k): (plan.round, float(v)) for k, v in zip(plan.clients, values, strict=True)})
        inquire(plan, model)

    experiment.decisions.inquire = noting  # type: ignore[method-assign]
    simulation.run()
    numbers = experiment.decisions.numbers
    for k in range(8):
        found = (numbers.seen["loss"][k], numbers.values["loss"][k])
        np.testing.assert_array_equal(found, latest.get(k, (-1, np.nan)))
    experiment.close()


def test_selected_clients_have_the_highest_losses_of_the_candidates() -> None:
    settings = ["clients.sampler=power-of-choice", "clients.sampler.candidates=6", "clients.count=2"]
    quiet = ["rounds=3", "data.source=digits:clients=9", "evaluation.every=9", "checkpoint.every=0", "local.lr=0.2"]
    experiment = Experiment.connect(load_config(None, [*settings, *quiet, "logging.tensorboard=false"]))
    simulation, seen = Simulation(experiment, None), []
    measure, plan = experiment.decisions.measure, experiment.decisions.plan
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
