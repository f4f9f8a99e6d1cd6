"""Contracts of models, losses, metrics, optimizers, local algorithms and data sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import FloatSum
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.common.registry import Chosen
from fedmpi.common.streams import Streams
from fedmpi.common.task_kinds import IGNORED, KINDS, kinds_of
from fedmpi.common.types import AnyArray
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.local.algorithms import Totals, misnamed
from fedmpi.local.hooks import Hooks
from fedmpi.local.optimizers import rate
from fedmpi.local.sequential import WorkingMemory
from fedmpi.local.work import ClientTask, LocalRule, OwnOptimizer
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import Loss, made_up_targets
from fedmpi.tasks.metrics import Metric, MetricTally
from fedmpi.testing.check import Alike, CheckFailed, Contract, Subject, demand
from fedmpi.updates.attacks import AttackedUpdates
from fedmpi.updates.compression import Transport

POPULATION, ROUNDS, STEPS = 6, 6, 4
"""N, rounds, and a client's steps."""
SAMPLES, POSITIONS, CLASSES = 24, 4, 5
MODEL_SAMPLES = 6
DESCRIPTIONS = (
    DataDescription((1, 8, 8), "float32", 10, "image", 0, (), ()),
    DataDescription((1, 28, 28), "float32", 10, "image", 0, (), ()),
    DataDescription((3, 32, 32), "float32", 10, "image", 0, (), ()),
    DataDescription((24,), "int32", 10, "text", 40, (), ()),
    DataDescription((20,), "float32", 10, "vector", 0, (), ()),
)
"""Data on which a model is tried: the first that it accepts, unless its settings name other data."""


def _rates(subject: Subject) -> list[AnyArray]:
    """Return the learning rates of 20 rounds."""
    schedule = subject.made()
    return [np.asarray([rate(subject.part, schedule, 0.1, t, 20) for t in range(20)])]


def _updates(subject: Subject) -> list[AnyArray]:
    """Run rounds of clients with different parabolas as losses; return the updates (d,) for the server optimizer."""
    model, rule = FlatModel(build("mlp", {"hidden": [3]}, DESCRIPTIONS[-1], 5)), LocalRule(lr=0.1)
    d, hooks = model.size, Hooks(subject.part, subject.made(), model, Streams(0), POPULATION)
    for name, meant in misnamed(hooks.algorithm).items():
        demand(False, f"has {name!r}, which nothing reads. Did you mean {meant!r}? Else begin the name with _")
    w, found = torch.full((d,), 0.1), []
    curvature = 0.5 + torch.arange(d) / d
    for t in range(ROUNDS):
        sums = {name: FloatSum(torch.zeros(d)) for name in hooks.sums}
        hooks.begin(t, w, sums)
        clients = sorted({t % POPULATION, (t * 2 + 1) % POPULATION, (t + 3) % POPULATION})
        total = torch.zeros(d)
        for k in clients:
            client, own = hooks.open(ClientTask(k, None, 1.0), 10 + k), w.clone()
            correction = 0.0 if client.correction is None else client.correction
            for _ in range(STEPS):
                own -= rule.lr * (curvature * (own - (k - 2)) + hooks.proximal_mu * (own - w) + correction)
            client.finish(own - w, STEPS, rule)
            total += (own - w) / len(clients)
        totals = Totals(POPULATION, len(clients), float(len(clients)), float(len(clients)), t, rule.lr)
        added = {name: one.tensor for name, one in sums.items()}
        update = hooks.server_step(total, {**added, **hooks.totals}, totals)
        w = w + update
        found.append(update.numpy().copy())
    return found


def _models(subject: Subject) -> list[AnyArray]:
    """Return the models (d,) after each of some updates."""
    optimizer, w, found = ServerOptimizer(subject.part, subject.options), torch.full((12,), 0.1), []
    for t in range(ROUNDS):
        before = w.clone()
        optimizer.step(w, torch.cos(torch.arange(12) * (t + 1.0)) / (t + 2))
        demand(not torch.equal(w, before), "an update that is not 0 left the model unchanged")
        found.append(w.numpy().copy())
    return found


def _received(subject: Subject) -> list[AnyArray]:
    """Return what arrives of two updates (d,) of a client, without error feedback, or the labels of an attack."""
    chosen, found = Chosen(subject.part.kind, subject.part.object, subject.options), []
    if hasattr(subject.part.object, "labels"):
        return [chosen.make().labels(torch.arange(CLASSES), CLASSES).numpy()]
    attacks = subject.part.kind == "attack"
    sender = AttackedUpdates(chosen, np.array([1]), Streams(3)) if attacks else Transport(chosen, Streams(3))
    sender.part = subject.part
    for t in range(2):
        update = torch.from_numpy(np.random.Generator(np.random.Philox(t)).standard_normal(600).astype(np.float32))
        found.append(sender.send(t, 1, update).numpy())
    return found


def _task(subject: Subject) -> str:
    """Return the task kind on which a loss or a metric is tried: its first one, else that of the settings."""
    fits = kinds_of(subject.part)
    return fits[0] if fits else str(subject.settings.get("task.kind", "classification"))


def _outputs(task: str) -> tuple[Tensor, Tensor]:
    """Return outputs (b, …) from certain to uncertain, and targets (b, …); some tokens are ignored."""
    shape = (SAMPLES, POSITIONS, CLASSES) if task == "tokens" else (SAMPLES, CLASSES)
    certainty = np.geomspace(0.01, 30, SAMPLES).reshape(-1, *[1] * (len(shape) - 1))
    draws = np.random.Generator(np.random.Philox(3)).standard_normal(shape)
    targets_shape = () if task == "classification" else shape[1:2]
    described = DataDescription((1,), "float32", CLASSES, "vector", 0, (), (), task, targets_shape)
    targets = made_up_targets(described, SAMPLES)
    if task == "tokens":
        targets[1::2, 1:] = IGNORED
    return torch.from_numpy((draws * certainty).astype(np.float32)), targets


def _loss(subject: Subject) -> Loss:
    return Loss(subject.part, subject.options, KINDS[_task(subject)])


def _losses(subject: Subject, batches: Sequence[int] = (SAMPLES,)) -> list[AnyArray]:
    loss = _loss(subject)
    parts = zip(*(torch.split(one, list(batches)) for one in _outputs(_task(subject))), strict=True)
    return [torch.cat([loss.per_sample(*part) for part in parts]).numpy()]


def _numbers(subject: Subject, batches: Sequence[int] = (SAMPLES,)) -> list[AnyArray]:
    """Return the numbers that a run records of some samples, cut into batches of these sizes."""
    kind = KINDS[_task(subject)]
    tally = MetricTally([Metric(subject.part, subject.options)], kind)
    for part in zip(*(torch.split(one, list(batches)) for one in _outputs(kind.name)), strict=True):
        tally.add(*part)
    return [np.asarray(value) for _, value in sorted(tally.numbers().items())]


def _built(subject: Subject) -> tuple[DataDescription, nn.Module, Tensor]:
    """Return the first description with which the model can be built and called, the model, and samples (b, …)."""
    given, reasons = subject.settings.get("data.source"), []
    task = str(subject.settings.get("task.kind", "classification"))
    for description in DESCRIPTIONS if given is None else (open_store(given).description,):
        if task == "tokens" and not description.vocabulary:
            continue
        if given is None and task != "classification":
            shape = description.feature_shape if task == "tokens" else (description.classes,)
            description = replace(description, targets=task, target_shape=shape)
        shape, draws = (MODEL_SAMPLES, *description.feature_shape), np.random.Generator(np.random.Philox(4))
        numbers = draws.integers(0, description.vocabulary, shape) if description.task == "text" else None
        x = torch.from_numpy(draws.standard_normal(shape).astype(np.float32) if numbers is None else numbers)
        try:
            built = build(subject.part.object, subject.options, description, 5).eval()
            with torch.no_grad():
                built(x)
            return description, built, x
        except Exception as error:  # any error of a network on unsuitable data
            reasons.append(f"{description.feature_shape}: {error}")
    hint = "" if given is not None else ". Name data that it takes with the setting data.source"
    raise CheckFailed(f"it takes none of the data on which it is tried{hint} ({'; '.join(reasons)})")


def _outputs_and_values(subject: Subject, batches: Sequence[int] = (MODEL_SAMPLES,)) -> list[AnyArray]:
    """Return outputs in evaluation mode, (b, C), (b, L, C) for tokens, or the shape of y for regression; parameters."""
    description, module, x = _built(subject)
    outputs = []
    with torch.no_grad():
        for part in torch.split(x, list(batches)):
            found = module(part)
            fits = isinstance(found, Tensor) and description.takes_outputs(tuple(found.shape), len(part))
            given = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
            demand(
                fits,
                f"it returns {given} for {len(part)} samples of {description.classes} classes. Return "
                f"{(len(part), *description.output_shape)}, or name its task and data with the settings task.kind and "
                "data.source",
            )
            outputs.append(found)
    return [torch.cat(outputs).numpy(), *(value.detach().numpy() for value in module.parameters())]


def _steps(subject: Subject) -> list[AnyArray]:
    """Return a client's model (d,) before and after each of some steps along synthetic gradients."""
    model, own = FlatModel(build("mlp", {"hidden": [3]}, DESCRIPTIONS[-1], 5)), None
    if subject.part.object is not None and subject.part.name not in ("sgd", "adam"):
        own = OwnOptimizer(subject.part, partial(subject.part.object, **subject.part.checked(subject.options)))
    kind = "own" if own is not None else subject.part.name
    memory = WorkingMemory(model)
    w = memory.vector.copy_(model.initial)
    found = [w.numpy().copy()]
    model.bind(w)
    optimizer = memory.optimizer(w, LocalRule(optimizer=kind, own=own, lr=0.1), None)  # type: ignore[arg-type]
    for step in range(STEPS):
        gradient = torch.cos(torch.arange(model.trainable) * (step + 1.0))
        optimizer.step([part.clone() for part in model.views(gradient)])
        found.append(w.numpy().copy())
    return found


def _source_digest(subject: Subject) -> list[AnyArray]:
    store = open_store(subject.part.object if subject.part.source else subject.part.name, subject.options)
    return [np.frombuffer(bytes.fromhex(store.manifest.train[0].sha256), np.uint8)]


def _alone(name: str, samples: int, tolerance: float) -> Alike:
    problem = "compute the results of a sample from that sample only"
    return Alike(name, ({"batches": (1,) * samples},), problem, tolerance)


CONTRACTS = {
    "local algorithm": Contract(_updates, "names and shapes as declared", "same result from the same work"),
    "schedule": Contract(_rates, "a rate of at least 0 in every round", "same rates in the same rounds"),
    "server optimizer": Contract(_models, "finite models of the same shape", "same step from the same update"),
    **dict.fromkeys(
        ("compressor", "attack"),
        Contract(_received, "an update of the same shape arrives", "same update from the same generator"),
    ),
    "loss": Contract(
        _losses,
        "one finite value per sample",
        "same values of the same outputs",
        (_alone("a sample's value does not depend on the others", SAMPLES, 1e-5),),
    ),
    "metric": Contract(
        _numbers,
        "finite numbers",
        "same sums of the same outputs",
        (
            Alike(
                "sums add up over batches",
                ({"batches": (9, 15)}, {"batches": (1, 1, 20, 2)}),
                "return sums over the samples, which add up, and divide by their number in result(sums, samples) only",
                1e-6,
            ),
        ),
    ),
    "model": Contract(
        _outputs_and_values,
        "finite outputs of the task's shape",
        "same values from the same seed",
        (_alone("evaluated samples do not depend on one another", MODEL_SAMPLES, 1e-3),),
    ),
    "local optimizer": Contract(_steps, "steps stay finite", "same steps from the same gradients"),
    "data source": Contract(_source_digest, "data can be read", "same data every time"),
}
