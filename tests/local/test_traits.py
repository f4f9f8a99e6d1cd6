"""What trying a model says about its dropout, its random numbers and its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedmpi
from fedmpi import PartFailure, UserError
from fedmpi.common.registry import resolve
from fedmpi.local.merged import MergedEngine
from fedmpi.local.probes import client_gradients
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import check_type, forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.tasks.evaluation import evaluate
from tests.local.stacks import CLASSES, TEXTS
from tests.local.synthetic import SMALL_IMAGES, STREAMS, InMemorySource, relative_error, summed, tasks_of


class Dropping(nn.Linear):
    """Drops half of its inputs, in training mode or always."""

    def __init__(self, always: bool = False, p: float = 0.5):
        super().__init__(36, 5)
        self.always, self.p = always, p

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.dropout(x.flatten(1), self.p, self.always or self.training))


def test_dropout_in_a_function_is_no_draw_from_torchs_generator() -> None:
    model = FlatModel(Dropping())
    traits = forward_traits(model, SMALL_IMAGES)
    assert (traits.draws, traits.couples, traits.calls_dropout, traits.drops_across) == (False, False, True, False)
    assert model.has_dropout and model.calls_dropout


class Clipping(nn.Linear):
    """Clips the gradients of its inputs where there are gradients: in training mode."""

    def __init__(self, dropped: bool):
        super().__init__(36, 5)
        self.first, self.dropped = nn.Linear(36, 36), dropped

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        if self.training:
            x.register_hook(lambda gradient: gradient.clamp(-10, 10))
        return super().forward(functional.dropout(x, 0.5, self.training) if self.dropped else x)


@pytest.mark.parametrize("dropped", [False, True])
def test_values_may_have_hooks_in_training_mode(dropped: bool) -> None:
    traits = forward_traits(FlatModel(Clipping(dropped)), SMALL_IMAGES)
    assert traits.bends and not traits.couples and traits.drops == dropped


class Spectral(nn.Linear):
    """Returns a spectrum, or what else it is told to."""

    def __init__(self) -> None:
        super().__init__(36, 5)
        self.returns = torch.fft.fft

    def forward(self, x: Tensor) -> Tensor:
        return self.returns(super().forward(x.flatten(1)))


def test_logits_are_real_numbers_from_the_trial_to_the_last_round() -> None:
    with pytest.raises(UserError, match="must return real numbers, not complex ones"):
        forward_traits(FlatModel(Spectral()), SMALL_IMAGES)
    part = resolve("model", Spectral)
    model, y = FlatModel(Spectral(), part=part), torch.arange(3)
    for returns, said in (
        (torch.fft.fft, "complex numbers: return real ones"),
        (lambda _: None, "NoneType, no tensor"),
    ):
        model.module.returns = returns
        with pytest.raises(PartFailure, match=f"Spectral .*returned {said}"):
            model.loss_gradient(torch.ones(3, 1, 6, 6), y)


def test_what_drops_nothing_is_run_without_ado() -> None:
    for module in (Dropping(p=0.0), nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5))):
        model = FlatModel(module)
        assert not forward_traits(model, SMALL_IMAGES).calls_dropout
        assert model.has_dropout == isinstance(module, nn.Sequential)


def test_dropout_that_goes_on_in_evaluation_mode_draws_from_torchs_generator_there() -> None:
    traits = forward_traits(FlatModel(Dropping(always=True)), SMALL_IMAGES)
    assert traits.draws and traits.calls_dropout


def test_training_in_a_function_draws_from_the_clients_stream_alone() -> None:
    """Also with torch's generator somewhere else, and where the configuration switches dropout off."""
    source, rule = InMemorySource(SMALL_IMAGES, [9, 6, 12]), LocalRule(lr=0.1, epochs=2, batch_size=3)
    torch.manual_seed(1)
    model, plain = FlatModel(Dropping()), FlatModel(Dropping(p=0.0))
    plain.initial.copy_(model.initial)
    layer = FlatModel(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5)))
    layer.initial.copy_(model.initial)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), rule)[0])
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*results)
    of_layer = summed(SequentialEngine(layer, source, STREAMS), layer, tasks_of(source), rule)[0]
    assert relative_error(results[0], of_layer) < 1e-6
    off = LocalRule(lr=0.1, epochs=2, batch_size=3, dropout=False)
    without = summed(SequentialEngine(model, source, STREAMS), model, tasks_of(source), off)[0]
    of_plain = summed(SequentialEngine(plain, source, STREAMS), plain, tasks_of(source), rule)[0]
    assert relative_error(without, of_plain) < 1e-6 < 0.01 < relative_error(without, results[0])


def test_a_probe_drops_nothing_in_functions_either() -> None:
    source = InMemorySource(SMALL_IMAGES, [9, 6])
    torch.manual_seed(1)
    model, plain = FlatModel(Dropping()), FlatModel(Dropping(p=0.0))
    plain.initial.copy_(model.initial)
    (_, found), (_, expected) = (
        next(iter(client_gradients(source, one, [1], one.initial, "full", STREAMS, 0))) for one in (model, plain)
    )
    assert relative_error(found, expected) < 1e-6


class Detached(nn.Linear):
    """Loses its gradient at the end, or changes what the gradient needs."""

    def __init__(self, in_place: bool):
        super().__init__(36, 5)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.flatten(1))
        return torch.exp(y).mul_(2) if self.in_place else y.detach()


@pytest.mark.parametrize(("in_place", "words"), [(False, "nothing could be learned"), (True, "modified by an inplace")])
def test_what_has_no_gradient_is_refused_before_any_client_trains(in_place: bool, words: str) -> None:
    with pytest.raises(UserError, match=words):
        forward_traits(FlatModel(Detached(in_place)), SMALL_IMAGES)


class OnItsOwn(nn.Linear):
    """Goes about its gradients itself, in one of many ways, which nobody would notice."""

    def __init__(self, how: str):
        super().__init__(36, 5)
        self.how, self.passes = how, 0
        if how == "hook":
            self.weight.register_post_accumulate_grad_hook(lambda one: None)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.flatten(1))
        self.passes += 1
        if self.how == "backward" and y.requires_grad:
            y.square().mean().backward(retain_graph=True)
        if self.how == "freezes":
            self.bias.requires_grad_(self.passes > 3)
        return y


WAYS = [
    ("hook", "a hook that waits"),
    ("backward", "calls backward"),
    ("freezes", "freezes parameters .bias"),
]


@pytest.mark.parametrize(("how", "words"), WAYS)
def test_a_model_that_goes_about_its_gradients_itself_is_refused(how: str, words: str) -> None:
    module = OnItsOwn(how)
    module.weight.grad = torch.ones(5, 36)
    with pytest.raises(UserError, match=words):
        forward_traits(FlatModel(module), SMALL_IMAGES)
    assert module.bias.requires_grad
    assert torch.equal(module.weight.grad, torch.ones(5, 36))
    assert forward_traits(FlatModel(OnItsOwn("not at all")), SMALL_IMAGES)


class Begun(nn.Linear):
    """Sets its bias by the first samples that it sees."""

    begun = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if not self.begun:
            self.bias.data.copy_(-super().forward(x).detach().mean(0))
            self.begun = True
        return super().forward(x)


def test_a_model_that_changes_parameters_in_its_first_pass_only_is_seen_to() -> None:
    assert forward_traits(FlatModel(Begun(36, 5)), SMALL_IMAGES).writes


class Normalised(torch.autograd.Function):
    """Gradients of length 1, of all samples together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


class Hooked(nn.Module):
    """Whose gradients are changed on their way, in one of many manners."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(36, 8), nn.Linear(8, 5)
        if how == "clipped":
            self.a.weight.register_hook(clipped)
        if how == "scaled":
            self.a.weight.register_hook(lambda gradient: 0.3 * gradient)
        if how == "of a layer":
            self.b.register_full_backward_hook(lambda layer, inputs, outputs: tuple(map(clipped, inputs)))
        if how == "before a layer":
            self.b.register_full_backward_pre_hook(lambda layer, outputs: tuple(map(clipped, outputs)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x.flatten(1)))
        if self.how == "of values" and x.requires_grad:
            x.register_hook(clipped)
        if self.how == "centred" and x.requires_grad:
            x.register_hook(lambda gradient: gradient - gradient.mean(0))
        own = {"normalised": Normalised, "reversed": Reversed}.get(self.how)
        x = x if own is None else own.apply(x)
        return self.b(functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("how", ["clipped", "of a layer", "before a layer", "of values", "centred", "normalised"])
def test_clients_whose_gradients_do_not_add_up_are_not_merged(how: str) -> None:
    model = FlatModel(Hooked(how))
    refusal = MergedEngine(model, InMemorySource(SMALL_IMAGES, [3, 4]), STREAMS).model_refusal()
    assert refusal == "hooks, or a backward pass of its own, clip or normalise the gradients of a batch"


@pytest.mark.parametrize("how", ["as they are", "scaled", "reversed"])
def test_clients_whose_gradients_are_scaled_are_merged(how: str) -> None:
    model, source = FlatModel(Hooked(how)), InMemorySource(SMALL_IMAGES, [3, 4])
    assert MergedEngine(model, source, STREAMS).model_refusal() is None
    assert not forward_traits(FlatModel(Hooked(how).to(torch.float16)), SMALL_IMAGES).bends


class Energy(nn.Module):
    """Takes a step down its own slope, in one of two ways, also where nobody asks for gradients."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.a, self.b = way, nn.Linear(36, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.way == "torch.func":
            slope = torch.func.vmap(torch.func.grad(lambda row: torch.tanh(self.a.weight @ row).sum()))(x)
        else:
            with torch.enable_grad():
                moved = x.clone().requires_grad_()
                energy = torch.tanh(moved @ self.a.weight.t()).sum()
                (slope,) = torch.autograd.grad(energy, moved, create_graph=True)
        return self.b(torch.tanh(self.a(x - 0.1 * slope)))


@pytest.mark.parametrize("way", ["torch.func", "autograd"])
def test_a_model_that_computes_gradients_within_is_trained_and_evaluated(way: str) -> None:
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((30, 1, 6, 6)).astype(np.float32), generator.integers(0, 5, 30)
    data = fedmpi.ClientArrays(x[:20], y[:20], np.arange(20) % 4, test=(x[20:], y[20:]))
    settings = {"rounds": 2, "participation.count": 4, "evaluation.clients": "all"}
    run = fedmpi.run("fedavg", settings, data=data, model=lambda _: Energy(way))
    module = run.model.eval()
    found = functional.cross_entropy(module(torch.from_numpy(x[20:])).detach(), torch.from_numpy(y[20:]))
    assert run.summary["final"]["test_loss"] == pytest.approx(float(found))


def test_a_model_of_texts_may_be_of_another_type_for_its_samples_are_none() -> None:
    model = FlatModel(nn.Sequential(nn.EmbeddingBag(60, 8), nn.Linear(8, CLASSES)).double())
    forward_traits(model, TEXTS)
    check_type(model, TEXTS)
    with pytest.raises(UserError, match=r"^the model's values are torch\.float64, but samples come as float32"):
        check_type(FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).double()), SMALL_IMAGES)


class Table(nn.Linear):
    """Keeps tables by the number of samples."""

    def __init__(self) -> None:
        super().__init__(36, 5)
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.linspace(1, 2, 5)
        return super().forward(x) * self.tables[len(x)]


def test_what_is_kept_of_an_evaluation_may_be_trained_with() -> None:
    module, x, y = Table(), torch.ones(7, 36), torch.zeros(7, dtype=torch.int64)
    evaluate(module, x, y, 7)
    functional.cross_entropy(module(x), y).backward()
    assert module.weight.grad is not None
