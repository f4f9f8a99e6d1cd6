"""A custom loss is used everywhere that the built-in one is: engines, probes, evaluation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmpi import ComponentFailure, UserError
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.engines import why_not_batched
from fedmpi.local.measures import Gradients
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.evaluation import client_sums, evaluate
from fedmpi.tasks.losses import CROSS_ENTROPY, LOSS_ALONE, Loss, task_loss
from tests.end_to_end.in_process import SMALL, run
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, made, relative_error, summed, tasks_of
from tests.local.test_torch_steps import plain
from tests.tasks import own_losses

SIZES = [13, 1, 25, 7, 2, 18]
EPOCHS, ONE_STEP = LocalRule(lr=0.1, epochs=2, batch_size=7), LocalRule(lr=0.1, epochs=1, batch_size=None)
OWN = task_loss("tests.tasks.own_losses:cross_entropy")
SQUARED = task_loss(own_losses.squared, {"scale": 2})


def model_of(loss: Loss) -> FlatModel:
    return FlatModel(build("mlp", {"hidden": [9]}, SMALL_IMAGES, seed=3).double(), loss=loss)


def sources() -> InMemorySource:
    return InMemorySource(SMALL_IMAGES, SIZES, torch.float64)


ENGINES: dict[str, tuple[Callable, LocalRule]] = {
    "sequential": (SequentialEngine, EPOCHS),
    "batched": (BatchedEngine, EPOCHS),
    "batched-adam": (BatchedEngine, LocalRule(optimizer="adam", lr=0.01, epochs=1, batch_size=5)),
    "merged": (MergedEngine, ONE_STEP),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_custom_cross_entropy_trains_as_the_built_in_one(engine: str):
    kind, rule = ENGINES[engine]
    source, found = sources(), []
    for loss in (CROSS_ENTROPY, OWN):
        model = model_of(loss)
        found.append(summed(made(kind, model, source, STREAMS), model, tasks_of(source), rule))
    (expected, wanted), (update, report) = found
    assert relative_error(update, expected) < 1e-12
    assert report.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-12)


@pytest.mark.parametrize("kind", [SequentialEngine, BatchedEngine])
def test_class_weights_give_torchs_weighted_mean(kind: Callable):
    given = (0.2, 3.0, 1.0, 0.5, 2.0)
    loss = task_loss("cross-entropy", {"class_weights": given}, class_counts=lambda: np.ones((2, 5), np.int64))
    source, model, weight = sources(), model_of(loss), torch.tensor(given, dtype=torch.float64)
    net, tasks, rule = model.copy(model.initial), tasks_of(source), LocalRule(lr=0.1, epochs=1, batch_size=5)
    expected, mean = plain(model, source, tasks, rule, 0, weight)
    update, report = summed(made(kind, model, source, STREAMS), model, tasks, rule)
    assert relative_error(update, expected) < 1e-12
    assert report.loss_sum == pytest.approx(mean, rel=1e-12)
    net = model.copy(model.initial)
    error = torch.nn.functional.cross_entropy(net(source.x), source.y, weight).item()
    assert evaluate(net, source.x, source.y, 7, loss).loss == pytest.approx(error, rel=1e-12)
    sums = client_sums(net, source.x, source.y, np.array(SIZES), loss, 7)
    for (total, divisor, *_), task in zip(sums, tasks, strict=True):
        x, y = source.load(task.client)
        error = torch.nn.functional.cross_entropy(net(x), y, weight).item()
        assert total / divisor == pytest.approx(error, rel=1e-12)


def test_balanced_class_weights_follow_from_the_training_samples():
    found = run(*SMALL, "task.loss.class_weights=balanced", "clients.count=7", evaluate=True)
    samples = found.experiment.data_facts.samples.class_counts().sum(0)
    weights = samples.sum() / (10 * samples)
    again = run(*SMALL, f"task.loss.class_weights={weights.tolist()}", "clients.count=7", evaluate=True)
    assert torch.allclose(found.model, again.model, rtol=1e-6)
    assert found.records[-1]["test_loss"] == pytest.approx(again.records[-1]["test_loss"], rel=1e-6)
    assert "task.loss.class_weights: each batch" in found.experiment.trainer.engine.description
    counts = np.array([[3, 0, 1], [0, 0, 2]])
    loss = task_loss("cross-entropy", {"class_weights": "balanced"}, class_counts=lambda: counts)
    assert loss.weights(torch.tensor([0, 1, 2])).tolist() == pytest.approx([6 / 9, 1, 6 / 9])
    with pytest.raises(UserError, match="has 2 weights for 10 classes"):
        run(*SMALL, "task.loss.class_weights=[1, 2]")


def plain_gradient(model: FlatModel, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Sum of 2 |softmax − corner|² and its gradient, sample by sample."""
    total, flat = 0.0, torch.zeros(model.size, dtype=torch.float64)
    for image, label in zip(x, y.tolist(), strict=True):
        shares = model.module(image.unsqueeze(0))[0].exp()
        shares = shares / shares.sum()
        loss = sum(2.0 * (share - float(place == label)) ** 2 for place, share in enumerate(shares))
        gradients = torch.autograd.grad(loss, model.parameters)
        flat += torch.cat([gradient.reshape(-1) for gradient in gradients])
        total += float(loss.detach())
    return total, flat


def test_probes_and_evaluation_look_at_the_loss():
    source, model = sources(), model_of(SQUARED)
    blocks = Gradients(source, model, STREAMS, batched=made(BatchedEngine, model, source)).blocks(
        range(6), model.initial, 0
    )
    found = {int(k): row for clients, rows in blocks for k, row in zip(clients, rows, strict=True)}
    model.bind(model.initial.clone())
    for client, size in enumerate(SIZES):
        expected = plain_gradient(model, *source.load(client))[1] / size
        assert relative_error(found[client], expected) < 1e-12
    total, _ = plain_gradient(model, source.x, source.y)
    found_loss = evaluate(model.module, source.x, source.y, 10, model.loss).loss
    assert found_loss == pytest.approx(total / len(source.y), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("mean", "a single number.*without the mean"),
        ("column", r"shape \(4, 1\)"),
        ("wrong_answers", "have no gradient with respect to the outputs"),
    ],
)
def test_what_is_no_loss_per_sample_is_rejected_before_the_first_round(loss: str, words: str):
    with pytest.raises(ComponentFailure, match=f"the loss tests.tasks.own_losses:{loss} .*{words}"):
        forward_traits(model_of(task_loss(f"tests.tasks.own_losses:{loss}")), SMALL_IMAGES)


@pytest.mark.parametrize("engine", ["sequential", "batched", "merged"])
def test_a_loss_that_fails_in_a_round_names_its_line_and_the_client(engine: str):
    source, model = sources(), model_of(task_loss("tests.tasks.own_losses:without_four"))
    source.y[:] = 0
    source.y[source.offsets[3] + 2] = 4
    kind, rule = ENGINES[engine]
    with pytest.raises(ComponentFailure, match=r"own_losses.py:\d+\) failed in client 3: ValueError: a label 4"):
        summed(made(kind, model, source, STREAMS), model, tasks_of(source), rule)


def test_a_loss_that_looks_at_the_whole_batch_or_draws_is_trained_client_by_client():
    for loss in (own_losses.centred, own_losses.noisy):
        model = model_of(task_loss(loss))
        assert why_not_batched(model, SMALL_IMAGES) == LOSS_ALONE
    assert why_not_batched(model_of(SQUARED), SMALL_IMAGES) is None


def test_a_loss_that_draws_is_seeded_by_the_client_and_leaves_the_generator_alone():
    source, model = sources(), model_of(task_loss(own_losses.noisy))
    updates, before = [], torch.get_rng_state()
    for order in (1, -1):
        engine = SequentialEngine(model, source, STREAMS)
        updates.append(summed(engine, model, tasks_of(source)[::order], EPOCHS)[0])
        torch.rand(3) if order == 1 else None
    assert relative_error(*updates) < 1e-12
    torch.set_rng_state(before)
    summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), EPOCHS)
    assert torch.equal(before, torch.get_rng_state())
