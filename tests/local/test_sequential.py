"""The sequential engine does what a plain PyTorch loop does, client after client."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedmpi.common.streams import Purpose
from fedmpi.local.optimizers import AdamState
from fedmpi.local.schedule import schedule
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local.synthetic import (
    SMALL_IMAGES,
    STREAMS,
    TEXTS,
    BatchNormNet,
    InMemorySource,
    flat_model,
    relative_error,
    summed,
    tasks_of,
)

SIZES = [13, 1, 40, 7]
RULES = {
    "sgd epochs": LocalRule(lr=0.1, epochs=2, batch_size=5),
    "sgd steps": LocalRule(lr=0.1, epochs=None, steps=40, batch_size=6),
    "sgd whole set": LocalRule(lr=0.1, epochs=3, batch_size=None),
    "proximal": LocalRule(lr=0.1, epochs=2, batch_size=5, proximal_mu=0.7),
    "adam": LocalRule(optimizer="adam", lr=0.01, epochs=2, batch_size=5),
    "adam proximal": LocalRule(optimizer="adam", lr=0.01, epochs=2, batch_size=5, proximal_mu=0.7, beta1=0.8),
}


def plain_loop(module: nn.Module, source: InMemorySource, rule: LocalRule, round: int = 0) -> torch.Tensor:
    """Σ (n_k/n) Δ_k by torch.optim and backward(), with FedProx's term written as a loss."""
    result = 0.0
    for client, n in enumerate(source.sizes.tolist()):
        net = copy.deepcopy(module).train()
        start = [p.detach().clone() for p in net.parameters()]
        if rule.optimizer == "sgd":
            optimizer = torch.optim.SGD(net.parameters(), lr=rule.lr)
        else:
            optimizer = torch.optim.Adam(net.parameters(), lr=rule.lr, betas=(rule.beta1, rule.beta2), eps=rule.epsilon)
        x, y = source.load(client)
        for rows in schedule(rule, n, STREAMS.generator(Purpose.BATCH_ORDER, round, client)):
            chosen = slice(None) if rows is None else torch.from_numpy(rows)
            loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
            pull = sum(((p - s) ** 2).sum() for p, s in zip(net.parameters(), start, strict=True))
            optimizer.zero_grad()
            (loss + rule.proximal_mu / 2 * pull).backward()
            optimizer.step()
        change = [(p.detach() - s).flatten() for p, s in zip(net.parameters(), start, strict=True)]
        result = result + n / source.sizes.sum() * torch.cat(change)
    return result


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_is_that_of_a_plain_pytorch_loop(rule: LocalRule, dtype: torch.dtype):
    source = InMemorySource(SMALL_IMAGES, SIZES, dtype)
    model = flat_model("mlp", SMALL_IMAGES, dtype, hidden=[9])
    expected = plain_loop(copy.deepcopy(model.module), source, rule)
    found, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    # Adam divides by the root of tiny second moments, which magnifies float32 rounding
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4 if rule.optimizer == "adam" else 2e-6
    assert relative_error(found, expected) < tolerance


@pytest.mark.parametrize("vocabulary", [60, 6000])  # gradients of the large table are kept sparse
@pytest.mark.parametrize("rule", [RULES["sgd epochs"], RULES["proximal"]], ids=["sgd", "proximal"])
def test_text_models_train_like_a_plain_loop(vocabulary: int, rule: LocalRule):
    description = replace(TEXTS, vocabulary=vocabulary)
    source, model = InMemorySource(description, SIZES), flat_model("text-cnn", description, dimension=6, filters=4)
    assert model.sparse_pays(5 * 12) == (vocabulary == 6000)
    expected = plain_loop(copy.deepcopy(model.module), source, rule)
    found, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    assert relative_error(found, expected) < 1e-5
    assert not model.module.words.sparse


def test_the_report_counts_clients_steps_samples_and_losses():
    source, rule = InMemorySource(SMALL_IMAGES, SIZES), LocalRule(lr=1e-12, epochs=2, batch_size=5)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    _, report = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)
    assert (report.clients, report.samples, report.loss_count) == (4, 61, 122)
    assert report.steps == 2 * (3 + 1 + 8 + 2)
    assert report.weight == pytest.approx(1.0)
    model.bind(model.initial)
    with torch.no_grad():
        mean = float(nn.functional.cross_entropy(model.module(source.x), source.y))
    assert report.loss_sum / report.loss_count == pytest.approx(mean, rel=1e-4)


def test_batch_norm_statistics_travel_with_the_update():
    source, rule = InMemorySource(SMALL_IMAGES, [9]), LocalRule(lr=0.1, epochs=1, batch_size=None)
    model = FlatModel(BatchNormNet(36, 5))
    change, _ = summed(SequentialEngine(model, source, STREAMS), model, [ClientTask(0, None, 1.0)], rule)
    net = BatchNormNet(36, 5)
    nn.utils.vector_to_parameters(model.initial[: model.trainable], net.parameters())
    with torch.no_grad():
        net.train()(source.x)
    expected = torch.cat([net.norm.running_mean, net.norm.running_var - 1])
    assert torch.allclose(change[model.trainable :], expected, atol=1e-6)


@pytest.mark.parametrize("batch_size, dropout", [(4, 0.3), (4, 0.0), (None, 0.3)])
def test_a_visit_has_its_own_order_and_masks(batch_size: int | None, dropout: float):
    source, rule = InMemorySource(SMALL_IMAGES, [20]), LocalRule(lr=0.1, epochs=1, batch_size=batch_size)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=dropout)
    engine = SequentialEngine(model, source, STREAMS)
    first, again, second = (summed(engine, model, [ClientTask(0, None, 1.0, visit=v)], rule)[0] for v in (0, 0, 1))
    assert torch.equal(first, again)
    assert relative_error(second, first) > 1e-3


def test_without_dropout_no_mask_of_the_round_before_is_left():
    source, masked = InMemorySource(SMALL_IMAGES, [20, 9]), LocalRule(lr=0.1, epochs=1, batch_size=4)
    bare = replace(masked, dropout=False)
    model, never = (flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=p) for p in (0.4, 0.0))
    engine = SequentialEngine(model, source, STREAMS)
    dropped, _ = summed(engine, model, tasks_of(source), masked)
    plain, _ = summed(engine, model, tasks_of(source), bare)
    again, _ = summed(engine, model, tasks_of(source), masked)
    expected, _ = summed(SequentialEngine(never, source, STREAMS), never, tasks_of(source), masked)
    assert torch.equal(plain, expected) and torch.equal(again, dropped) and not torch.allclose(dropped, plain)


def test_adams_memory_is_fresh_unless_it_is_handed_on():
    source = InMemorySource(SMALL_IMAGES, [20])
    rule = LocalRule(optimizer="adam", lr=0.01, epochs=1, batch_size=None)
    twice = LocalRule(optimizer="adam", lr=0.01, epochs=2, batch_size=None)
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    engine, task = SequentialEngine(model, source, STREAMS), ClientTask(0, None, 1.0)
    expected, forgetful, remembering = (model.initial.clone() for _ in range(3))
    engine.advance(expected, task, twice, 0)
    state = AdamState.fresh(model)
    for _ in range(2):
        engine.advance(forgetful, task, rule, 0)
        engine.advance(remembering, task, rule, 0, state)
    assert torch.equal(remembering, expected)
    assert state.steps == 2
    assert relative_error(forgetful, expected) > 1e-4


def test_an_observer_sees_every_update_and_may_replace_it():
    source, rule = InMemorySource(SMALL_IMAGES, SIZES), RULES["sgd epochs"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9])
    seen = []
    observer = lambda client, delta: (seen.append(client), torch.ones_like(delta))[1]  # noqa: E731
    total, _ = summed(SequentialEngine(model, source, STREAMS, observe=observer), model, tasks_of(source), rule)
    assert seen == [0, 1, 2, 3]
    assert torch.allclose(total, torch.ones_like(total))


def test_a_parameter_that_the_model_does_not_use_stays_as_it_is():
    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.used = nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    source, model = InMemorySource(SMALL_IMAGES, [5]), FlatModel(Partial())
    change, _ = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), LocalRule())
    assert not change[:12].any()
    assert change[12:].any()


def test_rounds_leave_no_tensors_behind():
    source, rule = InMemorySource(SMALL_IMAGES, SIZES), RULES["adam proximal"]
    model = flat_model("mlp", SMALL_IMAGES, hidden=[9], dropout=0.5)
    engine = SequentialEngine(model, source, STREAMS)

    def living() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    summed(engine, model, tasks_of(source), rule)
    before = living()
    for t in range(5):
        summed(engine, model, tasks_of(source), rule, round=t)
    assert living() <= before
