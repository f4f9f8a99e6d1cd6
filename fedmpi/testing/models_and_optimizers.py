"""Checks of what every local step is made of: models and local optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedmpi.common.task_kinds import KINDS
from fedmpi.common.types import AnyArray
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.local.sequential import WorkingMemory
from fedmpi.local.work import LocalRule, OwnOptimizer
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import made_up_targets, task_loss
from fedmpi.testing.check import Check, CheckFailed, Subject, demand, leaves_generators_alone, same_twice

CLASSES, SAMPLES, STEPS = 10, 6, 4
DESCRIPTIONS = (
    DataDescription((1, 8, 8), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((1, 28, 28), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((3, 32, 32), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((24,), "int32", CLASSES, "text", 40, (), ()),
    DataDescription((20,), "float32", CLASSES, "vector", 0, (), ()),
)
"""The data that a model is tried on: the first of them that it takes, where its settings name none of its own."""


def model_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a model but those that start runs."""
    yield subject.check("same values from the same seed", lambda s: same_twice(lambda: initial_values(s)))
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: initial_values(s)))
    yield subject.check("finite outputs of the shape that the task asks for", outputs)
    yield subject.check("evaluated samples do not depend on one another", alone)
    yield subject.check("finite gradients", gradients)


def suited(subject: Subject) -> tuple[DataDescription, nn.Module]:
    """The first of the descriptions that the model can be built and called for, and the model."""
    own, reasons = subject.settings.get("data.shards"), []
    task = str(subject.settings.get("task.kind", "classification"))
    tried = [for_task(description, task) for description in DESCRIPTIONS if task != "tokens" or description.vocabulary]
    for description in tried if own is None else (open_store(own).description,):
        try:
            built = build(subject.choice, subject.options, description, 5)
            with torch.no_grad():
                built.eval()(made_up_samples(description))
            return description, built
        except Exception as error:  # whatever a network says of data that it is not made for
            reasons.append(f"{description.feature_shape}: {error}")
    hint = "" if own is not None else ": name some that it takes, by the setting data.shards"
    raise CheckFailed(f"it takes none of the data that it is tried on{hint} ({'; '.join(reasons)})")


def for_task(description: DataDescription, task: str) -> DataDescription:
    """Data of the same samples with the targets of a kind of task."""
    if task == "classification":
        return description
    shape = description.feature_shape if task == "tokens" else (description.classes,)
    return replace(description, targets=task, target_shape=shape)


def made_up_samples(description: DataDescription) -> Tensor:
    """Made-up features (b, …) as a model receives them."""
    generator, shape = np.random.Generator(np.random.Philox(4)), (SAMPLES, *description.feature_shape)
    if description.task == "text":
        return torch.from_numpy(generator.integers(0, description.vocabulary, shape))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32))


def initial_values(subject: Subject) -> list[AnyArray]:
    """Its parameters, freshly built."""
    return [value.detach().numpy() for value in suited(subject)[1].parameters()]


def outputs(subject: Subject) -> str:
    """(b, C), (b, L, C) of tokens, or the shape of y where numbers are predicted; finite, for any b."""
    description, module = suited(subject)
    for count in (SAMPLES, 1):
        with torch.no_grad():
            found = module.eval()(made_up_samples(description)[:count])
        demand(isinstance(found, Tensor), f"it returns {type(found).__name__}: return a tensor, a value a class")
        wanted = f"({', '.join(map(str, (count, *description.output_shape)))})"
        demand(
            description.takes_outputs(tuple(found.shape), count),
            f"it returns {tuple(found.shape)} for {count} samples of {description.classes} classes: return {wanted}"
            f"{_other_kinds(subject)}",
        )
        demand(bool(found.isfinite().all()), "its outputs are not finite for finite samples")
    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    return f"{size:,} trainable values, samples {description.feature_shape}"


def _other_kinds(subject: Subject) -> str:
    """How a model of another kind of task than one class a sample is tried, where nothing says what it is for."""
    known = {"task.kind", "data.shards"} & set(subject.settings)
    return "" if known else ", or say what it is for by the setting task.kind"


def alone(subject: Subject) -> str:
    """Each sample on its own must give the outputs that it gives beside the others, in evaluation mode."""
    description, module = suited(subject)
    x = made_up_samples(description)
    with torch.no_grad():
        together = module.eval()(x)
        single = torch.cat([module(x[i : i + 1]) for i in range(SAMPLES)])
    demand(
        bool(torch.allclose(together, single, rtol=1e-3, atol=1e-4)),
        f"a sample's outputs change by up to {float((together - single).abs().max()):.2g} with the samples beside it: "
        "in evaluation mode compute them of that sample only",
    )
    return f"{SAMPLES} samples, the same one by one"


def gradients(subject: Subject) -> str:
    """Finite, and not zero everywhere."""
    description, module = suited(subject)
    kind = KINDS[description.targets]
    model = FlatModel(module, loss=task_loss(kind.loss, kind=kind.name))
    _, found = model.loss_gradient(made_up_samples(description), made_up_targets(description, SAMPLES))
    whole = torch.cat([gradient.to_dense().reshape(-1) for gradient in found if gradient is not None])
    demand(bool(whole.isfinite().all()), "a gradient is not finite for finite samples")
    demand(bool(whole.any()), "no parameter has a gradient: the outputs must follow from the parameters")
    return f"length {float(whole.norm()):.3g}"


def local_optimizer_checks(subject: Subject) -> Iterator[Check]:
    """All checks of a local optimizer but those that start runs."""
    yield subject.check("global generators untouched", lambda s: leaves_generators_alone(lambda: bare_steps(s)))
    yield subject.check("same steps from the same gradients", lambda s: same_twice(lambda: stepped(s)))
    yield subject.check("steps follow the gradients and stay finite", follows)


def stepped(subject: Subject, sign: float = 1.0) -> list[NDArray[np.float32]]:
    """A client's model (d,) before and after each of some steps along made-up gradients."""
    model = FlatModel(build("mlp", {"hidden": [3]}, DESCRIPTIONS[-1], 5))
    own = None
    if subject.part.foreign:
        own = OwnOptimizer(subject.part, partial(subject.part.object, **subject.part.checked(subject.options)))
    kind = "own" if own is not None else subject.part.name
    rule = LocalRule(optimizer=kind, own=own, lr=0.1)  # type: ignore[arg-type]
    memory = WorkingMemory(model)
    w = memory.vector.copy_(model.initial)
    found = [w.numpy().copy()]
    model.begin(w)
    optimizer = memory.optimizer(w, rule, None)
    for step in range(STEPS):
        gradient = sign * torch.cos(torch.arange(model.trainable) * (step + 1.0))
        optimizer.step([part.clone() for part in model.views(gradient)])
        found.append(w.numpy().copy())
    return found


def bare_steps(subject: Subject) -> None:
    """Some steps without the care that runs take of generators."""
    if not subject.part.foreign:
        stepped(subject)
        return
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer = subject.part.object(parameters, lr=0.1, **subject.part.checked(subject.options))
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()


def follows(subject: Subject) -> str:
    """Steps change the model, though not each needs to, and other gradients change it otherwise."""
    there, back = stepped(subject), stepped(subject, -1.0)
    demand(all(np.isfinite(model).all() for model in there), "its steps are not finite for gradients up to 1")
    moved = (there[0] != there[-1]).any()
    demand(moved, f"{STEPS} steps leave the parameters as they were: change them in place, as torch.optim does")
    demand((there[-1] != back[-1]).any(), "opposite gradients give the same steps: read each parameter's grad")
    return f"{STEPS} steps, of length {np.linalg.norm(there[-1] - there[0]):.3g} together"
