"""Custom local optimizers: what they are given, compared with the built-in ones that do the same."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from fedmpi import ComponentFailure, UserError
from fedmpi.common.registry import resolve
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import LocalRule, OwnOptimizer
from fedmpi.models.flat import FlatModel
from tests.end_to_end.in_process import run
from tests.local.synthetic import MIDDLE_IMAGES, InMemorySource, relative_error
from tests.local.test_algorithms import SIZES, ended, simulate

OWN = "tests.local.test_own_optimizers"
SMALL = ("data.source=digits:clients=9", "clients.count=4", "model.hidden=[6]", "local.batch_size=40", "rounds=2")


def momentum(parameters, lr, *, decay: float = 0.0):
    """SGD with heavy-ball momentum."""
    return torch.optim.SGD(parameters, lr=lr, momentum=decay)


def by_keyword(parameters, *, lr: float = 123.0, decay: float = 0.0):
    """The same, its rate by keyword only, with a default that is never used."""
    return torch.optim.SGD(parameters, lr=lr, momentum=decay)


def decaying(parameters, lr):
    """Steps that also shrink what they are given a gradient of."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5, weight_decay=0.5)


def nothing(parameters, lr):
    """Forgets to return an optimizer."""


class Failing:
    """Optimizer whose step fails."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr

    def step(self):
        raise ZeroDivisionError("no such number")


class Replacing(Failing):
    """Descent whose steps give parameters other tensors, as those of many a paper's code do."""

    def step(self):
        for parameter in self.parameters:
            parameter.data = parameter.data - self.lr * parameter.grad


def ends(rule: LocalRule, algorithm: str = "plain", kind: str = "mlp") -> torch.Tensor:
    """The model after three rounds of the sequential engine, in float64."""
    return ended(SequentialEngine, algorithm, rule, kind)


def own(name: str, **options: object) -> OwnOptimizer:
    part = resolve("local optimizer", name)
    return OwnOptimizer(part, partial(part.object, **options))


@pytest.mark.parametrize("kind", ["mlp", "text-cnn"])
@pytest.mark.parametrize(("algorithm", "mu"), [("plain", 0.0), ("docs.examples.algorithm:Scaffold", 0.4)])
def test_an_own_optimizer_steps_on_corrected_gradients(algorithm: str, mu: float, kind: str) -> None:
    common = {"lr": 0.02, "epochs": 2, "batch_size": 4, "proximal_mu": mu, "epsilon": 1e-8}
    plain = ends(LocalRule(optimizer="sgd", **common), algorithm, kind)
    for name in ("momentum", "Replacing"):
        found = ends(LocalRule("own", own=own(f"{OWN}:{name}"), **common), algorithm, kind)
        assert relative_error(found, plain) < 1e-12
    faster = ends(LocalRule("own", own=own(f"{OWN}:momentum", decay=0.5), **common), algorithm, kind)
    assert relative_error(faster, plain) > 1e-3
    adam = ends(LocalRule("own", own=own("torch.optim:Adam"), **common), algorithm, kind)
    assert relative_error(adam, ends(LocalRule("adam", **common), algorithm, kind)) < 1e-10


class Idle(nn.Module):
    """One of its two layers is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(math.prod(MIDDLE_IMAGES.feature_shape), MIDDLE_IMAGES.classes), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x.flatten(1))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", f"{OWN}:decaying"])
@pytest.mark.parametrize("mu", [0.0, 0.4])
def test_what_a_model_does_not_use_has_no_gradient_as_in_a_plain_loop(optimizer: str, mu: float) -> None:
    torch.manual_seed(3)
    model, source = FlatModel(Idle().double()), InMemorySource(MIDDLE_IMAGES, SIZES, torch.float64)
    kind = {"optimizer": "own", "own": own(optimizer)} if ":" in optimizer else {"optimizer": optimizer}
    rule = LocalRule(lr=0.02, epochs=2, batch_size=4, proximal_mu=mu, **kind)
    moved = model.views(list(simulate(SequentialEngine, "plain", model, source, rule))[-1] - model.initial)
    decays = ":" in optimizer and mu > 0  # a proximal term is a loss of all parameters
    assert [bool(one.any()) for one in moved] == [True, True, decays, decays]


def test_a_run_takes_an_own_optimizer_at_the_rounds_own_rate_and_says_so() -> None:
    settings = (*SMALL, "preset=fedavg", "local.schedule=inverse")
    built_in = run(*settings, "local.engine=sequential")
    for name in ("momentum", "by_keyword"):
        found = run(*settings, f"local.optimizer={OWN}:{name}")
        assert torch.allclose(found.model, built_in.model, atol=1e-6)
    assert f'local.optimizer = "{OWN}:by_keyword" steps on' in found.experiment.trainer.engine.description
    moving = run(*settings, f"local.optimizer={OWN}:momentum", "local.optimizer.decay=0.5")
    assert not torch.allclose(moving.model, built_in.model, atol=1e-3)


def biases_free(named_parameters, lr, *, decay: float = 0.5):
    """Decay weights, but no biases."""
    groups = [
        {"params": [(name, one)], "weight_decay": 0.0 if name.endswith("bias") else decay}
        for name, one in named_parameters
    ]
    return torch.optim.SGD(groups, lr=lr)


def test_an_own_optimizer_may_ask_for_named_parameters() -> None:
    model, source = FlatModel(Idle().double()), InMemorySource(MIDDLE_IMAGES, SIZES, torch.float64)
    own_rule = LocalRule("own", lr=9.0, rates=(0.02,), batch_size=None, own=own(f"{OWN}:biases_free"))
    found, plain = (
        list(simulate(SequentialEngine, "plain", model, source, rule))[0]
        for rule in (own_rule, LocalRule(lr=0.02, batch_size=None))
    )
    weight, bias = (model.layout[f"used.{name}"] for name in ("weight", "bias"))
    assert torch.equal(found[bias], plain[bias])
    assert relative_error(plain[weight] - found[weight], 0.02 * 0.5 * model.initial[weight]) < 1e-12


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["local.optimizer=sgd", "local.optimizer.beta1=0.5"], 'needs local.optimizer = "adam"'),
        ([f"local.optimizer={OWN}:momentum", "preset=scaffold"], "only SGD's steps give back"),
        ([f"local.optimizer={OWN}:momentum", "local.engine=batched"], "steps on the parameters of one client"),
        ([f"local.optimizer={OWN}:nothing"], "has no step"),
        ([f"local.optimizer={OWN}:Failing"], "test_own_optimizers.py:.*ZeroDivisionError: no such number"),
    ],
)
def test_what_does_not_go_with_it_or_fails_is_named(settings: list[str], said: str) -> None:
    with pytest.raises((UserError, ComponentFailure), match=said):
        run(*SMALL, *settings)
