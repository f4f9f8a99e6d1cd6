"""Checks of losses: one finite value a sample, of that sample alone, with a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.task_kinds import IGNORED
from fedmpi.common.types import AnyArray
from fedmpi.data.schema import DataDescription
from fedmpi.tasks.losses import Loss, made_up_targets, task_loss
from fedmpi.testing.check import Check, Subject, demand, leaves_generators_alone, same_twice

SAMPLES, POSITIONS, CLASSES = 24, 4, 5


def loss_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a loss but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: values(s)))
    yield subject.check("same values of the same outputs", lambda s: same_twice(lambda: values(s)))
    yield subject.check("one finite value a sample", one_value_a_sample)
    yield subject.check("a sample's value does not depend on the others", alone)
    yield subject.check("finite gradients", gradients)


def task_of(subject: Subject) -> str:
    """The kind of task that a loss or a metric is tried on: the first that it is for; its own that of the settings."""
    fits: tuple[str, ...] = subject.mark("tasks", ())
    return fits[0] if fits else str(subject.settings.get("task.kind", "classification"))


def made_up_outputs(task: str = "classification") -> tuple[Tensor, Tensor]:
    """Outputs (b, …) from sure to unsure, and targets (b, …).

    (b, C) and (b,) of classes; (b, L, C) and (b, L) of tokens, some of which do not count; (b, C) of labels and of
    numbers.
    """
    generator = np.random.Generator(np.random.Philox(3))
    shape = (SAMPLES, POSITIONS, CLASSES) if task == "tokens" else (SAMPLES, CLASSES)
    sureness = np.geomspace(0.01, 30, SAMPLES).reshape(-1, *[1] * (len(shape) - 1))
    outputs = torch.from_numpy((generator.standard_normal(shape) * sureness).astype(np.float32))
    described = DataDescription(
        (1,), "float32", CLASSES, "vector", 0, (), (), task, {"classification": ()}.get(task, shape[1:2])
    )
    targets = made_up_targets(described, SAMPLES)
    if task == "tokens":
        targets[1::2, 1:] = IGNORED
    return outputs, targets


def loss_of(subject: Subject) -> Loss:
    """The loss as engines call it."""
    return task_loss(subject.choice, subject.options, task_of(subject))


def values(subject: Subject) -> list[AnyArray]:
    """The losses of some samples."""
    return [loss_of(subject).per_sample(*made_up_outputs(task_of(subject))).numpy()]


def one_value_a_sample(subject: Subject) -> str:
    """(b,) for any b, finite; outputs and targets are left as they are."""
    loss, (outputs, targets) = loss_of(subject), made_up_outputs(task_of(subject))
    kept, labels = outputs.clone(), targets.clone()
    for count in (SAMPLES, 1):
        found = loss.per_sample(outputs[:count], targets[:count])
        demand(bool(found.isfinite().all()), f"not finite for finite outputs: {found[~found.isfinite()].tolist()}")
    demand(torch.equal(outputs, kept) and torch.equal(targets, labels), "it changes what it is given: copy it first")
    return f"{tuple(outputs.shape)} outputs gave ({SAMPLES},) values"


def alone(subject: Subject) -> str:
    """Each sample on its own must have the loss that it has beside the others."""
    loss, (outputs, targets) = loss_of(subject), made_up_outputs(task_of(subject))
    together = loss.per_sample(outputs, targets)
    single = torch.cat([loss.per_sample(outputs[i : i + 1], targets[i : i + 1]) for i in range(SAMPLES)])
    apart = float((together - single).abs().max())
    demand(
        bool(torch.allclose(together, single, rtol=1e-4, atol=1e-5)),
        f"a sample's loss changes by up to {apart:.2g} with the samples beside it: compute it of its own outputs only",
    )
    return f"{SAMPLES} samples, the same one by one"


def gradients(subject: Subject) -> str:
    """By the outputs, finite, for every sample."""
    outputs, targets = made_up_outputs(task_of(subject))
    outputs.requires_grad_()
    found = loss_of(subject).per_sample(outputs, targets)
    demand(found.requires_grad, "its values have no gradient by the outputs: compute them with torch's own functions")
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    demand(bool(gradient.isfinite().all()), "a gradient is not finite for finite outputs")
    return f"largest {float(gradient.abs().max()):.3g}"
