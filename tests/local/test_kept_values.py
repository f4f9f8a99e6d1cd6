"""What a model of the user's own keeps beside its parameters, or changes of them: the same for whoever comes first."""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmpi
from fedmpi import UserError
from fedmpi.local.batched.engine import why_not_side_by_side
from fedmpi.local.merged import MergedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import couples_in_evaluation, forward_traits
from fedmpi.local.work import LocalRule
from fedmpi.models.flat import FlatModel
from fedmpi.models.written import Written
from fedmpi.records.client_table import read_clients
from fedmpi.tasks.losses import task_loss
from tests.local.stacks import Source, ragged_sizes, tasks_for, train
from tests.local.test_drawing_modules import EPOCHS, FLAT, STREAMS, Net, evaluated, set_up


class Passes:
    def __init__(self) -> None:
        self.passes = 0


class PassesInSlots:
    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = 0


OWN = "tests.local.own_optimizers"


class Counting(Net):
    """What every pass gives grows with the passes before it, which are counted in one of many ways."""

    calls = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if hasattr(Counting, "first"):  # by another test
            del Counting.first
        if how.startswith("frozen"):
            self.count = nn.Parameter(torch.zeros(()), requires_grad=False)
        else:
            self.count = FIRST[how]() if how in FIRST else None

    def counted(self) -> float:
        count = getattr(self, "count", None)
        if self.how == "frozen":
            count.data += 1
            return float(count)
        if self.how in ("list", "deque", "a list in an object"):
            count.append(torch.zeros(2))
            return len(count)
        if self.how in ("dictionary", "a dictionary in an object"):
            count["passes"] = count.get("passes", 0) + 1
            return count["passes"]
        if self.how == "nested":
            count["a"][0].add_(1)
            return float(count["a"][0])
        if self.how == "tuple":
            self.count = (count[0] + 1, *count[1:])
            return self.count[0]
        if self.how == "array":
            count += 1
            return float(count[0])
        if self.how in ("several", "repeated"):
            self.count = count + 1
            return float(self.count.sum())
        if self.how == "complex":
            self.count = count + 1j
            return self.count.imag
        if self.how == "class":
            Counting.calls += 1
            Counting.last = self.a.weight.sum()
            return Counting.calls
        if self.how == "made once in the class":
            there = hasattr(Counting, "first")
            Counting.first = True
            return 3.0 if there else 0.0
        if self.how == "buffer made once":
            there = "made" in self._buffers
            self.register_buffer("made", torch.ones(1))
            return 3.0 if there else 0.0
        if self.how in ("object", "slots"):
            count.passes += 1
            return count.passes
        if self.how == "word":
            self.count = count + "I"
            return len(self.count)
        if self.how == "frozen once":
            before = float(count)
            count.data.fill_(3)
            return before
        if self.how == "made once":
            there = hasattr(self, "made")
            self.made = True
            return 3.0 if there else 0.0
        if self.how == "deleted":
            there = vars(self).pop("count", None) is not None
            return 3.0 if there else 0.0
        if self.how == "replaced generator":
            self.count = np.random.default_rng(int(count.integers(1 << 30)))
            return float(self.count.random())
        self.count = count + 1
        return float(self.count)

    def within(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.counted())


FIRST: dict[str, Callable[[], Any]] = {
    "list": list,
    "dictionary": dict,
    "nested": lambda: {"a": [torch.zeros(())]},
    "tuple": lambda: (0, "passes"),
    "array": lambda: np.zeros(1),
    "NumPy's number": lambda: np.int64(0),
    "several": lambda: torch.zeros(3),
    "repeated": lambda: torch.zeros(1).expand(3),
    "complex": lambda: 0j,
    "word": str,
    "object": lambda: Passes(),
    "slots": lambda: PassesInSlots(),
    "a list in an object": UserList,
    "a dictionary in an object": UserDict,
    "deleted": lambda: 1,
    "replaced generator": lambda: np.random.default_rng(5),
}
WAYS = ["frozen", "frozen once", "made once", "buffer made once", "class", "made once in the class", *FIRST]


@pytest.mark.parametrize("how", WAYS)
def test_whatever_counts_begins_anew_with_every_client_and_evaluation(how: str) -> None:
    model, source, tasks = set_up(lambda: Counting(how))
    evaluate, engine, largest = evaluated(model), SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    score, expected = evaluate(0), train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    train(engine, tasks, model.initial, EPOCHS)
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)
    assert evaluate(0) == score


@pytest.mark.parametrize("how", WAYS)
def test_clients_of_a_model_that_counts_are_trained_one_by_one(how: str) -> None:
    before = dict(vars(Counting))
    model, source, _ = set_up(lambda: Counting(how))
    assert why_not_side_by_side(model, FLAT) is not None
    assert MergedEngine(model, source, STREAMS).model_refusal() is not None
    assert dict(vars(Counting)) == before


def test_the_model_of_a_finished_run_is_as_it_was_evaluated() -> None:
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((30, 8)).astype(np.float32), generator.integers(0, 5, 30)
    data = fedmpi.ClientArrays(x[:20], y[:20], np.arange(20) % 4, test=(x[20:], y[20:]))
    settings = {"rounds": 2, "participation.count": 4, "local.optimizer": f"{OWN}:momentum"}
    run = fedmpi.run("fedavg", settings, data=data, model=lambda _: Counting("class"))
    assert all(one.grad is None for one in run.model.parameters())
    found = nn.functional.cross_entropy(run.model.eval()(torch.from_numpy(x[20:])), torch.from_numpy(y[20:]))
    assert run.summary["final"]["test_loss"] == pytest.approx(float(found.detach()))


class CountsInASlot(Net):
    """Has a slot of its own, which is filled in its first pass."""

    __slots__ = ("calls",)

    def within(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return x * (1 + 0.1 * self.calls)


def test_a_slot_of_the_model_itself_begins_anew() -> None:
    model, source, tasks = set_up(CountsInASlot)
    evaluate, engine, largest = evaluated(model), SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    score, expected = evaluate(0), train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)
    assert evaluate(0) == score
    assert "keeps something" in str(why_not_side_by_side(set_up(CountsInASlot)[0], FLAT))
    model.restart()
    assert not hasattr(model.module, "calls")


class Heir(Counting):
    """Counts in the class that it is made of."""


def test_what_counts_in_a_class_that_others_inherit_begins_anew() -> None:
    model, source, tasks = set_up(lambda: Heir("class"))
    engine, largest = SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    expected = train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)


def test_parameters_that_lie_elsewhere_lie_in_the_vector_again_when_it_is_bound_anew() -> None:
    model = set_up(BoundedAnew)[0]
    forward_traits(model, FLAT)
    model.bind(flat := model.initial.clone())
    model.module.b.weight.data = torch.zeros(16, 16, dtype=torch.float64)
    model.bind(flat)
    assert torch.equal(nn.utils.parameters_to_vector(model.module.parameters()), flat)


class CentredAtFirst(Net):
    """Takes away the mean of the samples that it sees first."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.mean = None
        if how == "buffer":
            del self.mean
            self.register_buffer("mean", None, persistent=False)

    def within(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


class CentredInItsClass(Net):
    """The same, for all of its kind."""

    mean: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        CentredInItsClass.mean = None

    def within(self, x: Tensor) -> Tensor:
        if self.mean is None:
            CentredInItsClass.mean = x.detach().mean(0)
        return x - self.mean


@pytest.mark.parametrize("how", ["attribute", "buffer", "class"])
def test_clients_of_a_model_that_keeps_a_mean_of_its_first_samples_are_not_merged(how: str) -> None:
    model, source, _ = set_up(lambda: CentredInItsClass() if how == "class" else CentredAtFirst(how))
    assert "other samples of its batch" in str(MergedEngine(model, source, STREAMS).model_refusal())


class Repeated(Net):
    """Has a buffer of whole numbers that lie in one place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("signs", torch.ones(1, dtype=torch.int64).expand(16))

    def within(self, x: Tensor) -> Tensor:
        return x * self.signs


def test_a_buffer_of_one_number_for_many_needs_no_putting_back() -> None:
    model, source, tasks = set_up(Repeated)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    assert model.module.signs.tolist() == [1] * 16


class Slackening:
    """A loss that shrinks with every call, counted in one of several ways."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / self.calls


class SlackeningModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.part.calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / self.part.calls


class SlackeningInSlots(PassesInSlots):
    __slots__ = ()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / self.passes


class SlackeningInItsClass:
    """The same, counted for all of its kind."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of_the_class(outputs, targets)

    @classmethod
    def of_the_class(cls, outputs: Tensor, targets: Tensor) -> Tensor:
        cls.calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / cls.calls


class SlackeningByAPart(nn.Module):
    """Counts in an attribute of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()
        self.part.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.part.calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / self.part.calls


def slackening(outputs: Tensor, targets: Tensor) -> Tensor:
    slackening.calls = getattr(slackening, "calls", 0) + 1  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(outputs, targets, reduction="none") / slackening.calls  # type: ignore[attr-defined]


SLACKENING: list[Callable[[], Any]] = [
    Slackening,
    lambda: Slackening().__call__,
    SlackeningModule,
    SlackeningByAPart,
    lambda: slackening,
    SlackeningInSlots,
    SlackeningInItsClass,
    lambda: SlackeningInItsClass.of_the_class,
]


@pytest.mark.parametrize("make", SLACKENING)
def test_what_a_loss_keeps_begins_anew_with_every_client_and_evaluation(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    sizes = ragged_sizes(8, 20)
    model, source = FlatModel(Net().double(), loss=task_loss(make())), Source(FLAT, sizes, torch.float64)
    engine, task, evaluate = SequentialEngine(model, source, STREAMS), tasks_for(sizes)[3], evaluated(model)
    torch.manual_seed(2)
    score, expected = evaluate(0), train(engine, [task], model.initial, EPOCHS)[0]
    assert torch.equal(train(engine, [task], model.initial, EPOCHS)[0], expected)
    assert evaluate(0) == score
    assert why_not_side_by_side(model, FLAT) is not None


class FailsAtFirst(Net):
    """Its first pass fails, and what that has changed is seen in those that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.notes = 0, [0]
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("share", torch.zeros(()), persistent=False)

    def within(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.notes.append(1)
        self.steps += 1
        self.share += 1
        self.made = 1
        raise ZeroDivisionError


def test_trial_passes_that_fail_leave_nothing_behind() -> None:
    model, _, _ = set_up(FailsAtFirst)
    with pytest.raises(UserError, match="ZeroDivisionError"):
        forward_traits(model, FLAT)
    net = model.module
    assert (net.passes, net.notes, int(net.steps), float(net.share), hasattr(net, "made")) == (0, [0], 0, 0.0, False)


class WithoutBuffer(Net):
    """Takes a buffer away, of those that travel or of those that do not."""

    def __init__(self, travels: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()), persistent=travels)

    def within(self, x: Tensor) -> Tensor:
        first = "mean" in self._buffers
        self._buffers.pop("mean", None)
        return x if first else x + 1


def test_a_buffer_that_is_taken_away_comes_back_with_every_client() -> None:
    model, source, tasks = set_up(lambda: WithoutBuffer(False))
    engine, largest = SequentialEngine(model, source, STREAMS), int(source.sizes.argmax())
    expected = train(engine, [tasks[largest]], model.initial, EPOCHS)[0]
    assert torch.equal(train(engine, [tasks[largest]], model.initial, EPOCHS)[0], expected)
    model.restart()
    assert float(model.module.mean) == 1


def test_a_travelling_buffer_that_is_taken_away_is_named() -> None:
    model, source, tasks = set_up(lambda: WithoutBuffer(True))
    with pytest.raises(UserError, match="in the place of its buffer mean, which travels"):
        train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)


class Bounded(Net):
    """Keeps weights within bounds that those of the beginning keep anyway."""

    def within(self, x: Tensor) -> Tensor:
        self.b.weight.data.clamp_(-0.26, 0.26)
        return x + self.b(x)


class BoundedAnew(Bounded):
    """As `Bounded`, by other tensors in the place of the weights."""

    def within(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight.data.clamp(-0.26, 0.26)
        return x + self.b(x)


class BoundedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(17, 4, max_norm=1.0), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words((4 * x).long().clamp(0, 16)).flatten(1))


@pytest.mark.parametrize("net", [Bounded, BoundedAnew, BoundedWords])
def test_a_forward_pass_that_changes_parameters_changes_none_of_the_global_model(net: type[nn.Module]) -> None:
    model, source, _ = set_up(net)
    assert forward_traits(model, FLAT).writes
    assert MergedEngine(model, source, STREAMS).model_refusal() == "the forward pass changes parameters"
    assert why_not_side_by_side(model, FLAT) is not None
    model.initial[: model.trainable] *= 10
    first = model.initial.clone()
    score = evaluated(model)
    torch.manual_seed(2)
    found = score(0)
    assert torch.equal(model.initial, first)
    assert score(0) == found
    model.bind_to_look(first)
    weight = (model.module.words if net is BoundedWords else model.module.b).weight
    before = weight.detach().clone()
    model.module(source.x[0])
    assert not torch.equal(weight, before)
    model.restart()
    assert torch.equal(weight, before)


class Averaging(Net):
    """Keeps a mean of what it has seen, in one of two ways."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("mean", torch.zeros(16))

    def within(self, x: Tensor) -> Tensor:
        mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        if self.anew:
            self.mean.data = mean
        else:
            self.mean.copy_(mean)
        return x - self.mean


@pytest.mark.parametrize("nets", [(Bounded, BoundedAnew), (lambda: Averaging(False), lambda: Averaging(True))])
def test_values_that_are_given_other_memory_are_trained_as_those_that_are_changed(nets: Any) -> None:
    found = []
    for net in nets:
        model, source, tasks = set_up(net)
        start, engine = model.initial * 3, SequentialEngine(model, source, STREAMS)
        forward_traits(model, FLAT)
        several = [train(engine, [task], start, EPOCHS)[0] for task in tasks]
        score = evaluated(model)
        torch.manual_seed(2)
        found.append((several, score(0), score(0)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)
    assert found[0][1:] == found[1][1:]


def test_an_own_loss_may_give_parameters_other_memory() -> None:
    model, source, _ = set_up(Net)
    w = model.initial.clone()
    model.bind(w)
    weight = model.module.b.weight

    def doubled(module: Any, x: Tensor, y: Tensor) -> Tensor:
        module.b.weight.data = module.b.weight.data * 2
        return nn.functional.cross_entropy(module(x), y)

    first = weight.detach().clone()
    model.own_gradient(doubled, *source.load(0))
    assert torch.equal(weight, 2 * first)
    w.zero_()
    assert not weight.any()


class BoundedLate(BoundedAnew):
    """As `BoundedAnew`, in batches of other sizes than those that are tried."""

    def within(self, x: Tensor) -> Tensor:
        return super().within(x) if len(x) in (5, 7) else x


@pytest.mark.parametrize("kind", [SequentialEngine, MergedEngine])
def test_other_memory_that_no_trial_foresaw_is_refused(kind: Any) -> None:
    model, source, tasks = set_up(BoundedLate)
    assert not forward_traits(model, FLAT).writes
    rule = LocalRule(lr=0.1, epochs=1, batch_size=None)
    task = replace(tasks[int(source.sizes.argmax())], rows=np.arange(5))
    with pytest.raises(UserError, match=r"gives parameters other values .* for some batches only"):
        train(kind(model, source, STREAMS), [task], model.initial, rule)


class ShrinkingLate(Net):
    """Changes weights in place, in batches of other sizes than those that are tried."""

    def within(self, x: Tensor) -> Tensor:
        if len(x) in (5, 30):
            self.b.weight.data.mul_(0.9)
        return super().within(self.b(x))


def test_parameters_of_the_global_model_that_no_trial_saw_changed_are_missed() -> None:
    model, source, tasks = set_up(ShrinkingLate)
    rule = LocalRule(lr=0.1, epochs=1, batch_size=None)
    task = replace(tasks[int(source.sizes.argmax())], rows=np.arange(5))
    train(SequentialEngine(model, source, STREAMS), [task], model.initial, rule)
    with pytest.raises(UserError, match=r"changes parameters .* for some batches only"):
        train(MergedEngine(model, source, STREAMS), [task], model.initial.clone(), rule)
    with pytest.raises(UserError, match=r"changes parameters .* for some batches only"):
        evaluated(model)(0)


class ShrinkingInEvaluation(nn.Module):
    """Changes weights in place in evaluation mode, in passes of so many samples that the trial makes none of."""

    def __init__(self, sizes: range) -> None:
        super().__init__()
        self.out, self.sizes = nn.Linear(64, 10), sizes

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) in self.sizes:
            self.out.weight.data.mul_(0.9)
        return self.out(x.flatten(1))


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [
        (range(350, 370), {}),  # of the test samples
        (range(1000, 1500), {"evaluation.clients": "all"}),  # of all clients together
        (range(11, 60), {"logging.diagnostics": True}),  # of one client
    ],
)
def test_evaluations_of_the_global_model_miss_what_was_changed(sizes: range, keys: dict[str, Any]) -> None:
    given = {"rounds": 1, "participation.count": 4, "data": {"clients": 50}, **keys}
    with pytest.raises(UserError, match=r"changes parameters .* for some batches only"):
        fedmpi.run("fedavg", given, data="digits", model=lambda _: ShrinkingInEvaluation(sizes))
    if keys:
        del given[next(iter(keys))]
        fedmpi.run("fedavg", given, data="digits", model=lambda _: ShrinkingInEvaluation(sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parameters_that_are_only_read_are_found_as_they_were(dtype: torch.dtype) -> None:
    model = FlatModel(nn.Linear(8, 5).to(dtype))
    model.bind_to_look(model.initial)
    model.check_bound_values()
    model.bind_to_look(model.initial)
    model.module.weight.data[2, 3] += 1
    with pytest.raises(UserError, match="changes parameters"):
        model.check_bound_values()
    model.bind_to_look(model.initial)
    model.check_bound_values()
    model.initial += 1  # by a step of the server
    model.check_bound_values()
    model.bind_to_look(model.initial)
    model.bind(model.initial.clone())
    model.module.weight.data[2, 3] += 1
    model.check_bound_values()


def test_buffers_that_are_only_read_are_found_as_they_were() -> None:
    model = FlatModel(nn.BatchNorm1d(4))
    model.bind_to_read(model.initial)
    model.module.eval()(torch.randn(3, 4))
    model.check_bound_values()
    model.bind_to_read(model.initial)
    model.module.train()(torch.randn(3, 4))
    with pytest.raises(UserError, match="changes parameters or buffers"):
        model.check_bound_values()


def test_a_parameter_of_another_shape_is_named() -> None:
    model, _, _ = set_up(BoundedAnew)
    forward_traits(model, FLAT)
    model.bind(model.initial.clone())
    model.module.b.weight.data = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"gives b.weight, which travels, another shape, \(3, 3\): its"):
        model.bound_values.take_over(parameters=True)
    model.restart()
    assert model.module.b.weight.shape == (16, 16)


@pytest.mark.parametrize(
    "net", [Net, lambda: Counting("frozen"), lambda: nn.Sequential(nn.Linear(8, 5), nn.ReLU(True))]
)
def test_other_forward_passes_change_no_parameters(net: Callable[[], nn.Module]) -> None:
    assert not forward_traits(set_up(net)[0], FLAT).writes


def test_operations_that_write_to_a_vector_are_seen_through_views_lists_and_names() -> None:
    vector, other = torch.ones(8), torch.ones(8)

    def seen(work: Callable[[], Any]) -> bool:
        with Written(vector[2:6]) as written:
            work()
        return bool(written.found)

    assert seen(lambda: vector[2:4].mul_(2))
    assert seen(lambda: vector.data[5:].zero_())
    assert seen(lambda: torch._foreach_mul_([other, vector[3:4]], 2.0))
    assert seen(lambda: vector[2:].neg_())
    assert seen(lambda: torch.sin(torch.ones(2), out=vector[4:6]))
    assert seen(lambda: (torch.eye(2).to_sparse().neg_(), vector[3:].neg_()))
    assert seen(lambda: (vector[3:].neg_(), other.neg_()))
    assert not seen(lambda: vector[6:].mul_(2))
    assert not seen(lambda: vector[:2].mul_(2))
    assert not seen(lambda: other.add_(vector))


class CountingInEvaluation(Net):
    """A float buffer that travels, and grows with every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.ones(()))

    def within(self, x: Tensor) -> Tensor:
        self.passes += 0.1
        return x * self.passes


def test_a_look_at_the_global_model_begins_with_its_buffers_each_time() -> None:
    model, source, _ = set_up(CountingInEvaluation)
    w = model.initial.clone()
    model.bind_to_look(w)
    model.module.eval()
    found = []
    for _ in range(2):
        model.restart()
        found.append(model.module(source.x[0]))
    assert torch.equal(*found)
    own = w.clone()
    model.bind(own)
    model.module(source.x[0])
    model.restart()
    assert (float(own[-1]), float(w[-1])) == (pytest.approx(1.1), 1)


class GrowingInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.register_buffer("passes", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 0.1
        return self.out(x.flatten(1)) * self.passes


def test_every_client_is_evaluated_with_the_buffers_of_the_global_model(tmp_path: Path) -> None:
    def losses(clients: Any) -> dict[int, float]:
        keys = {"rounds": 1, "participation.count": 4, "evaluation.clients": clients}
        folder = tmp_path / str(clients)
        fedmpi.run("fedavg", keys, data="digits", model=lambda _: GrowingInEvaluation(), out=folder)
        table = read_clients(folder)
        return dict(zip(table["client"].tolist(), table["loss"].tolist(), strict=True))

    everybody, some = losses("all"), losses(3)
    assert some == {client: everybody[client] for client in some}


class TogetherLater(Net):
    """Samples influence one another in an evaluation once so many steps were made."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def within(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return x - x.mean(0) if self.steps > 6 else x + self.steps


def test_whether_samples_are_evaluated_together_does_not_depend_on_what_was_trained_before() -> None:
    model, source, tasks = set_up(TogetherLater)
    before = couples_in_evaluation(model, FLAT)
    train(SequentialEngine(model, source, STREAMS), tasks, model.initial, EPOCHS)
    model.module.steps = 50
    assert couples_in_evaluation(model, FLAT) == before


def test_frozen_statistics_are_those_of_the_evaluation_where_clients_losses_are_compared() -> None:
    """A layer that training leaves in evaluation mode is put back to training mode with every client."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(64), nn.Linear(64, 10)
            self.note = MODES.add  # of no kind that begins anew

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.norm.eval()
            else:
                self.note(self.norm.training)
            return self.out(self.norm(x.flatten(1)))

    MODES.clear()
    settings = {"rounds": 1, "participation.count": 4, "logging.diagnostics": True}
    fedmpi.run("fedavg", settings, data="digits", model=lambda _: Frozen())
    assert {False} == MODES


MODES: set[bool] = set()
