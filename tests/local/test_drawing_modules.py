"""Models that draw or drop where trial passes do not see it, by other generators, or while they are evaluated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedmpi import Config, UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.core.evaluation import EvaluatedParts
from fedmpi.data.schema import DataDescription
from fedmpi.local.merged import MergedEngine
from fedmpi.local.probes import client_gradients
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import couples_in_evaluation, forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models.dropout import ClientMasks
from fedmpi.models.flat import FlatModel
from fedmpi.models.stacked.net import why_not_stackable
from fedmpi.tasks.losses import task_loss
from tests.local.stacks import CLASSES, Source, ragged_sizes, relative_difference, tasks_for, train

STREAMS = Streams(7)
FLAT = DataDescription((8,), "float32", CLASSES, "image", 0, (), ())
EPOCHS, ONE = LocalRule(lr=0.05, epochs=2, batch_size=7), LocalRule(lr=0.05, epochs=1, batch_size=None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.within(torch.tanh(self.a(x)))))

    def within(self, x: Tensor) -> Tensor:
        return x


def drop(net: nn.Module, x: Tensor, p: float = 0.4) -> Tensor:
    return functional.dropout(x, p, net.training)


class LateCall(Net):
    def within(self, x: Tensor) -> Tensor:
        return drop(self, x) if len(x) in (5, 7) else x


class LateNoise(Net):
    def within(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training and len(x) in (5, 7) else x


class Rising(Net):
    """Dropout that begins with the second step, by p of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.0)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def within(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.layer.p = 0.0 if len(x) in (2, 4, 67) else 0.5
        return self.layer(x)


class ByCounter(Net):
    """A number of steps, in a buffer, decides how much is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def within(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return drop(self, x, min(0.9, 0.2 * float(self.steps))) if self.training else x * (1 + self.steps)


class ByAttribute(Net):
    """Dropout from the second step on, counted in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def within(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return drop(self, x) if self.steps > 1 else x * (1 + self.steps)


class Growing(Net):
    """Every pass counts in an attribute, and what it gives grows with that."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def within(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * (1 + 0.1 * self.passes)


class ByNewBuffer(Net):
    """The same, in a buffer that every step replaces by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def within(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps = self.steps + 1
        return drop(self, x) if self.steps > 1 else x * (1 + self.steps)


class Depth(Net):
    """Layers left out by chance, drawn by Python."""

    def within(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.4 else x + self.b(x)


class DepthByNumpy(Net):
    def within(self, x: Tensor) -> Tensor:
        return x if self.training and np.random.rand() < 0.4 else x + self.b(x)  # noqa: NPY002


class Held(Net):
    """Draws from a generator of its own."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self.generator = make()

    def within(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if isinstance(self.generator, torch.Generator):
            return x * (torch.rand(16, generator=self.generator) > 0.3)
        return x * float(self.generator.random() if hasattr(self.generator, "random") else self.generator.rand())


def set_up(net: Callable[[], nn.Module]) -> tuple[FlatModel, Source, list]:
    torch.manual_seed(1)
    model, sizes = FlatModel(net().double()), ragged_sizes(8, 20)
    return model, Source(FLAT, sizes, torch.float64), tasks_for(sizes)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


HELD = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "old numpy": lambda: np.random.RandomState(3),
    "random": lambda: random.Random(3),
}
DRAWING = {
    "call": LateCall,
    "noise": LateNoise,
    "p": Rising,
    "counter": ByCounter,
    "attribute": ByAttribute,
    "new buffer": ByNewBuffer,
    "random": Depth,
    "numpy": DepthByNumpy,
    **{f"own {name}": lambda make=make: Held(make) for name, make in HELD.items()},
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_clients_update_depends_neither_on_who_was_trained_before_nor_on_global_generators(name: str):
    model, source, tasks = set_up(DRAWING[name])
    engine = SequentialEngine(model, source, STREAMS)
    largest = int(source.sizes.argmax())
    one, others = [tasks[largest]], tasks[:largest] + tasks[largest + 1 :]
    seed_all(1)
    expected = train(engine, one, model.initial, EPOCHS)[0]
    seed_all(2)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    train(engine, others, model.initial, EPOCHS)
    found = train(engine, one, model.initial, EPOCHS)[0]
    assert torch.equal(found, expected)
    assert not torch.equal(found, train(engine, one, model.initial, EPOCHS, round=3)[0])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002


@pytest.mark.parametrize("name", ["call", "noise", "random", "own torch"])
def test_clients_with_the_same_samples_draw_different_numbers(name: str):
    model, source, tasks = set_up(DRAWING[name])
    one, other = int(source.sizes.argmax()), int(source.sizes.argmin())
    source.x[other], source.y[other], source.sizes[other] = source.x[one], source.y[one], source.sizes[one]
    rule = LocalRule(lr=0.05, steps=6, epochs=None, batch_size=None)  # without an order that is drawn
    source.x, source.y = [x[:5] for x in source.x], [y[:5] for y in source.y]
    source.sizes[[one, other]] = 5
    engine, weights = SequentialEngine(model, source, STREAMS), []
    for client in (one, other):
        weights.append(train(engine, [replace(tasks[one], client=client)], model.initial, rule)[0])
    assert not torch.equal(*weights)


@pytest.mark.parametrize("net", [Depth, LateNoise])
def test_a_clients_visits_of_one_round_draw_different_numbers(net: type[nn.Module]):
    model, source, tasks = set_up(net)
    source.x, source.y = [x[:5] for x in source.x], [y[:5] for y in source.y]
    one = int(source.sizes.argmax())
    source.sizes[one] = 5
    rule, engine = LocalRule(lr=0.05, steps=8, epochs=None, batch_size=None), SequentialEngine(model, source, STREAMS)
    found = []
    for visit in (0, 1):
        w = model.initial.clone()
        engine.advance(w, replace(tasks[one], rows=None, visit=visit), rule, 2)
        found.append(w)
    assert not torch.equal(*found)


@pytest.mark.parametrize("name", ["random", "numpy", "own torch", "own numpy"])
def test_models_that_draw_by_other_means_than_torchs_are_trained_alone(name: str):
    model, source, _ = set_up(DRAWING[name])
    assert forward_traits(model, FLAT).draws
    assert "draws from a global generator" in str(MergedEngine(model, source, STREAMS).model_refusal())
    assert "draws from" in str(why_not_stackable(model.module, FLAT))


@pytest.mark.parametrize("name", ["call", "noise", "p"])
def test_merged_clients_that_draw_unforeseen_are_refused(name: str):
    model, source, tasks = set_up(DRAWING[name])
    engine = MergedEngine(model, source, STREAMS)
    assert engine.model_refusal() is None
    at_once = sum(len(task.rows) if task.rows is not None else int(source.sizes[task.client]) for task in tasks)
    assert at_once not in (2, 4, 67)
    if name != "p":
        source.x = [x[:5] for x in source.x]
        source.y = [y[:5] for y in source.y]
        source.sizes = np.array([len(y) for y in source.y])
        tasks = [task for task in tasks_for(source.sizes) if task.rows is None and source.sizes[task.client] == 5][:1]
    with pytest.raises(UserError, match="^the model draws random numbers for some batches only"):
        train(engine, tasks, model.initial, ONE)


def noise_late(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses * torch.rand(()) if len(losses) not in (2, 4, 67) else losses


def test_a_loss_that_draws_unforeseen_is_named_beside_the_model():
    sizes = np.array([7])
    model, source = FlatModel(Net().double(), loss=task_loss(noise_late)), Source(FLAT, sizes, torch.float64)
    name = r"test_drawing_modules:noise_late"
    with pytest.raises(
        UserError, match=rf"^the model, or the loss .*{name}, draws random numbers for some batches only"
    ):
        train(MergedEngine(model, source, STREAMS), tasks_for(sizes), model.initial, ONE)


class Switched(Net):
    """A layer whose p the forward pass sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.0)

    def within(self, x: Tensor) -> Tensor:
        self.layer.p = 0.5
        return self.layer(x)


def test_merged_clients_get_masks_of_a_layer_that_drops_once_it_is_called():
    model, source, tasks = set_up(Switched)
    expected, found = (
        train(engine(model, source, STREAMS), tasks, model.initial, ONE)[0] - model.initial
        for engine in (SequentialEngine, MergedEngine)
    )
    assert relative_difference(found, expected) < 1e-12


def test_merged_clients_count_their_steps_from_the_first_value():
    model, source, tasks = set_up(ByCounter)
    expected = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, ONE)[0] - model.initial
    merged = MergedEngine(model, source, STREAMS)
    for _ in range(2):
        found = train(merged, tasks, model.initial, ONE)[0] - model.initial
        assert relative_difference(found, expected) < 1e-12


def test_following_a_module_leaves_its_buffers():
    model, _, _ = set_up(ByCounter)
    assert why_not_stackable(model.module, FLAT) is not None
    assert isinstance(model.module._buffers["steps"], Tensor)


class Again(Net):
    """A function alone is computed again, for all batches or for some."""

    def __init__(self, rows: tuple[int, ...] | None, layer: bool = False, again: bool = True) -> None:
        super().__init__()
        self.rows, self.again = rows, again
        self.layer = nn.Dropout(0.4) if layer else None

    def within(self, x: Tensor) -> Tensor:
        function = (lambda y: drop(self, y.exp())) if self.layer is None else (lambda y: self.layer(y.exp()))
        again = self.again and (self.rows is None or len(x) in self.rows)
        return checkpoint(function, x, use_reentrant=False) if again else function(x)


def test_a_function_computed_again_drops_the_same():
    """The masks are then torch's; the gradient is that of the values that the forward pass gave."""
    model, source, _ = set_up(lambda: Again(None))
    assert forward_traits(model, FLAT).torch_drops
    x, y = source.x[0][:7], source.y[0][:7]
    model.bind(model.initial.clone())
    model.module.train()
    found = []
    for again in (True, False):
        model.module.again = again
        torch.manual_seed(4)
        model.masks.source = ClientMasks(lambda: np.random.default_rng(0))
        loss, gradients = model.loss_gradient(x, y)
        found.append(
            torch.cat([loss.reshape(1), *(gradient.reshape(-1) for gradient in gradients if gradient is not None)])
        )
    torch.testing.assert_close(*found)


class AgainWithout(Net):
    """What is computed again drops nothing; other parts do."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.part = again, nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def within(self, x: Tensor) -> Tensor:
        x = drop(self, x)
        return checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)


def test_a_part_computed_again_leaves_the_dropout_of_others_to_the_clients_stream():
    found = []
    for again in (False, True):
        model, source, tasks = set_up(lambda again=again: AgainWithout(again))
        assert not forward_traits(model, FLAT).torch_drops
        found.append(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("layer", [False, True])
def test_dropout_computed_again_for_some_batches_only_is_refused(layer: bool):
    model, source, tasks = set_up(lambda: Again((7,), layer))
    assert not forward_traits(model, FLAT).torch_drops
    with pytest.raises(Exception, match="once more in the backward pass"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    off = LocalRule(lr=0.05, epochs=2, batch_size=7, dropout=False)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, off)


class CompiledFunction(Net):
    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.3)
        called = self.layer if layer else functional.dropout
        self.function = torch.compile(lambda x: called(torch.tanh(x)), backend="eager")

    def within(self, x: Tensor) -> Tensor:
        return self.function(x) if self.training else torch.tanh(x)


@pytest.mark.parametrize("layer", [False, True])
def test_functions_that_are_compiled_may_drop(layer: bool):
    model, source, tasks = set_up(lambda: CompiledFunction(layer))
    assert forward_traits(model, FLAT).torch_drops
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0])
    assert torch.equal(*found)


class Always(Net):
    """Drops in evaluation mode as well, in a layer, in a function, or by numpy."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Dropout(0.4)

    def within(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            return self.layer.train()(x)
        if self.how == "numpy":
            return x * float(np.random.rand())  # noqa: NPY002
        return functional.dropout(x, 0.4, True)


def evaluated(model: FlatModel) -> Callable[[int], dict[str, float]]:
    """round -> what an evaluation behind it finds."""
    x, y = torch.randn(30, 8, dtype=torch.float64), torch.arange(30) % CLASSES
    store = SimpleNamespace(part_samples=lambda part: 30, manifest=SimpleNamespace(class_names=tuple("abcde")))
    data = SimpleNamespace(description=FLAT, test=lambda: (x, y), validation=lambda: (x, y))
    config = Config(preset="fedavg", evaluation={"on": "both"})
    parts = EvaluatedParts(config, store, data)  # type: ignore[arg-type]
    return lambda round: parts.scores(model, model.initial, round)


@pytest.mark.parametrize("how", ["layer", "function", "numpy"])
def test_a_model_that_drops_while_it_is_evaluated_draws_from_the_rounds_stream(how: str):
    model, source, tasks = set_up(lambda: Always(how))
    evaluate, found = evaluated(model), []
    for seed in (1, 2):
        seed_all(seed)
        found.append(evaluate(4))
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    assert found[0] == found[1]
    source_before, _ = model.masks.source, evaluate(4)
    assert model.masks.source is source_before
    assert found[0]["test_loss"] != evaluate(5)["test_loss"]
    assert found[0]["test_loss"] != found[0]["val_loss"]


def test_a_model_that_drops_while_it_is_evaluated_may_have_batch_norm():
    class WithNorm(Always):
        def __init__(self) -> None:
            super().__init__("layer")
            self.norm = nn.BatchNorm1d(16)

        def within(self, x: Tensor) -> Tensor:
            return super().within(self.norm(x))

    model, _, _ = set_up(WithNorm)
    assert not couples_in_evaluation(model, FLAT)


@pytest.mark.parametrize("net", [ByCounter, ByAttribute, ByNewBuffer])
def test_counters_have_their_first_values_in_an_evaluation(net: type[nn.Module]):
    model, source, tasks = set_up(net)
    evaluate = evaluated(model)
    expected = evaluate(0)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    assert evaluate(0) == expected


def test_a_seed_is_the_streams_first_number():
    for purpose, round, client in ((Purpose.MODULE, 0, 0), (Purpose.EVALUATION, 3, 2**40), (Purpose.MODULE, 2**40, 1)):
        expected = int(STREAMS.generator(purpose, round, client).integers(0, 2**63))
        assert STREAMS.seed64(purpose, round, client) == expected


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


def with_a_scripted_part() -> nn.Module:
    module = plain()
    module[1] = torch.jit.script(module[1])
    return module


TORCHSCRIPT = {
    "script": lambda: torch.jit.script(plain()),
    "trace": lambda: torch.jit.trace(plain(), torch.zeros(4, 8, dtype=torch.float64)),
    "a scripted part": with_a_scripted_part,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", TORCHSCRIPT)
def test_torchscript_models_with_buffers_train_as_the_module_that_they_are_made_of(how: str):
    model, source, tasks = set_up(plain)
    tasks = [task for task in tasks if task.rows is None and source.sizes[task.client] > 2]
    rule, start = LocalRule(lr=0.05, epochs=2, batch_size=None), model.initial
    expected = train(SequentialEngine(model, source, STREAMS), tasks, start, rule)[0]
    model, _, _ = set_up(TORCHSCRIPT[how])
    found = train(SequentialEngine(model, source, STREAMS), tasks, start, rule)[0]
    torch.testing.assert_close(found, expected)


class Mean(Net):
    """A running mean in a float buffer, changed in place or replaced by another tensor."""

    def __init__(self, replaces: bool, shape: tuple[int, ...] = (16,)) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(shape))

    def within(self, x: Tensor) -> Tensor:
        if self.training:
            new = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            if self.replaces:
                self.mean = new
            else:
                self.mean.copy_(new)
        return x - self.mean


def test_float_buffers_that_the_forward_pass_replaces_travel_as_those_changed_in_place():
    found, scores = [], []
    for replaces in (False, True):
        model, source, tasks = set_up(lambda replaces=replaces: Mean(replaces))
        assert "keeps" in str(why_not_stackable(model.module, FLAT))
        assert MergedEngine(model, source, STREAMS).model_refusal() is not None
        found.append(train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)[0])
        assert not torch.equal(found[-1][model.trainable :], model.initial[model.trainable :])
        torch.manual_seed(3)
        scores.append(evaluated(model)(0))
    assert torch.equal(*found)
    assert scores[0] == scores[1]


def test_a_float_buffer_that_is_replaced_by_one_of_another_shape_is_refused():
    model, source, tasks = set_up(lambda: Mean(True, shape=(1,)))
    with pytest.raises(UserError, match="another shape in the place of its buffer mean"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)


class MadeLate(Net):
    """A layer without values, made when it is first needed, before the parts that count."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = ByAttribute()

    def within(self, x: Tensor) -> Tensor:
        if not hasattr(self.a, "act"):
            self.a.act = nn.ReLU()
        return self.counter.within(self.a.act(x))


def test_a_forward_pass_may_make_layers_when_they_are_first_needed():
    model, source, tasks = set_up(MadeLate)
    engine, largest = SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    expected = train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    train(engine, tasks, model.initial, EPOCHS)
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)


class HeldUnused(Held):
    """Holds a generator, with which the values were drawn at first."""

    def within(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", HELD)
def test_a_generator_that_the_forward_pass_does_not_draw_from_keeps_no_model_from_training_with_others(name: str):
    model, source, _ = set_up(lambda: HeldUnused(HELD[name]))
    assert not forward_traits(model, FLAT).draws
    assert MergedEngine(model, source, STREAMS).model_refusal() is None
    assert why_not_stackable(model.module, FLAT) is None


def test_a_generator_that_cannot_be_seeded_counts_as_drawn_from():
    model, _, _ = set_up(lambda: HeldUnused(random.SystemRandom))
    assert forward_traits(model, FLAT).draws
    assert "generator of its own" in str(why_not_stackable(model.module, FLAT))


@pytest.mark.parametrize("net", [ByCounter, Growing])
def test_a_clients_probe_does_not_depend_on_who_was_probed_before(net: type[nn.Module]):
    def gradient(clients: list[int]) -> Tensor:
        model, source, _ = set_up(net)
        probed = client_gradients(source, model, clients, model.initial, "full", STREAMS, 0)
        return [gradient.clone() for _, gradient in probed][-1]

    assert torch.equal(gradient([0, 1, 2]), gradient([2]))


class Keeping(Net):
    """What every pass gives depends on a state that the one before left, kept in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how in ("None", "None in place"):
            self.state = None
        if how == "a layer for None":
            self.layer = None
        if how in ("tensor", "tensor in place"):
            self.state = torch.ones(())
        if how in ("buffer", "buffer in place", "buffer's data"):
            self.register_buffer("state", torch.ones(()), persistent=False)

    def within(self, x: Tensor) -> Tensor:
        if self.how == "a layer for None":
            again = self.layer is not None
            self.layer = nn.Tanh()
            return x + 1 if again else x
        if self.how == "created anything":
            again = hasattr(self, "again")
            self.again = {"anything": x.shape}
            return x + 1 if again else x
        if self.how == "created buffer" and not hasattr(self, "state"):
            self.register_buffer("state", torch.ones(()), persistent=False)
        before = getattr(self, "state", None)
        before = torch.ones(()) if before is None else before
        if "data" in self.how:
            before.data += 0.25
        elif "in place" in self.how:
            self.state = before.add_(0.25)
        else:
            self.state = before + 0.25
        return x * self.state.to(x.dtype)


KEPT = ["None", "None in place", "a layer for None", "tensor", "tensor in place", "buffer", "buffer in place"]
KEPT += ["buffer's data", "created", "created in place", "created buffer", "created anything"]


@pytest.mark.parametrize("how", KEPT)
def test_what_a_module_keeps_from_call_to_call_begins_anew_with_every_client_and_evaluation(how: str):
    model, source, tasks = set_up(lambda: Keeping(how))
    evaluate, engine, largest = evaluated(model), SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    score, expected = evaluate(0), train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    train(engine, tasks, model.initial, EPOCHS)
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)
    assert evaluate(0) == score
    plain, _, _ = set_up(Net)
    assert not torch.equal(
        train(SequentialEngine(plain, source, STREAMS), [tasks[largest]], plain.initial, EPOCHS)[0], expected
    )


class TwoNames(Net):
    """Holds a buffer that travels under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mean = self.norm.running_mean

    def within(self, x: Tensor) -> Tensor:
        return self.norm(x) if len(x) > 1 or not self.training else x


def test_a_buffer_that_travels_under_two_names_keeps_what_it_has_learnt():
    model, sizes = FlatModel(TwoNames()), np.array([7, 9])  # of float32: .double() would part the names
    source, tasks = Source(FLAT, sizes, torch.float32), tasks_for(sizes)
    assert model.module.mean is model.module.norm.running_mean
    forward_traits(model, FLAT)
    learnt, _ = train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    model.bind(learnt)
    before = model.module.mean.clone()
    model.restart()
    assert float(before.abs().max()) > 0
    assert torch.equal(model.module.mean, before)


class CountingAlways(Net):
    """Changes a buffer that travels in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def within(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x


def test_an_evaluation_leaves_the_global_model_as_it_is():
    model, source, _ = set_up(CountingAlways)
    store = SimpleNamespace(
        part_samples=lambda part: 20 if part == "test" else 0,
        manifest=SimpleNamespace(class_names=tuple(range(CLASSES))),
    )
    data = SimpleNamespace(description=FLAT, test=lambda: source.load(int(source.sizes.argmax())))
    w = model.initial.clone()
    EvaluatedParts(Config(preset="fedavg"), store, data).scores(model, w, 0)
    assert torch.equal(w, model.initial)


class Later(Net):
    def within(self, x: Tensor) -> Tensor:
        if not hasattr(self, "later"):
            self.later = nn.Linear(16, 16).to(x.dtype)
        return self.later(x)


def test_a_forward_pass_that_makes_parameters_is_refused():
    model, _, _ = set_up(Later)
    with pytest.raises(UserError, match=r"makes parameters \(later\.weight\), which nobody would train"):
        forward_traits(model, FLAT)


class HoldsTheGlobal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.default_generator


def test_a_global_generator_that_a_module_holds_is_put_back():
    model, source, tasks = set_up(HoldsTheGlobal)
    before = torch.get_rng_state()
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    assert torch.equal(torch.get_rng_state(), before)
