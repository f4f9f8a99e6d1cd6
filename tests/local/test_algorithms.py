"""Algorithms with state: engines and hooks beside plain loops in float64, to 1e-10."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from fedmpi import ClientArrays, ComponentFailure, UserError, run
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.local.algorithm import Totals
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.hooks import Hooks
from fedmpi.local.schedule import effective_steps, shrinking_sum
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, Job, LocalRule
from fedmpi.models.flat import FlatModel
from tests.local import own_algorithms
from tests.local.stacks import IMAGES, TEXTS, Source, flat_model, ragged_sizes, relative_difference
from tests.local.synthetic import BatchNormNet, made

SIZES = ragged_sizes(9, 23)
POPULATION = 12
STREAMS = Streams(5)
ROUNDS = 3
RULES = {
    "epochs": LocalRule(lr=0.05, epochs=2, batch_size=4),
    "steps": LocalRule(lr=0.05, epochs=None, steps=5, batch_size=3),
    "whole": LocalRule(lr=0.05, epochs=3, batch_size=None),
}
ADAM = LocalRule(optimizer="adam", lr=0.01, epochs=2, batch_size=4, epsilon=1e-3)
MODELS = {"mlp": (IMAGES, {"hidden": [8]}), "text-cnn": (TEXTS, {"filters": 4, "dimension": 6})}


def make(name: str, model: FlatModel, **options: object) -> Hooks:
    part = resolve("local algorithm", name)
    return Hooks(part, part.make(options), model, STREAMS, POPULATION, memory=1e9)


def cohort(round: int) -> list[ClientTask]:
    """Six of the nine clients, of unequal weights; one on half of its rows."""
    chosen = [(k + 4 * round) % len(SIZES) for k in (0, 1, 3, 4, 6, 7)]
    rows = {chosen[1]: np.arange(0, SIZES[chosen[1]], 2)}
    return [ClientTask(k, rows.get(k), 0.05 + 0.02 * k) for k in sorted(chosen)]


def simulate(engine_of: type, name: str, model: FlatModel, source: Source, rule: LocalRule, **options: object):
    """Three rounds; yields the model after each."""
    hooks = make(name, model, **options)
    given = {"hooks": hooks} | ({"chunk": 4} if engine_of is BatchedEngine else {})
    engine = made(engine_of, model, source, STREAMS, **given)
    w = model.initial.clone()
    kind = np.float64 if model.dtype == torch.float64 else np.float32
    rule = LocalRule(**{**vars(rule), "proximal_mu": rule.proximal_mu + hooks.proximal_mu})
    for t in range(ROUNDS):
        total = FloatSum(np.zeros(model.size, kind))
        sums = {key: FloatSum(np.zeros(model.size, kind)) for key in hooks.sums}
        hooks.begin(t, w, sums)
        tasks = cohort(t)
        report = engine.train(tasks, Job(w, rule, t, total))
        for part in (total, *sums.values()):
            part.flush()
        further = {key: part.tensor.clone() for key, part in sums.items()} | hooks.totals
        totals = Totals(POPULATION, report.clients, report.weight, report.weight, t, rule.lr)
        w = w + hooks.server_step(total.tensor / report.weight, further, totals)
        yield w.clone()


class Loop:
    """The same rounds as written in the papers: numpy and autograd, one sample set after another."""

    def __init__(self, name: str, model: FlatModel, source: Source, rule: LocalRule, alpha: float = 0.1):
        self.name, self.model, self.source, self.rule, self.alpha = name, model, source, rule, alpha
        self.kept = {k: np.zeros(model.size) for k in range(len(SIZES))}
        self.server = np.zeros(model.size)
        self.w = model.initial.numpy().copy()

    def gradient(self, w: np.ndarray, x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
        self.model.bind(torch.from_numpy(w.copy()))
        loss = functional.cross_entropy(self.model.module(x), y)
        return np.concatenate([g.numpy().ravel() for g in torch.autograd.grad(loss, self.model.parameters)])

    def batches(self, t: int, k: int, n: int) -> Iterator[list[int]]:
        size = min(self.rule.batch_size or n, n)
        draw = STREAMS.generator(Purpose.BATCH_ORDER, t, k)
        for _ in range(self.rule.epochs or self.rule.steps or 0):
            if size == n:
                yield list(range(n))
            elif self.rule.epochs is None:
                yield draw.choice(n, size, replace=False, shuffle=False).tolist()
            else:
                order = draw.permutation(n).tolist()
                yield from (order[i : i + size] for i in range(0, n, size))

    def round(self, t: int) -> np.ndarray:
        rate, mu, tasks = self.rule.lr, self.rule.proximal_mu, cohort(t)
        weight = sum(task.coefficient for task in tasks)
        mean, direction, effective = 0.0, 0.0, 0.0
        increase, moved = np.zeros_like(self.w), np.zeros_like(self.w)
        for task in tasks:
            k, (x, y) = task.client, self.source.load(task.client, task.rows)
            own, steps = self.w.copy(), 0
            for rows in self.batches(t, k, len(y)):
                gradient = self.gradient(own, x[rows], y[rows]) + mu * (own - self.w)
                if self.name == "scaffold":
                    gradient = gradient - self.kept[k] + self.server
                if self.name == "feddyn":
                    gradient = gradient - self.kept[k] + self.alpha * (own - self.w)
                own, steps = own - rate * gradient, steps + 1
            change, share = own - self.w, task.coefficient / weight
            if self.name == "scaffold":
                new = self.kept[k] - self.server + (self.w - own) / (steps * rate)
                increase, self.kept[k] = increase + new - self.kept[k], new
            if self.name == "feddyn":
                moved, self.kept[k] = moved + share * change * len(tasks), self.kept[k] - self.alpha * change
            length = sum((1 - rate * mu) ** j for j in range(steps))
            mean, direction, effective = (
                mean + share * change,
                direction + share * change / length,
                effective + share * length,
            )
        if self.name == "scaffold":
            self.server = self.server + increase / POPULATION
        if self.name == "feddyn":
            self.server = self.server - self.alpha * moved / POPULATION
            mean = mean - self.server / self.alpha
        self.w = self.w + (effective * direction if self.name == "fednova" else mean)
        return self.w


def check(engine_of: type, name: str, kind: str, rule: LocalRule, reference: str, **options: object) -> None:
    description, given = MODELS[kind]
    model = flat_model(kind, description, torch.float64, **given)
    source = Source(description, SIZES, torch.float64)
    loop = Loop(reference, flat_model(kind, description, torch.float64, **given), source, rule)
    for t, w in enumerate(simulate(engine_of, name, model, source, rule, **options)):
        expected = torch.from_numpy(loop.round(t))
        assert relative_difference(w, expected) < 1e-10, (t, relative_difference(w, expected))
        assert relative_difference(w - model.initial, expected - model.initial) < 1e-9


OWN = "tests.local.own_algorithms"
PULLED = LocalRule(lr=0.05, epochs=3, batch_size=4, proximal_mu=0.9)
OVERSHOT = LocalRule(lr=0.05, epochs=3, batch_size=4, proximal_mu=14.0)
CHECKS = [
    *[(name, "mlp", rule, name) for name in ("scaffold", "feddyn", "fednova") for rule in RULES.values()],
    *[(name, "text-cnn", RULES["epochs"], name) for name in ("scaffold", "feddyn", "fednova")],
    *[(f"{OWN}:Scaffold", "text-cnn", rule, "scaffold") for rule in (PULLED, OVERSHOT)],
    (f"{OWN}:Scaffold", "mlp", RULES["epochs"], "scaffold"),
    ("fednova", "mlp", LocalRule(lr=0.05, epochs=2, batch_size=4, proximal_mu=0.7), "fednova"),
    (f"{OWN}:DynamicLoss", "mlp", RULES["epochs"], "feddyn"),
]


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
@pytest.mark.parametrize(("name", "kind", "rule", "reference"), CHECKS)
def test_an_algorithm_is_what_its_paper_says(
    name: str, kind: str, rule: LocalRule, reference: str, engine: type
) -> None:
    """Vectors of words that no client reads are corrected and pulled, too."""
    if name.endswith("DynamicLoss"):
        engine = SequentialEngine
    check(engine, name, kind, rule, reference)


@pytest.mark.parametrize(("name", "rule"), [("Odd", RULES["steps"]), ("Scaffold", ADAM)])
def test_engines_agree_with_corrections_of_some_clients_and_in_adam(name: str, rule: LocalRule) -> None:
    for kind in MODELS if name == "Odd" else ["mlp"]:
        description, given = MODELS[kind]
        source, ends = Source(description, SIZES, torch.float64), []
        ways = (SequentialEngine, f"{OWN}:{name}"), (BatchedEngine, f"{OWN}:{name}"), (SequentialEngine, "plain")
        for engine, algorithm in ways:
            model = flat_model(kind, description, torch.float64, **given)
            ends.append(list(simulate(engine, algorithm, model, source, rule))[-1])
        assert relative_difference(ends[0], ends[1]) < 1e-10
        assert relative_difference(ends[0], ends[2]) > 1e-4


@pytest.mark.parametrize("name", ["feddyn", "fednova"])
def test_statistics_of_batch_norm_keep_their_mean(name: str) -> None:
    """Variances that were extrapolated would fall below zero."""
    model = FlatModel(BatchNormNet(36, 5))
    hooks = make(name, model)
    hooks.begin(0, model.initial, {})
    update = torch.linspace(-0.9, 1, model.size)
    sums = {"direction": torch.ones(model.size), "steps": 8.0}
    step = hooks.server_step(update.clone(), sums, Totals(POPULATION, 5, 1.0))
    trainable = model.trainable
    assert trainable < model.size
    assert torch.equal(step[trainable:], update[trainable:])
    assert not torch.allclose(step[:trainable], update[:trainable])


def test_an_own_objective_draws_the_same_noise_whatever_was_drawn_before() -> None:
    description, given = MODELS["mlp"]
    source, ends = Source(description, SIZES, torch.float64), []
    with torch.random.fork_rng():
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = flat_model("mlp", description, torch.float64, **given)
            before = torch.get_rng_state()
            simulation = simulate(SequentialEngine, "tests.local.own_algorithms:Noisy", model, source, RULES["epochs"])
            ends.append(list(simulation)[-1])
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*ends)
    model = flat_model("mlp", description, torch.float64, **given)
    plain = list(simulate(SequentialEngine, "plain", model, source, RULES["epochs"]))[-1]
    assert relative_difference(ends[0], plain) > 1e-4


@pytest.mark.parametrize("name", ["mlp", "text-cnn"])
@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_what_a_foreign_correction_does_to_a_vector_is_kept_with_the_round(engine: type, name: str) -> None:
    description, given = MODELS[name]
    model = flat_model(name, description, torch.float32, **given)
    hooks = make("tests.local.own_algorithms:Counting", model)
    trained = made(engine, model, Source(description, SIZES), STREAMS, hooks=hooks)
    for t in range(3):
        hooks.begin(t, model.initial, {})
        trained.train(cohort(0), Job(model.initial, RULES["steps"], t, FloatSum(np.zeros(model.size, np.float32))))
        assert {float(hooks.state.read(task.client)["rounds"].unique()) for task in cohort(0)} == {t + 1.0}
    remembered = [[float(vector.unique()) for vector in seen] for seen in hooks.algorithm.seen.values()]
    assert remembered == [[1.0, 2.0, 3.0]] * 6  # later rounds leave them alone


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_observers_may_change_an_update_and_hooks_overwrite_theirs(engine: type) -> None:
    description, given = MODELS["mlp"]
    model = flat_model("mlp", description, torch.float64, **given)
    source, found = Source(description, SIZES, torch.float64), []

    def halve(client: int, update: torch.Tensor) -> torch.Tensor:
        return update.mul_(0.5)

    for name, observe in (("Summing", halve), ("Norms", halve), ("Norms", None)):
        hooks = make(f"tests.local.own_algorithms:{name}", model)
        total = FloatSum(np.zeros(model.size))
        hooks.begin(0, model.initial, {key: FloatSum(np.zeros(model.size)) for key in hooks.sums})
        made(engine, model, source, STREAMS, observe=observe, hooks=hooks).train(
            cohort(0), Job(model.initial, RULES["whole"], 0, total)
        )
        found.append((total.tensor.clone(), hooks.totals))
    assert torch.equal(found[0][0], found[1][0])
    assert relative_difference(found[2][0], 2 * found[1][0]) < 1e-12
    assert found[1][1] == found[2][1]


@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_every_hook_draws_from_a_stream_of_the_client_or_of_the_round(engine: type) -> None:
    description, given = MODELS["mlp"]
    model, rule = flat_model("mlp", description, torch.float64, **given), LocalRule(lr=0.05, epochs=1, batch_size=None)
    source = Source(description, SIZES, torch.float64)
    hooks = make(f"{OWN}:Drawing", model)
    changes = {}
    for name in ("plain", "drawn"):
        total = FloatSum(np.zeros(model.size))
        hooks.begin(2, model.initial, {})
        own = {"hooks": hooks} if name == "drawn" else {}
        made(engine, model, source, STREAMS, **own).train(cohort(2), Job(model.initial, rule, 2, total))
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
    model = flat_model("mlp", IMAGES, torch.float32, hidden=[4])
    hooks = make("tests.local.own_algorithms:Aliases", model)
    for t in range(3):
        hooks.begin(t, model.initial, {})
        update = torch.full_like(model.initial, float(t))
        found = hooks.server_step(update, {}, Totals(POPULATION, 1, 1.0, 1.0, t))
        assert torch.equal(found, update)
    assert float(hooks.server["first"][0]) == 2.0 and not hooks.server["second"].any()
    assert torch.equal(hooks.server_step(update, {}, Totals(POPULATION, 0, 0.0, 1.0, 3)), update)  # none selected
    assert float(hooks.server["first"][0]) == 2.0


def test_corrections_leave_running_statistics_alone() -> None:
    ends, net = [], BatchNormNet(14 * 14, 5).double()
    for name in ("plain", "tests.local.own_algorithms:Shift"):
        model = FlatModel(deepcopy(net))
        source = Source(IMAGES, np.full(9, 6), torch.float64)
        ends.append(next(simulate(SequentialEngine, name, model, source, LocalRule(lr=0.1, epochs=1, batch_size=None))))
    assert model.size > model.trainable
    shifted = ends[0] - ends[1]
    assert torch.allclose(shifted[: model.trainable], torch.full_like(shifted[: model.trainable], 0.1))
    assert not shifted[model.trainable :].any()


@pytest.mark.parametrize("number", [2.0**50, -1e300, float("nan"), float("inf"), "many", None, 2.0**49])
def test_numbers_that_overflow_a_sum_are_rejected_with_client_and_round(number: Any) -> None:
    description, given = MODELS["mlp"]
    model = flat_model("mlp", description, torch.float32, **given)
    hooks = make("tests.local.own_algorithms:Summing", model)
    hooks.begin(3, model.initial, {name: FloatSum(np.zeros(model.size, np.float32)) for name in hooks.sums})
    sums = {name: torch.zeros(model.size) for name in hooks.sums}
    with pytest.raises(
        ComponentFailure, match="in round 3, client 8: finish returned .* as 'clients': return a finite number"
    ):
        for _ in range(2):  # 2**49 goes in once
            hooks.add(8, {**sums, "clients": number})
    assert hooks.totals["clients"] in (0.0, 2.0**49)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "own_algorithms.py:.*failed in round 7, client 1: ZeroDivisionError: no such number"),
        ("short", "vector of .* values, not of shape \\(3,\\)"),
        ("list", "not list"),
        ("sets the server", "server.c cannot be set here"),
        ("changes the server", "changed the model or a vector of the server in place"),
        ("changes the model", "changed the model or a vector of the server in place"),
        ("unknown state", "client.d is not kept: client_state declares c"),
        ("infinite", "client.c is not finite"),
        ("short state", "client.c must be a vector"),
        ("no sum", "finish returned \\[\\], but sums and numbers declare dc"),
        ("infinite sum", "round 7, client 1: what finish returns as 'dc' is not finite"),
        ("another sum", "finish returned \\['dd'\\], but sums and numbers declare dc"),
    ],
)
@pytest.mark.parametrize("engine", [SequentialEngine, BatchedEngine])
def test_what_goes_wrong_in_a_hook_names_it(how: str, said: str, engine: type) -> None:
    description, given = MODELS["mlp"]
    model = flat_model("mlp", description, torch.float32, **given)
    hooks = make("tests.local.own_algorithms:Wrong", model, how=how)
    hooks.begin(7, model.initial.clone(), {"dc": FloatSum(np.zeros(model.size, np.float32))})
    total = FloatSum(np.zeros(model.size, np.float32))
    with pytest.raises(ComponentFailure, match=said):
        made(engine, model, Source(description, SIZES), STREAMS, hooks=hooks).train(
            [ClientTask(1, None, 1.0)], Job(hooks._start, RULES["whole"], 7, total)
        )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"client_state": ("index",)}, "'index', which is taken"),
        ({"server_state": ("model",)}, "'model', which is taken"),
        ({"client_state": ("a", "a")}, "'a', which is taken"),
        ({"client_state": ("a b",)}, "no name of an attribute"),
        ({"sums": ("a",)}, "which its finish"),
        ({"sent": ("a",)}, "sent names 'a'"),
    ],
)
def test_declarations_that_cannot_be_kept_are_rejected(names: dict[str, tuple[str, ...]], said: str) -> None:
    from fedmpi import LocalAlgorithm

    part = resolve("local algorithm", type("Odd", (LocalAlgorithm,), {**names, "__module__": __name__}))
    with pytest.raises(UserError, match=said):
        Hooks(part, part.make({}), flat_model("mlp", IMAGES, torch.float32, hidden=[4]), STREAMS, 3)


def test_numbers_are_summed_alike_in_any_order_where_sums_are_exact() -> None:
    model = flat_model("mlp", IMAGES, torch.float32, hidden=[4])
    part = resolve("local algorithm", "fednova")
    hooks = Hooks(part, part.make({}), model, STREAMS, 3, exact=True)
    terms = np.random.default_rng(1).random(50) / 7
    assert sum(terms.tolist()) != sum(terms[::-1].tolist())
    found = set()
    for order in (range(50), reversed(range(50))):
        hooks.begin(0, model.initial, {"direction": FloatSum(np.zeros(model.size, np.float32))})
        for i in order:
            hooks.add(0, {"direction": 0.0, "steps": terms[i]})
        found.add(hooks.totals["steps"])
    assert len(found) == 1 and abs(found.pop() - terms.sum()) < 1e-10


def test_effective_steps_are_a_geometric_sum() -> None:
    assert effective_steps(5, 0.0) == 5
    assert effective_steps(3, 0.5) == pytest.approx(1 + 0.5 + 0.25)
    assert effective_steps(3, 1.0) == 1 and shrinking_sum(3, 2.0) == pytest.approx(1)
    for tiny in (1e-300, 1e-17, 1e-12, 1e-7):
        assert effective_steps(1000, tiny) == pytest.approx(1000 - 999 * 500 * tiny, rel=1e6 * tiny**2 + 1e-14)


@pytest.mark.parametrize("shrinking", [1.3, 1.5, 1.9, 2.0, 2.4, 3.0])
def test_steps_that_overshoot_count_with_the_magnitude_of_their_weights(shrinking: float) -> None:
    """‖a‖₁ where a alternates in sign; with ημ = 2 and an even number of steps the plain sum would be 0."""
    for steps in (1, 2, 3, 6):
        weights = np.abs((1 - shrinking) ** np.arange(steps))
        assert effective_steps(steps, shrinking) == pytest.approx(weights.sum(), rel=1e-12)
    assert effective_steps(10**5, 3.0) == np.inf and shrinking_sum(10**5, 3.0) == np.inf


@pytest.mark.parametrize("batch", [4, "all"])
def test_an_own_objective_may_write_to_its_samples(batch: int | str) -> None:
    x = np.random.default_rng(5).standard_normal((24, 6)).astype(np.float32)
    kept, y = x.copy(), np.arange(24) % 3
    data = ClientArrays(x, y, np.repeat(range(4), 6), test=(x[:3], y[:3]))
    plan = {"rounds": 2, "clients.count": 4, "local.batch_size": batch, "local.epochs": 2, "model.name": "mlp"}
    written, left = (
        run(
            "fedavg",
            plan | {"local.algorithm": own_algorithms.Halving, "local.algorithm.in_place": in_place},
            data=data,
        )
        for in_place in (True, False)
    )
    assert written.records[-1]["train_loss"] == left.records[-1]["train_loss"] and np.array_equal(x, kept)
