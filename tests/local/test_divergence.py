"""A client whose training diverges: named with any engine, or left out as if it had never been invited."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import ClientFailure
from fedmpi.aggregation.exact import FloatSum
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.failures import OnDivergence, enter_round
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Job, LocalRule, WorkReport
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, flat_model, made

SIZES = [5, 12, 9, 7, 20]
ONE_STEP, EPOCHS = LocalRule(lr=0.1, epochs=None, steps=1, batch_size=None), LocalRule(lr=0.1, batch_size=4)
HUGE, LARGE = 1e30, 1e14
"""Features that make the loss no number, and such whose loss is finite and far from anything that is learned."""


def engine_of(name: str, model: FlatModel, source: InMemorySource, drops: bool):
    leaving = OnDivergence(drops)
    if name == "merged":
        return made(MergedEngine, model, source, STREAMS, 3, on_divergence=leaving)
    if name == "batched":
        return made(BatchedEngine, model, source, STREAMS, 3, chunk=4, on_divergence=leaving)
    return SequentialEngine(model, source, STREAMS, 3, on_divergence=leaving)


WAYS = [("sequential", EPOCHS), ("batched", EPOCHS), ("merged", ONE_STEP), ("batched", ONE_STEP)]


def spoiled(factor: float, clients: list[int]) -> InMemorySource:
    source = InMemorySource(SMALL_IMAGES, SIZES)
    ends = np.cumsum(SIZES)
    for client in clients:
        source.x[ends[client] - SIZES[client] : ends[client]] *= factor
    return source


def trained(engine, model: FlatModel, rule: LocalRule, without: list[int]) -> tuple[torch.Tensor, WorkReport]:
    """The sum and the report of all clients but some, beside what the sum already held."""
    total = FloatSum(np.zeros(model.size, np.float32))
    total.add(torch.ones(model.size), 0.5)
    tasks = [ClientTask(k, None, 1 / (k + 1)) for k in range(len(SIZES)) if k not in without]
    report = engine.train(tasks, Job(model.initial, rule, 2, total))
    total.flush()
    return total.tensor.clone(), report


@pytest.mark.parametrize("factor", [HUGE, LARGE])
@pytest.mark.parametrize(("name", "rule"), WAYS)
def test_a_client_that_diverges_is_named_by_every_engine(name: str, rule: LocalRule, factor: float) -> None:
    model, source = flat_model("mlp", SMALL_IMAGES, hidden=[9]), spoiled(factor, [3])
    with pytest.raises(ClientFailure, match=r"client 3 on rank 3: .*diverged at lr = 0.1; lower local.lr"):
        trained(engine_of(name, model, source, drops=False), model, rule, [])


@pytest.mark.parametrize("factor", [HUGE, LARGE])
@pytest.mark.parametrize(("name", "rule"), WAYS)
def test_the_others_are_summed_as_if_those_that_diverge_had_not_been_asked(
    name: str, rule: LocalRule, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, away = flat_model("mlp", SMALL_IMAGES, hidden=[9]), [1, 3]
    with caplog.at_level(logging.WARNING, logger="fedmpi"):
        total, report = trained(engine_of(name, model, spoiled(factor, away), True), model, rule, [])
    expected, plain = trained(engine_of(name, model, InMemorySource(SMALL_IMAGES, SIZES), True), model, rule, away)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
    assert report.diverged == 2 and plain.diverged == 0
    for fact in ("clients", "steps", "samples", "loss_count"):
        assert getattr(report, fact) == getattr(plain, fact), fact
    assert report.weight == pytest.approx(plain.weight) and report.loss_sum == pytest.approx(plain.loss_sum, rel=1e-5)
    assert sum("continues without a client that diverged: client" in message for message in caplog.messages) == 1


KEYS = {"rounds": 3, "model.name": "mlp", "model.hidden": [6], "clients.sampler": "all", "cluster.threads": 1}


def clients(spoilt: bool) -> fedmpi.ClientArrays:
    """Five clients, the last one with features that no number holds, or no samples."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((60, 4)).astype(np.float32)
    owner = np.repeat(np.arange(5), 12)
    y = (x.sum(1) > 0).astype(np.int64)
    x[owner == 4] *= 1e35
    kept = slice(None) if spoilt else owner < 4
    return fedmpi.ClientArrays(x[kept], y[kept], owner[kept], test=(x[:12], y[:12]), clients=5, mean=0.0, std=1.0)


@pytest.mark.parametrize(
    "more",
    [
        {"server.exact": True},
        {"local.engine": "batched"},
        {"local.steps": 1, "local.batch_size": "all"},
        {"server.weights": "uniform", "privacy.clip_norm": 1.0, "privacy.noise_multiplier": 0.5},
        {"server.weights": "literal"},
        {"local.algorithm": "scaffold"},
        {"server.aggregator": "median"},
        {"compression": "int8"},
    ],
    ids=lambda more: " ".join(f"{key}={value}" for key, value in more.items()),
)
def test_a_run_continues_without_them_and_counts_them(more: dict[str, object]) -> None:
    with pytest.raises(ClientFailure, match=r"client 4 on rank 0: .* in round 0: training diverged .*lower local.lr"):
        fedmpi.run("fedavg", KEYS | more, data=clients(True))
    run = fedmpi.run("fedavg", KEYS | more | {"local.on_divergence": "drop"}, data=clients(True))
    assert [record["diverged"] for record in run.records] == [1, 1, 1]
    assert all(np.isfinite(record["train_loss"]) for record in run.records)
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())


@pytest.mark.parametrize("spoilt", [True, False], ids=["diverged", "without samples"])
@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({"server.weights": "stratified", "clients.sampler.strata": 1}, 4 / 5),
        ({"server.weights": "unbiased", "server.weights.population": "clients", "clients.sampler.strata": 1}, 4 / 5),
        ({"server.weights": "normalized", "server.weights.population": "clients", "clients.sampler.strata": 1}, 1.0),
    ],
    ids=lambda more: " ".join(map(str, more.values())) if isinstance(more, dict) else "",
)
def test_a_participant_without_an_update_counts_as_unchanged_unless_the_sum_is_divided(
    spoilt: bool, more: dict[str, object], share: float
) -> None:
    """All five are selected: the model goes this share of the way that the mean update of the four others goes."""
    strata = {
        "clients.sampler.features": "label-histogram",
        "clients.sampler.within_stratum": "uniform",
        "clients.count": 5,
    }
    chosen = KEYS | {"local.on_divergence": "drop"} | strata | more | {"clients.sampler": "stratified"}
    run = fedmpi.run("fedavg", chosen, data=clients(spoilt))
    plain = KEYS | {"server.weights": "uniform", "server.optimizer.lr": share}
    expected = fedmpi.run("fedavg", plain, data=clients(False))
    for found, wanted in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Failing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise KeyError("seven")
        return super().forward(x.flatten(1))


def test_a_model_that_fails_on_a_client_is_named_with_its_line_and_the_round() -> None:
    source, model = InMemorySource(SMALL_IMAGES, [5, 3]), FlatModel(Failing(36, 5))
    total, tasks = FloatSum(np.zeros(model.size, np.float32)), [ClientTask(k, None, 0.5) for k in (0, 1)]
    engine = SequentialEngine(model, source, STREAMS)
    for round, said in ((None, ""), (4, ", round 4")):
        enter_round(round)
        line = rf"^client 1 on rank 0: KeyError: 'seven' \(\S+test_divergence.py:\d+{said}\)$"
        with pytest.raises(ClientFailure, match=line):
            engine.train(tasks, Job(model.initial, LocalRule(batch_size=None), 0, total))
    enter_round(None)
