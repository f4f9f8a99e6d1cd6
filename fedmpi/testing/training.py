"""Contracts of models, losses, metrics, optimizers, local algorithms and data sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.server_optimizers import state_names
from fedmpi.common.task_kinds import IGNORED, KINDS
from fedmpi.common.types import AnyArray
from fedmpi.data.opening import open_store
from fedmpi.data.schema import DataDescription
from fedmpi.local.algorithm import LocalAlgorithm, Totals, Vectors, Work, misnamed
from fedmpi.local.hooks import declared, pull
from fedmpi.local.sequential import WorkingMemory
from fedmpi.local.work import LocalRule, OwnOptimizer
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.losses import Loss, made_up_targets, task_loss
from fedmpi.tasks.metrics import Metric, MetricTally
from fedmpi.testing.check import CheckFailed, Contract, Subject, demand

VALUES, POPULATION, ROUNDS, SAVED = 12, 6, 6, 3
"""d, N, rounds, and the round before which the state is saved."""
LOSS_SAMPLES, POSITIONS, LOSS_CLASSES = 24, 4, 5
CUTS = ((24,), (9, 15), (1, 1, 20, 2))
"""Sizes of the batches into which a metric's samples are cut."""
TOLERANCE = 1e-6
"""Tolerance of sums of float32 in another order, relative to the largest."""
CLASSES, SAMPLES, STEPS = 10, 6, 4
DESCRIPTIONS = (
    DataDescription((1, 8, 8), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((1, 28, 28), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((3, 32, 32), "float32", CLASSES, "image", 0, (), ()),
    DataDescription((24,), "int32", CLASSES, "text", 40, (), ()),
    DataDescription((20,), "float32", CLASSES, "vector", 0, (), ()),
)
"""Data on which a model is tried: the first that it accepts, unless its settings name other data."""


# --- local algorithms and server optimizers ---


def _as_declared(subject: Subject) -> str:
    for name, meant in misnamed(subject.made()).items():
        own = "let what is its own begin with an underscore"
        demand(False, f"has {name!r}, which nothing reads: did you mean {meant!r}? If not, {own}")
    return f"{len(_play(subject))} updates of ({VALUES},)"


def _play(subject: Subject, saved: int | None = None) -> list[AnyArray]:
    """Run rounds of 2 or 3 clients with synthetic gradients; return the server optimizer's updates (d,)."""
    made: LocalAlgorithm = subject.made()
    kinds = ("client_state", "server_state", "sums", "numbers")
    names = {kind: declared(subject.part, made, kind) for kind in kinds}
    clients = {k: _zeros(names["client_state"]) for k in range(POPULATION)}
    server, w, found = _zeros(names["server_state"]), torch.full((VALUES,), 0.1), []
    for t in range(ROUNDS):
        if t == saved:
            made = subject.made()
        total, sums = torch.zeros(VALUES), dict.fromkeys((*names["sums"], *names["numbers"]), 0.0)
        participants = sorted({t % POPULATION, (t * 2 + 1) % POPULATION, (t + 3) % POPULATION})
        count = len(participants)
        for k in participants:
            client = Vectors("client", clients[k], {"index": k, "round": t, "samples": 10 + k})
            seen = Vectors("server", server, {"model": w, "round": t}, "only in server_step")
            delta = _steps(w, k, _vector(made.correction(client, seen), "correction"), pull(subject.part, made))
            returned = made.finish(client, seen, Work(delta.clone(), 3, 0.1, 1.0, pull(subject.part, made), 10 + k))
            _take(returned, sums, names)
            total += delta / count
        totals = Totals(POPULATION, count, float(count), float(count), t, 0.1)
        given = Vectors("server", server, {"model": w, "round": t})
        update = _vector(made.server_step(given, total.clone(), sums, totals), "server_step")
        update = total if update is None else update
        w = w + update
        found.append(update.numpy().copy())
    return found


def _zeros(names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(VALUES) for name in names}


def _steps(w: Tensor, k: int, correction: Tensor | None, mu: float) -> Tensor:
    """Take three steps of a client whose loss is its own parabola."""
    curvature, centre = 0.5 + torch.arange(VALUES) / VALUES, torch.full((VALUES,), float(k - 2))
    own = w.clone()
    for _ in range(3):
        gradient = curvature * (own - centre) + mu * (own - w)
        own = own - 0.1 * (gradient if correction is None else gradient + correction)
    return own - w


def _vector(value: Any, name: str) -> Tensor | None:
    if value is None:
        return None
    demand(isinstance(value, Tensor), f"{name} returned {type(value).__name__}: return a tensor (d,), or None")
    demand(value.shape == (VALUES,), f"{name} returned {tuple(value.shape)} for a model of {VALUES} values")
    demand(bool(value.isfinite().all()), f"{name} returned values that are not finite")
    vector: Tensor = value.detach()
    return vector


def _take(returned: Mapping[str, Any] | None, sums: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> None:
    found = {} if returned is None else returned
    demand(
        isinstance(found, Mapping) and set(found) == set(sums),
        f"finish returned {sorted(found) if isinstance(found, Mapping) else type(found).__name__}, but sums and "
        f"numbers declare {sorted(sums)}",
    )
    for name in names["sums"]:
        sums[name] = sums[name] + _vector(found[name], f"finish, as {name!r},")
    for name in names["numbers"]:
        sums[name] += float(found[name])


def _descend(subject: Subject, saved: int | None = None) -> list[AnyArray]:
    """Return the models (d,) after each update; before round `saved` the optimizer is made anew with its `state`."""
    made, w, found = subject.made(), torch.full((VALUES,), 0.1), []
    _begin(made, w)
    for t in range(ROUNDS):
        if t == saved:
            held = {name: getattr(made, name) for name in state_names(made)}
            made = subject.made()
            _begin(made, w)
            for name, value in held.items():
                setattr(made, name, value)
        update = torch.cos(torch.arange(VALUES) * (t + 1.0)) / (t + 2)
        before = w.clone()
        returned = (made.step if hasattr(made, "step") else made)(w, update)
        w = _vector(w if returned is None else returned, "step")  # type: ignore[assignment]
        demand(not torch.equal(w, before), "an update that is not 0 left the model as it was")
        found.append(w.numpy().copy())
    return found


def _begin(made: Any, w: Tensor) -> None:
    if hasattr(made, "start"):
        made.start(w)
    for name in state_names(made):
        if not hasattr(made, name):
            setattr(made, name, torch.zeros_like(w))


def _survives(play: Callable[[Subject, int | None], list[AnyArray]]) -> Callable[[Subject], str]:
    """Require equal results of uninterrupted rounds and of rounds resumed from the declared state alone."""

    def run(subject: Subject) -> str:
        for t, (one, other) in enumerate(zip(play(subject, None), play(subject, SAVED), strict=True)):
            demand(
                np.array_equal(one, other),
                f"made anew before round {SAVED} with the vectors that it declares, it does something else in round "
                f"{t}: it remembers what no checkpoint holds. Declare it (client_state, server_state; state of an "
                "optimizer)",
            )
        return f"made anew before round {SAVED} of {ROUNDS}: the same updates"

    return run


# --- losses and metrics ---


def _task(subject: Subject) -> str:
    """Return the task kind on which a loss or a metric is tried: its first one, else that of the settings."""
    fits: tuple[str, ...] = subject.mark("tasks", ())
    return fits[0] if fits else str(subject.settings.get("task.kind", "classification"))


def _outputs(task: str) -> tuple[Tensor, Tensor]:
    """Return outputs (b, …) from certain to uncertain, and targets (b, …); some tokens are ignored."""
    generator = np.random.Generator(np.random.Philox(3))
    shape = (LOSS_SAMPLES, POSITIONS, LOSS_CLASSES) if task == "tokens" else (LOSS_SAMPLES, LOSS_CLASSES)
    sureness = np.geomspace(0.01, 30, LOSS_SAMPLES).reshape(-1, *[1] * (len(shape) - 1))
    outputs = torch.from_numpy((generator.standard_normal(shape) * sureness).astype(np.float32))
    described = DataDescription(
        (1,), "float32", LOSS_CLASSES, "vector", 0, (), (), task, {"classification": ()}.get(task, shape[1:2])
    )
    targets = made_up_targets(described, LOSS_SAMPLES)
    if task == "tokens":
        targets[1::2, 1:] = IGNORED
    return outputs, targets


def _loss(subject: Subject) -> tuple[Loss, Tensor, Tensor]:
    """Return the loss as engines call it, outputs and targets."""
    return task_loss(subject.choice, subject.options, _task(subject)), *_outputs(_task(subject))


def _losses(subject: Subject) -> list[AnyArray]:
    loss, outputs, targets = _loss(subject)
    return [loss.per_sample(outputs, targets).numpy()]


def _one_value_a_sample(subject: Subject) -> str:
    """Require (b,) for any b, finite, with outputs and targets unchanged."""
    loss, outputs, targets = _loss(subject)
    kept, labels = outputs.clone(), targets.clone()
    for count in (LOSS_SAMPLES, 1):
        found = loss.per_sample(outputs[:count], targets[:count])
        demand(bool(found.isfinite().all()), f"not finite for finite outputs: {found[~found.isfinite()].tolist()}")
    demand(torch.equal(outputs, kept) and torch.equal(targets, labels), "it changes what it is given: copy it first")
    return f"{tuple(outputs.shape)} outputs gave ({LOSS_SAMPLES},) values"


def _loss_alone(subject: Subject) -> str:
    """Require that each sample alone has the same loss as together with the others."""
    loss, outputs, targets = _loss(subject)
    together = loss.per_sample(outputs, targets)
    single = torch.cat([loss.per_sample(outputs[i : i + 1], targets[i : i + 1]) for i in range(LOSS_SAMPLES)])
    apart = float((together - single).abs().max())
    demand(
        bool(torch.allclose(together, single, rtol=1e-4, atol=1e-5)),
        f"a sample's loss changes by up to {apart:.2g} with the samples beside it: compute it of its own outputs only",
    )
    return f"{LOSS_SAMPLES} samples, the same one by one"


def _loss_gradients(subject: Subject) -> str:
    loss, outputs, targets = _loss(subject)
    outputs.requires_grad_()
    found = loss.per_sample(outputs, targets)
    demand(found.requires_grad, "its values have no gradient by the outputs: compute them with torch's own functions")
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    demand(bool(gradient.isfinite().all()), "a gradient is not finite for finite outputs")
    return f"largest {float(gradient.abs().max()):.3g}"


def _bare_metric(subject: Subject) -> list[AnyArray]:
    found = subject.made()(*_outputs(_task(subject)))
    demand(isinstance(found, dict), f"it returns {type(found).__name__}: return a dictionary of sums over the samples")
    return [np.asarray(found[name]) for name in sorted(found)]


def _numbers(subject: Subject, batches: Sequence[int]) -> dict[str, float]:
    """Return the numbers that a run would record of some samples, cut into batches of these sizes."""
    kind = KINDS[_task(subject)]
    outputs, targets = _outputs(kind.name)
    tally = MetricTally([Metric(subject.part, subject.options)], kind)
    for x, y in zip(torch.split(outputs, list(batches)), torch.split(targets, list(batches)), strict=True):
        tally.add(x, y)
    return tally.numbers()


def _adds_up(subject: Subject) -> str:
    """Require the same numbers for any division of the samples into batches."""
    whole = _numbers(subject, CUTS[0])
    for cut in CUTS[1:]:
        found = _numbers(subject, cut)
        for name, value in whole.items():
            near = np.isclose(found.get(name, np.nan), value, rtol=TOLERANCE, atol=TOLERANCE)
            demand(
                bool(near) and found.keys() == whole.keys(),
                f"{name} is {found.get(name, 'missing')} in batches of {cut}, and {value} of all at once: return sums "
                "over the samples, which add up, and divide by their number in result(sums, samples) alone",
            )
    return f"{len(CUTS)} ways to cut {sum(CUTS[0])} samples, the same {', '.join(whole)}"


def _finite_numbers(subject: Subject) -> str:
    outputs, targets = _outputs(_task(subject))
    kept, labels = outputs.clone(), targets.clone()
    subject.made()(outputs, targets)
    demand(torch.equal(outputs, kept) and torch.equal(targets, labels), "it changes what it is given: copy it first")
    found = _numbers(subject, CUTS[1])
    wrong = [name for name, value in found.items() if not np.isfinite(value)]
    demand(not wrong, f"{wrong and wrong[0]} is {wrong and found[wrong[0]]} for finite outputs")
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items())


# --- models and local optimizers ---


def _suited(subject: Subject) -> tuple[DataDescription, nn.Module, Tensor]:
    """Return the first description with which the model can be built and called, the model, and samples (b, …)."""
    own, reasons = subject.settings.get("data.source"), []
    task = str(subject.settings.get("task.kind", "classification"))
    tried = [_for_task(description, task) for description in DESCRIPTIONS if task != "tokens" or description.vocabulary]
    for description in tried if own is None else (open_store(own).description,):
        try:
            built = build(subject.choice, subject.options, description, 5).eval()
            x = _samples(description)
            with torch.no_grad():
                built(x)
            return description, built, x
        except Exception as error:  # any error of a network on unsuitable data
            reasons.append(f"{description.feature_shape}: {error}")
    hint = "" if own is not None else ": name some that it takes, by the setting data.source"
    raise CheckFailed(f"it takes none of the data that it is tried on{hint} ({'; '.join(reasons)})")


def _for_task(description: DataDescription, task: str) -> DataDescription:
    if task == "classification":
        return description
    shape = description.feature_shape if task == "tokens" else (description.classes,)
    return replace(description, targets=task, target_shape=shape)


def _samples(description: DataDescription) -> Tensor:
    generator, shape = np.random.Generator(np.random.Philox(4)), (SAMPLES, *description.feature_shape)
    if description.task == "text":
        return torch.from_numpy(generator.integers(0, description.vocabulary, shape))
    return torch.from_numpy(generator.standard_normal(shape).astype(np.float32))


def _initial_values(subject: Subject) -> list[AnyArray]:
    return [value.detach().numpy() for value in _suited(subject)[1].parameters()]


def _model_outputs(subject: Subject) -> str:
    """Require (b, C), (b, L, C) for tokens, or the shape of y for regression; finite, for any b."""
    description, module, x = _suited(subject)
    known = {"task.kind", "data.source"} & set(subject.settings)
    hint = "" if known else ", or say what it is for by the setting task.kind"
    for count in (SAMPLES, 1):
        with torch.no_grad():
            found = module(x[:count])
        demand(isinstance(found, Tensor), f"it returns {type(found).__name__}: return a tensor, a value a class")
        wanted = f"({', '.join(map(str, (count, *description.output_shape)))})"
        demand(
            description.takes_outputs(tuple(found.shape), count),
            f"it returns {tuple(found.shape)} for {count} samples of {description.classes} classes: return "
            f"{wanted}{hint}",
        )
        demand(bool(found.isfinite().all()), "its outputs are not finite for finite samples")
    size = sum(value.numel() for value in module.parameters() if value.requires_grad)
    return f"{size:,} trainable values, samples {description.feature_shape}"


def _model_alone(subject: Subject) -> str:
    """Require that each sample alone has the same outputs as together with the others, in evaluation mode."""
    _, module, x = _suited(subject)
    with torch.no_grad():
        together = module(x)
        single = torch.cat([module(x[i : i + 1]) for i in range(SAMPLES)])
    demand(
        bool(torch.allclose(together, single, rtol=1e-3, atol=1e-4)),
        f"a sample's outputs change by up to {float((together - single).abs().max()):.2g} with the samples beside it: "
        "in evaluation mode compute them of that sample only",
    )
    return f"{SAMPLES} samples, the same one by one"


def _model_gradients(subject: Subject) -> str:
    """Require gradients that are finite and not zero everywhere."""
    description, module, x = _suited(subject)
    kind = KINDS[description.targets]
    model = FlatModel(module, loss=task_loss(kind.loss, kind=kind.name))
    _, found = model.loss_gradient(x, made_up_targets(description, SAMPLES))
    whole = torch.cat([gradient.to_dense().reshape(-1) for gradient in found if gradient is not None])
    demand(bool(whole.isfinite().all()), "a gradient is not finite for finite samples")
    demand(bool(whole.any()), "no parameter has a gradient: the outputs must follow from the parameters")
    return f"length {float(whole.norm()):.3g}"


def _stepped(subject: Subject, sign: float = 1.0) -> list[AnyArray]:
    """Return a client's model (d,) before and after each of some steps along synthetic gradients."""
    model = FlatModel(build("mlp", {"hidden": [3]}, DESCRIPTIONS[-1], 5))
    own = None
    if subject.part.foreign:
        own = OwnOptimizer(subject.part, partial(subject.part.object, **subject.part.checked(subject.options)))
    kind = "own" if own is not None else subject.part.name
    rule = LocalRule(optimizer=kind, own=own, lr=0.1)  # type: ignore[arg-type]
    memory = WorkingMemory(model)
    w = memory.vector.copy_(model.initial)
    found = [w.numpy().copy()]
    model.bind(w)
    optimizer = memory.optimizer(w, rule, None)
    for step in range(STEPS):
        gradient = sign * torch.cos(torch.arange(model.trainable) * (step + 1.0))
        optimizer.step([part.clone() for part in model.views(gradient)])
        found.append(w.numpy().copy())
    return found


def _bare_steps(subject: Subject) -> None:
    """Take some steps without the protection of generators in runs."""
    if not subject.part.foreign:
        _stepped(subject)
        return
    parameters = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer = subject.part.object(parameters, lr=0.1, **subject.part.checked(subject.options))
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1.0 + step)
        optimizer.step()


def _follows(subject: Subject) -> str:
    """Require that steps change the model, though not each one, and that other gradients change it differently."""
    there, back = _stepped(subject), _stepped(subject, -1.0)
    demand(all(np.isfinite(model).all() for model in there), "its steps are not finite for gradients up to 1")
    moved = (there[0] != there[-1]).any()
    demand(moved, f"{STEPS} steps leave the parameters as they were: change them in place, as torch.optim does")
    demand((there[-1] != back[-1]).any(), "opposite gradients give the same steps: read each parameter's grad")
    return f"{STEPS} steps, of length {np.linalg.norm(there[-1] - there[0]):.3g} together"


def _source_digest(subject: Subject) -> list[AnyArray]:
    store = open_store(subject.choice, subject.options)
    return [np.frombuffer(bytes.fromhex(store.manifest.train[0].sha256), np.uint8)]


CONTRACTS = {
    "local algorithm": Contract(
        _play,
        "same result from the same work",
        (("names and shapes as declared", _as_declared), ("state survives a checkpoint", _survives(_play))),
    ),
    "server optimizer": Contract(
        _descend,
        "same step from the same update",
        (
            ("finite models of the same shape", lambda s: f"{len(_descend(s))} steps of ({VALUES},)"),
            ("state survives a checkpoint", _survives(_descend)),
        ),
    ),
    "loss": Contract(
        _losses,
        "same values of the same outputs",
        (
            ("one finite value a sample", _one_value_a_sample),
            ("a sample's value does not depend on the others", _loss_alone),
            ("finite gradients", _loss_gradients),
        ),
    ),
    "metric": Contract(
        _bare_metric,
        "same sums of the same outputs",
        (("sums add up over batches", _adds_up), ("finite numbers", _finite_numbers)),
    ),
    "model": Contract(
        _initial_values,
        "same values from the same seed",
        (
            ("finite outputs of the shape that the task asks for", _model_outputs),
            ("evaluated samples do not depend on one another", _model_alone),
            ("finite gradients", _model_gradients),
        ),
    ),
    "local optimizer": Contract(
        _stepped,
        "same steps from the same gradients",
        (("steps follow the gradients and stay finite", _follows),),
        bare=_bare_steps,
    ),
    "data source": Contract(_source_digest, "same data every time", ()),
}
