"""Numbers of clients that samplers remember or measure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedmpi
from fedmpi import ClientArrays, Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.common.decorators import HELD_OUT, MEASURABLE, UPDATES
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import load_config
from fedmpi.config.loading import given_config
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.local.measures import ClientMeasures
from fedmpi.local.observer import UpdateNumbers

QUIET = {"evaluation.every": 9, "logging.tensorboard": False, "checkpoint.every": 0, "model.hidden": [6]}
D, HEAD, SKETCH = 5 * 6 + 6 + 6 * 3 + 3, 6 * 3 + 3, 7


def arrays(held_out: bool = True) -> ClientArrays:
    """Return six clients of five features and three classes; client 5 has no held-out samples."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((90, 5)).astype(np.float32)
    y, owner = (x[:, 0] > 0) + generator.integers(0, 2, 90), np.arange(90) % 6
    val = (x[::4] + 0.1, y[::4], np.arange(23) % 5) if held_out else None
    return ClientArrays(x, y, owner, test=(x[:9], y[:9]), val=val)


@client_sampler(needs=(*MEASURABLE, *UPDATES))
def curious(view: Any, *, sketch_size: int = SKETCH) -> Cohort:
    """Select clients at random, and keep everything."""
    return Cohort(np.sort(view.generator.choice(view.available, view.count, replace=False)))


def connected(settings: dict[str, Any], held_out: bool = True) -> Experiment:
    """Assemble an experiment on the six clients."""
    table = {"data.source": arrays(held_out), "rounds": 3, "clients.count": 3, "local.lr": 0.2}
    return Experiment.connect(given_config("fedavg", {**table, **QUIET, **settings}))


@pytest.mark.parametrize("weights", [(), (0.5, 4.0, 1.0)], ids=["equal", "weighted classes"])
def test_measures_are_those_of_plain_loops_in_float64(weights: tuple[float, ...]) -> None:
    experiment = connected({"clients.sampler": curious, "task.loss.class_weights": weights})
    measures, data = experiment.decisions.measure, experiment.data_facts.store
    assert isinstance(measures, ClientMeasures)
    w, clients = measures.model.initial + 0.01, np.array([1, 4, 5], np.int64)
    found = measures(3, w, clients, MEASURABLE)
    np.testing.assert_array_equal(measures(3, w, clients, HELD_OUT), found[:, -len(HELD_OUT) :])
    module, offsets = measures.model.module.double(), data.validation_offsets
    assert offsets is not None
    for row, k in zip(found, clients.tolist(), strict=True):
        values = [p.double().clone().requires_grad_() for p in measures.model._cut(w)]
        names, expected = [name for name, _ in module.named_parameters()], {}
        own = experiment.data.load(k)
        part = experiment.data.load_held_out(np.arange(offsets[k], offsets[k + 1]))
        for prefix, (x, y) in {"": own, **({} if k == 5 else {"val_": part})}.items():
            outputs = torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x.double(),))
            losses = functional.cross_entropy(outputs, y, reduction="none")
            shares = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)[y]
            shares = shares / shares.sum()
            expected[f"{prefix}loss"] = float(losses.detach() @ shares)
            expected[f"{prefix}loss_rms"] = float((losses.detach().square() @ shares).sqrt())
            expected[f"{prefix}accuracy"] = float((outputs.argmax(1) == y).double().mean())
            if not prefix:
                gradient = torch.cat([g.flatten() for g in torch.autograd.grad(losses @ shares, values)])
                expected["gradient_norm"] = float(gradient.norm())
        np.testing.assert_allclose(row, [expected.get(name, np.nan) for name in MEASURABLE], rtol=1e-5)
    experiment.close()


@pytest.mark.parametrize("layers", [None, ("dense1.weight", "*.bias")])
def test_numbers_of_updates_are_those_of_the_updates_that_the_server_receives(layers: Any) -> None:
    received: dict[int, torch.Tensor] = {}

    @fedmpi.aggregator
    def noting(updates: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        received.update(enumerate(updates.clone()))
        return coefficients @ updates

    @client_sampler(needs=UPDATES)
    def layered(
        view: Any, *, sketch_size: int = SKETCH, layers: tuple[str, ...] = ("dense1.weight", "*.bias")
    ) -> Cohort:
        return Cohort(np.sort(view.generator.choice(view.available, view.count, replace=False)))

    sampler = curious if layers is None else layered
    changed = {"compression": "int8", "attack": "sign-flip", "clients.attack_fraction": 0.5}
    experiment = connected({"clients.sampler": sampler, "server.aggregator": noting, **changed})
    numbers, checked = experiment.decisions.numbers, set()
    take = experiment.server.take
    generator, width = Streams(experiment.config.seed).generator(Purpose.SKETCH), -(-D // SKETCH)
    order = generator.permutation(SKETCH * width)
    signs = generator.choice([-1.0, 1.0], len(order))
    places = list(range(D - HEAD, D)) if layers is None else [*range(36), *range(54, 57)]

    def taking(plan: Any, totals: Any, model: torch.Tensor) -> None:
        take(plan, totals, model)
        for row, k in enumerate(plan.clients.tolist()):
            update, sketch = received[row].double(), [0.0] * SKETCH
            for j, i in enumerate(order.tolist()):
                sketch[j // width] += float(signs[j] * update[i]) if i < D else 0.0
            assert numbers.values["update_norm"][k] == pytest.approx(float(update.norm()), rel=1e-6)
            np.testing.assert_allclose(numbers.values["update_sketch"][k], sketch, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(numbers.values["head_update"][k], update[places].float())
            assert numbers.seen["update_sketch"][k] == plan.round
            checked.add(k)

    object.__setattr__(experiment.server, "take", taking)
    Simulation(experiment, None).run()
    assert len(checked) > 3 and 5 in checked
    if layers is None:
        assert np.flatnonzero(numbers.seen["val_loss"] >= 0).tolist() == sorted(checked - {5})
    experiment.close()


def test_inner_products_of_sketches_are_those_of_the_updates_on_average() -> None:
    x, y = np.random.default_rng(2).standard_normal((2, 50))
    x, y = x + 0.5, y + 0.5
    model: Any = SimpleNamespace(size=51, trainable=50, device="cpu", dtype=torch.float64, layout={}, parameters=[])
    received = [np.append(one, 99.0) for one in (x, y)]  # with a running mean of batch norm, which is no parameter
    found, sampler = [], resolve("client sampler", only_sketches)
    for seed in range(3_000):
        numbers = UpdateNumbers(sampler, model, Streams(seed))
        found.append(float(np.dot(*(numbers.of("update_sketch", torch.from_numpy(one)) for one in received))))
    assert numbers.of("update_norm", torch.from_numpy(received[0])) == pytest.approx(float(np.linalg.norm(x)))
    error = (np.mean(found) - x @ y) / (np.std(found) / len(found) ** 0.5)
    assert abs(error) < 4 and np.var(found) < 1.1 * ((x @ x) * (y @ y) + (x @ y) ** 2) / SKETCH


@client_sampler(needs=("update_sketch",))
def only_sketches(view: Any, *, sketch_size: int = SKETCH) -> Cohort:
    raise NotImplementedError


@client_sampler(needs=UPDATES, measures=(*UPDATES, "loss"))
class Rehearsing:
    """Select the candidates with the longest updates, and compare the updates that they then send."""

    def __init__(self, *, sketch_size: int = SKETCH):
        self.fresh: dict[str, np.ndarray] = {}
        self.compared = 0

    def candidates(self, view: Any) -> np.ndarray:
        for name, values in self.fresh.items():
            np.testing.assert_array_equal(view.last(name)[self.selected], values)
            self.compared += 1
        return view.generator.choice(view.available, 4, replace=False)[[3, 0, 1, 2, 0]]  # one of them twice

    def draw(self, view: Any) -> Cohort:
        norms = view.fresh("update_norm")
        assert np.isfinite(norms).sum() == np.isfinite(view.fresh("head_update")[:, 0]).sum() == 4
        self.selected = np.sort(np.argsort(-np.nan_to_num(norms))[:2])
        self.fresh = {name: view.fresh(name)[self.selected] for name in UPDATES}
        return Cohort(self.selected, numbers={"compared": self.compared})


@pytest.mark.parametrize(
    "settings", [{"local.proximal_mu": 0.5}, {"local.optimizer": "adam", "compression": "int8", "local.engine": "auto"}]
)
def test_candidates_that_train_send_the_same_update_if_they_are_selected(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    given = {"rounds": 4, "clients.count": 2, "clients.sampler": Rehearsing, **QUIET, **settings}
    run = fedmpi.run("fedavg", given, data=arrays(), out=tmp_path / "run")
    assert "for update_sketch (7 values), head_update (21 values)" in (tmp_path / "run" / "run.log").read_text()
    assert run.records[-1]["sampler_compared"] == 9
    for record in run.records:
        assert record["candidates"] == 4 and record["bytes_client_down"] == 4 * 4 * D
        numbers = 4 * 4 * (1 + SKETCH + HEAD + 1)
        size = 4 * D if "compression" not in settings else D + 4
        assert record["bytes_client_up"] == 2 * size + numbers


@pytest.mark.parametrize(
    ("sampler", "settings", "words"),
    [
        (curious, {"data": arrays(held_out=False)}, "Prepare the data with --val"),
        (Rehearsing, {"local.algorithm": "scaffold"}, "train only to be measured"),
        (Rehearsing, {"compression": "int8", "compression.error_feedback": True}, "would change the residual"),
        (Rehearsing, {"samples.sampler": "bernoulli", "samples.budget": 40}, 'samples.sampler = "all"'),
        ("hics", {"clients.sampler.layers": ["none*"]}, r"'none\*' matches no trainable parameter of the model"),
        (Rehearsing, {"topology": "mediators"}, "each client's own update is needed"),
    ],
)
def test_numbers_that_cannot_be_had_are_rejected_before_the_start(sampler: Any, settings: Any, words: str) -> None:
    data = settings.pop("data", None) or arrays()
    with pytest.raises(UserError, match=words):
        fedmpi.run("fedavg", {"rounds": 1, "clients.count": 2, "clients.sampler": sampler, **settings}, data=data)


@pytest.mark.parametrize(("sampler", "needed"), [(curious, 672), (Rehearsing, 2 * 672)])
def test_vectors_that_do_not_fit_into_memory_are_rejected(
    sampler: Any, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmpi.core.experiment.free_memory", lambda: needed - 1)
    with pytest.raises(UserError, match=r"update_sketch \(7 values\), head_update \(21 values\) of 6 clients"):
        connected({"clients.sampler": sampler})


def test_the_losses_remembered_are_those_of_the_model_that_was_sent() -> None:
    settings = ["clients.sampler=active", "clients.count=3", "rounds=3", "local.lr=0.2"]
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
        candidates, _ = experiment.decisions.planner.cohorts._views[t]
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


def test_rounds_without_selected_clients_leave_the_numbers_as_they_were() -> None:
    quiet = ["data.source=digits:clients=8", "evaluation.every=9", "logging.tensorboard=false", "checkpoint.every=0"]
    settings = ["clients.sampler=k-vib", "clients.count=1", "rounds=9", "server.weights=unbiased", *quiet]
    counts = list[int]()
    experiment = Experiment.connect(load_config(None, settings))
    Simulation(experiment, on_round=lambda record: counts.append(record["participants"])).run()
    assert 0 in counts and np.isfinite(experiment.decisions.numbers.values["update_norm"]).any()


@client_sampler(measures=("seconds", "download_seconds", "upload_seconds"))
class Timed:
    """Keep the times of the candidates."""

    seen: list[np.ndarray]

    def candidates(self, view: Any) -> np.ndarray:
        return np.array([1, 4])

    def draw(self, view: Any) -> Cohort:
        Timed.seen = [view.fresh(name)[[0, 1, 4]] for name in ("seconds", "download_seconds", "upload_seconds")]
        return Cohort(np.array([1]))


def test_candidates_report_the_seconds_of_their_transfers() -> None:
    """15 samples at 3,000 per second; d values of four bytes at 4 and at 1 MB per second."""
    keys = {"data.source": arrays(), "clients.sampler": Timed, "clients.count": 1, "local.epochs": 1, "rounds": 1}
    speed = {"devices.speed": lambda view: 200.0 * view.class_counts.sum(axis=1)}
    [record] = fedmpi.run("fedavg", {**QUIET, **keys, **speed}).records
    assert record["bytes_client_down"] == record["bytes_client_up"] == 4 * D
    seconds, down, up = Timed.seen
    np.testing.assert_allclose(down, [np.nan, 4 * D / 4e6, 4 * D / 4e6])
    np.testing.assert_allclose(up, [np.nan, 4 * D / 1e6, 4 * D / 1e6])
    np.testing.assert_allclose(seconds - down - up, [np.nan, 0.005, 0.005])
    with pytest.raises(ComponentFailure, match=r"returned the rate 0\. Return rates above 0"):
        fedmpi.run("fedavg", {**keys, "devices.speed": lambda view: 0.0 * view.sizes})
    with pytest.raises(UserError, match="it draws by seconds, which only simulated time counts. Set devices = true"):
        fedmpi.run("fedavg", keys)
