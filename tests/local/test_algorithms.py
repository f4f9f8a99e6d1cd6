"""Algorithms with state: engines agree on them, hooks are checked and named, contradicting choices are rejected.

That the built-in ones are what their papers say is tested by `tests/reference`.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import ClientArrays, Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.aggregation.exact import FloatSum
from fedmpi.clients.sampler import View
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose
from fedmpi.config import load_config
from fedmpi.local.algorithms import Totals, effective_steps, shrinking_sum
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.engines import choose_engine
from fedmpi.local.hooks import Hooks
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models.flat import FlatModel
from tests.local import own_algorithms
from tests.local.synthetic import (
    MIDDLE_IMAGES,
    STREAMS,
    TEXTS,
    BatchNormNet,
    InMemorySource,
    flat_model,
    made,
    ragged_sizes,
    relative_error,
)

OWN = "tests.local.own_algorithms"
SIZES = ragged_sizes(9, 23)
SCAFFOLD = "docs.examples.algorithm:Scaffold"
POPULATION = 12
ROUNDS = 3
RULES = {
    "epochs": LocalRule(lr=0.05, epochs=2, batch_size=4),
    "steps": LocalRule(lr=0.05, epochs=None, steps=5, batch_size=3),
    "whole": LocalRule(lr=0.05, epochs=3, batch_size=None),
}
ADAM = LocalRule(optimizer="adam", lr=0.01, epochs=2, batch_size=4, epsilon=1e-3)
MODELS = {"mlp": (MIDDLE_IMAGES, {"hidden": [8]}), "text-cnn": (TEXTS, {"filters": 4, "dimension": 6})}


def make(name: str, model: FlatModel, **options: object) -> Hooks:
    part = resolve("local algorithm", name)
    return Hooks(part, part.make(options), model, STREAMS, POPULATION, memory=1e9)


def cohort(round: int) -> list[ClientTask]:
    """Six of the nine clients, of unequal weights; one on half of its rows."""
    chosen = [(k + 4 * round) % len(SIZES) for k in (0, 1, 3, 4, 6, 7)]
    rows = {chosen[1]: np.arange(0, SIZES[chosen[1]], 2)}
    return [ClientTask(k, rows.get(k), 0.05 + 0.02 * k) for k in sorted(chosen)]


def world(name: str = "mlp", dtype: torch.dtype = torch.float64) -> tuple[FlatModel, InMemorySource]:
    description, given = MODELS[name]
    return flat_model(name, description, dtype, **given), InMemorySource(description, SIZES, dtype)


def simulate(engine_of: type, name: str, model: FlatModel, source: InMemorySource, rule: LocalRule, **options: object):
    """Three rounds; yields the model after each."""
    hooks = make(name, model, **options)
    engine = made(engine_of, model, source, chunk=4, hooks=hooks)
    w = model.initial.clone()
    kind = np.float64 if model.dtype == torch.float64 else np.float32
    rule = replace(rule, proximal_mu=rule.proximal_mu + hooks.proximal_mu)
    for t in range(ROUNDS):
        total = FloatSum(np.zeros(model.size, kind))
        sums = {key: FloatSum(np.zeros(model.size, kind)) for key in hooks.sums}
        hooks.begin(t, w, sums)
        report = engine.train(cohort(t), RoundJob(w, rule, t, total))
        for part in (total, *sums.values()):
            part.flush()
        further = {key: part.tensor.clone() for key, part in sums.items()} | hooks.totals
        totals = Totals(POPULATION, report.clients, report.weight, report.weight, t, rule.lr)
        w = w + hooks.server_step(total.tensor / report.weight, further, totals)
        yield w.clone()


def ended(engine: type, name: str, rule: LocalRule, kind: str = "mlp") -> torch.Tensor:
    return list(simulate(engine, name, *world(kind), rule))[-1]


PROXIMAL = LocalRule(lr=0.05, epochs=2, batch_size=4, proximal_mu=0.9)
CLIPPED = replace(PROXIMAL, clip_norm=0.3)
SAME = [
    *[("scaffold", SCAFFOLD, rule) for rule in RULES.values()],
    *[(SCAFFOLD, SCAFFOLD, rule) for rule in (PROXIMAL, replace(PROXIMAL, proximal_mu=14.0), ADAM, CLIPPED)],
    ("feddyn", f"{OWN}:DynamicLoss", RULES["epochs"]),
    ("fednova", "fednova", PROXIMAL),
    (f"{OWN}:Odd", f"{OWN}:Odd", RULES["steps"]),
]


@pytest.mark.parametrize(("name", "other", "rule"), SAME)
def test_engines_agree_on_an_algorithm_and_on_what_a_user_writes_instead(
    name: str, other: str, rule: LocalRule
) -> None:
    batched, sequential = ended(BatchedEngine, name, rule), ended(SequentialEngine, other, rule)
    assert relative_error(batched, sequential) < 1e-10
    plain = ended(SequentialEngine, "plain", rule)
    assert relative_error(plain, sequential) > 1e-5


def test_an_own_objective_draws_the_same_noise_whatever_was_drawn_before() -> None:
    ends = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        ends.append(ended(SequentialEngine, f"{OWN}:Noisy", RULES["epochs"]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*ends)
    assert relative_error(ends[0], ended(SequentialEngine, "plain", RULES["epochs"])) > 1e-4


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_what_a_foreign_correction_does_to_a_vector_is_kept_with_the_round(engine: type) -> None:
    model, source = world(dtype=torch.float32)
    hooks = make(f"{OWN}:Counting", model)
    trained = made(engine, model, source, hooks=hooks)
    for t in range(3):
        hooks.begin(t, model.initial, {})
        trained.train(cohort(0), RoundJob(model.initial, RULES["steps"], t, FloatSum(np.zeros(model.size, np.float32))))
        assert {float(value) for task in cohort(0) for value in hooks.state.record(task.client).ravel()} == {t + 1.0}


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_observers_may_change_an_update_and_hooks_overwrite_theirs(engine: type) -> None:
    (model, source), found = world(), []

    def halve(client: int, update: torch.Tensor) -> torch.Tensor:
        return update.mul_(0.5)

    for name, observe in (("Summing", halve), ("Norms", halve), ("Norms", None)):
        hooks, total = make(f"{OWN}:{name}", model), FloatSum(np.zeros(model.size))
        hooks.begin(0, model.initial, {key: FloatSum(np.zeros(model.size)) for key in hooks.sums})
        trained = made(engine, model, source, observe=observe, hooks=hooks)
        trained.train(cohort(0), RoundJob(model.initial, RULES["whole"], 0, total))
        found.append((total.tensor.clone(), hooks.totals))
    assert torch.equal(found[0][0], found[1][0])
    assert relative_error(found[2][0], 2 * found[1][0]) < 1e-12
    assert found[1][1] == found[2][1]


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_every_hook_draws_from_a_stream_of_the_client_or_of_the_round(engine: type) -> None:
    (model, source), rule = world(), LocalRule(lr=0.05, epochs=1, batch_size=None)
    hooks = make(f"{OWN}:Drawing", model)
    changes = {}
    for name in ("plain", "drawn"):
        total = FloatSum(np.zeros(model.size))
        hooks.begin(2, model.initial, {})
        own = {"hooks": hooks} if name == "drawn" else {}
        made(engine, model, source, **own).train(cohort(2), RoundJob(model.initial, rule, 2, total))
        total.flush()
        changes[name] = total.tensor
    draws = [STREAMS.generator(Purpose.ALGORITHM, 2, task.client) for task in cohort(2)]
    moves = [task.coefficient * draw.standard_normal() for task, draw in zip(cohort(2), draws, strict=True)]
    moved = (changes["plain"] - changes["drawn"])[model.layout["output.bias"]]
    assert torch.allclose(moved, torch.full_like(moved, rule.lr * sum(moves)))
    assert hooks.totals == {"drawn": pytest.approx(sum(draw.random() for draw in draws))}
    stepped = hooks.server_step(moved.new_ones(model.size), {}, Totals(POPULATION, 6, 1.0, 1.0, 2))
    first, later = (
        STREAMS.generator(purpose, t) for purpose, t in ((Purpose.ALGORITHM_START, 0), (Purpose.ALGORITHM_SERVER, 2))
    )
    assert torch.equal(stepped, torch.full_like(stepped, first.random() + later.random()))


def test_vectors_of_the_server_are_copies() -> None:
    model = flat_model("mlp", MIDDLE_IMAGES, torch.float32, hidden=[4])
    hooks = make("tests.local.own_algorithms:Aliases", model)
    for t in range(3):
        hooks.begin(t, model.initial, {})
        update = torch.full_like(model.initial, float(t))
        found = hooks.server_step(update, {}, Totals(POPULATION, 1, 1.0, 1.0, t))
        assert torch.equal(found, update)
    assert float(hooks.server["first"][0]) == 2.0 and not hooks.server["second"].any()
    assert torch.equal(hooks.server_step(update, {}, Totals(POPULATION, 0, 0.0, 1.0, 3)), update)  # none selected
    assert float(hooks.server["first"][0]) == 2.0


@pytest.mark.parametrize("name", ["feddyn", "fednova"])
def test_statistics_of_batch_norm_keep_their_mean_and_are_not_corrected(name: str) -> None:
    """Variances that were extrapolated would fall below zero."""
    model = FlatModel(BatchNormNet(36, 5))
    hooks = make(name, model)
    hooks.begin(0, model.initial, {})
    update, trainable = torch.linspace(-0.9, 1, model.size), model.trainable
    sums = {"direction": torch.ones(model.size), "steps": 8.0}
    step = hooks.server_step(update.clone(), sums, Totals(POPULATION, 5, 1.0))
    assert trainable < model.size and torch.equal(step[trainable:], update[trainable:])
    assert not torch.allclose(step[:trainable], update[:trainable])
    ends, net = [], BatchNormNet(14 * 14, 5).double()
    for way in ("plain", f"{OWN}:Shift"):
        model, source = FlatModel(deepcopy(net)), InMemorySource(MIDDLE_IMAGES, np.full(9, 6), torch.float64)
        ends.append(next(simulate(SequentialEngine, way, model, source, LocalRule(lr=0.1, epochs=1, batch_size=None))))
    shifted = ends[0] - ends[1]
    assert torch.allclose(shifted[: model.trainable], torch.full_like(shifted[: model.trainable], 0.1))
    assert not shifted[model.trainable :].any()


@pytest.mark.parametrize("number", [2.0**50, -1e300, float("nan"), float("inf"), "many", None, 2.0**49])
def test_numbers_that_overflow_a_sum_are_rejected(number: Any) -> None:
    model, _ = world()
    hooks = make(f"{OWN}:Summing", model)
    hooks.begin(3, model.initial, {name: FloatSum(np.zeros(model.size)) for name in hooks.sums})
    sums = {name: torch.zeros(model.size) for name in hooks.sums}
    with pytest.raises((TypeError, ValueError)):
        for _ in range(2):  # 2**49 goes in once
            hooks.add({**sums, "clients": number})
    assert hooks.totals["clients"] in (0.0, 2.0**49)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "own_algorithms.py:.*failed in round 7, client 1: ZeroDivisionError: no such number"),
        ("short", "vector of .* values, not of shape \\(3,\\)"),
        ("sets the server", "server.c cannot be set here"),
        ("changes the model", "changed the model or a vector of the server in place"),
        ("unknown state", "client.d is not kept: client_state declares c"),
        ("infinite", "client.c is not finite"),
        ("no sum", "finish returned \\[\\], but sums and numbers declare dc"),
        ("infinite sum", "round 7, client 1: ValueError: what finish returns as 'dc' is not finite"),
        ("changes the update", r"round 7, client 1: .*finish changed work.delta in place"),
    ],
)
@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_what_goes_wrong_in_a_hook_names_it(how: str, said: str, engine: type) -> None:
    model, source = world(dtype=torch.float32)
    hooks = make(f"{OWN}:Wrong", model, how=how)
    hooks.begin(7, model.initial.clone(), {"dc": FloatSum(np.zeros(model.size, np.float32))})
    job = RoundJob(hooks._start, RULES["whole"], 7, FloatSum(np.zeros(model.size, np.float32)))
    with pytest.raises(ComponentFailure, match=said):
        made(engine, model, source, hooks=hooks).train([ClientTask(1, None, 1.0)], job)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"client_state": ("index",)}, "'index', which is reserved"),
        ({"server_state": ("model",)}, "'model', which is reserved"),
        ({"client_state": ("a", "a")}, "'a', which is reserved"),
        ({"client_state": ("a b",)}, "'a b', which is reserved or not a valid"),
        ({"sums": ("a",)}, "has no finish"),
        ({"sent": ("a",)}, "sent names 'a'"),
    ],
)
def test_declarations_that_cannot_be_kept_are_rejected(names: dict[str, tuple[str, ...]], said: str) -> None:
    part = resolve("local algorithm", type("Odd", (fedmpi.LocalAlgorithm,), {**names, "__module__": __name__}))
    with pytest.raises(UserError, match=said):
        Hooks(part, part.make({}), flat_model("mlp", MIDDLE_IMAGES, torch.float32, hidden=[4]), STREAMS, 3)


@pytest.mark.parametrize("shrinking", [0.0, 1e-12, 1e-7, 0.5, 1.0, 1.3, 2.0, 3.0])
def test_effective_steps_count_with_the_magnitude_of_their_weights(shrinking: float) -> None:
    """‖a‖₁ where a alternates in sign above 1; with ημ = 2 and an even number of steps the plain sum would be 0."""
    for steps in (1, 2, 3, 6):
        weights = (1 - shrinking) ** np.arange(steps)
        assert effective_steps(steps, shrinking) == pytest.approx(np.abs(weights).sum(), rel=1e-12)
        assert shrinking_sum(steps, shrinking) == pytest.approx(weights.sum(), rel=1e-9, abs=1e-12)
    assert effective_steps(10**5, 3.0) == np.inf and shrinking_sum(10**5, 3.0) == np.inf


@pytest.mark.parametrize("batch", [4, "all"])
def test_an_own_objective_may_write_to_its_samples(batch: int | str) -> None:
    x = np.random.default_rng(5).standard_normal((24, 6)).astype(np.float32)
    kept, losses = x.copy(), []
    data = ClientArrays(x, np.arange(24) % 3, np.repeat(range(4), 6), test=(x[:3], np.arange(3)))
    plan = {"rounds": 2, "clients.count": 4, "local.batch_size": batch, "local.epochs": 2, "model.name": "mlp"}
    for in_place in (True, False):
        own = {"name": own_algorithms.Halving, "in_place": in_place}
        losses.append(fedmpi.run("fedavg", plan | {"local.algorithm": own}, data=data).records[-1]["train_loss"])
    assert losses[0] == losses[1] and np.array_equal(x, kept)


# Choices

UNIFORM = "server.weights=uniform"
WITHOUT_EFFECT = {
    "scaffold feddyn fednova": (
        "topology=mediators privacy.clip_norm=1.0 compression=int8 server.aggregator=median local.proximal_mu=0.1"
    ),
    "scaffold fednova": "local.optimizer=adam attack=sign-flip",
    "fednova": f"server.weights=literal server.weights=q-ffl server.weights={OWN}:Judged",
    "feddyn": (
        "server.weights=samples clients.sampler=weighted clients.sampler=clustered-md server.optimizer=adam "
        "server.optimizer.lr=0.5"
    ),
}
PAIRS = [(name, word) for names, words in WITHOUT_EFFECT.items() for name in names.split() for word in words.split()]
PAIRS.remove(("fednova", "local.proximal_mu=0.1"))


@pytest.mark.parametrize(("preset", "setting"), [*PAIRS, ("fednova", f"server.weights={OWN}:sum_of_models")])
def test_choices_without_effect_are_rejected(preset: str, setting: str) -> None:
    more = [UNIFORM] if "privacy" in setting else []
    with pytest.raises(UserError, match=f'local.algorithm = "{preset}"'):
        load_config(None, [f"preset={preset}", setting, *more])


def test_what_is_no_algorithm_is_rejected() -> None:
    with pytest.raises(UserError, match="no subclass of fedmpi.LocalAlg"):
        load_config(None, ["preset=fedavg", "local.algorithm=tests.local.synthetic:InMemorySource"])


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("scaffold", "nothing is merged: local.algorithm = 'scaffold' has its own correction"),
        ("fednova", "nothing is merged: local.algorithm = 'fednova' has its own finish"),
        (f"{OWN}:DynamicLoss", f"sequential (local.algorithm = '{OWN}:DynamicLoss' has its own objective"),
    ],
)
def test_the_engine_says_why_an_algorithm_is_not_merged_or_batched(algorithm: str, said: str) -> None:
    model, source = world(dtype=torch.float32)
    config = load_config(None, ["clients.sampler=all"])
    engine = SequentialEngine(model, source, STREAMS, hooks=make(algorithm, model))
    assert said in choose_engine(config, engine).description


def test_feddyn_rejects_a_cohort_that_counts_a_client_twice_by_name() -> None:
    def doubling(view: View) -> Cohort:
        return Cohort(np.arange(3), None, np.array([1, 1 + view.round, 1]))

    settings = {"clients.sampler": client_sampler(doubling), "clients.count": 3, "model.hidden": [4]}
    with pytest.raises(UserError, match='"feddyn" counts every participant once.*doubling.* drew client 1 .* round 1'):
        fedmpi.run("feddyn", {**settings, "rounds": 2}, data="digits:clients=5")


@pytest.mark.parametrize(("sampler", "weights", "times"), [("weighted", "samples", 1), ("uniform", "samples", 0)])
def test_sizes_that_draw_and_weigh_are_warned_of_once(
    sampler: str, weights: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"clients.sampler": sampler, "clients.count": 3, "model.hidden": [4], "rounds": 2}
    with caplog.at_level(logging.WARNING, "fedmpi"):
        fedmpi.run({**settings, "server.weights": weights}, data="digits:clients=5")
    assert caplog.text.count("a client counts as n_k² on average") == times
