"""Modules that keep, count, draw, write or replace something: bit-identical in any order of clients, on any number of
ranks and after a resume, and the update that a plain loop makes with a fresh module.

As a program, `mpiexec -n 3 python -m tests.local.test_isolation FOLDER`, it trains some of them on the job's ranks, in
two parts each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, utils

import fedmpi
from fedmpi import ClientArrays, UserError
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose
from fedmpi.data.schema import DataDescription
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.traits import forward_traits
from fedmpi.local.work import ClientTask, LocalRule, RoundJob, schedule
from fedmpi.models.flat import FlatModel
from fedmpi.models.isolation import check_memory, is_plain
from fedmpi.tasks.losses import Loss
from tests.local.synthetic import STREAMS, InMemorySource

FLAT = DataDescription((6,), "float32", 3, "vector", 0, (), ())
SIZES = [9, 4, 7, 12, 3, 6]
RULE = LocalRule(lr=0.1, epochs=2, batch_size=4, drop_last=True)


class Own(nn.Module):
    """Two dense layers; `between` is what a module does beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.made()

    def made(self) -> None:
        """Further parts and attributes."""

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)).tanh())


class Counter(Own):
    calls = 0

    def made(self) -> None:
        self.seen: list[float] = []
        self.notes = SimpleNamespace(by_name={"largest": 0.0})

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(float(x.detach().mean()))
        self.notes.by_name["largest"] = max(self.notes.by_name["largest"], float(x.detach().max()))
        return x / self.calls + sum(self.seen) / len(self.seen) - self.notes.by_name["largest"]


class RunningMean(Own):
    def made(self) -> None:
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(0))

    def between(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.count += 1
        return (x - self.mean) / (1 + self.count)


class BatchNormDropout(Own):
    def made(self) -> None:
        self.norm, self.drop = nn.BatchNorm1d(6, momentum=None), nn.Dropout(0.5)

    def between(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


class OwnGenerators(Own):
    def made(self) -> None:
        self.torchs, self.numpys = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.pythons, self.old = random.Random(1), np.random.RandomState(1)

    def between(self, x: Tensor) -> Tensor:
        noise = self.numpys.normal() + self.pythons.random() + self.old.rand()
        return x + 0.1 * torch.randn(6, generator=self.torchs) + 0.1 * noise


class GlobalGenerators(Own):
    def between(self, x: Tensor) -> Tensor:
        x = functional.alpha_dropout(functional.dropout(x, 0.3, self.training), 0.2, self.training)
        return x + 0.1 * (torch.rand(6) + random.random() + np.random.rand())  # noqa: NPY002


class Parametrized(Own):
    def made(self) -> None:
        utils.parametrizations.spectral_norm(self.a)
        utils.parametrizations.weight_norm(self.b)


class OldNorms(Own):
    def made(self) -> None:
        utils.spectral_norm(self.a)
        utils.weight_norm(self.b)  # type: ignore[no-untyped-call]


class Hooks(Own):
    def made(self) -> None:
        self.calls = 0
        self.a.register_forward_hook(self.count)
        self.a.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def count(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        self.calls += 1
        return output / self.calls


class TiedAndFrozen(Own):
    def made(self) -> None:
        self.c, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.c.weight = self.a.weight

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.a.weight, 0.5)
        return self.c(x) + self.teacher(x)


class Uncopyable(Counter):
    def made(self) -> None:
        super().made()
        self.file = open(__file__)  # noqa: SIM115


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    one.__name__: one
    for one in (
        Counter, RunningMean, BatchNormDropout, OwnGenerators, GlobalGenerators, Parametrized, OldNorms,
        Hooks, TiedAndFrozen, Uncopyable,
    )
}  # fmt: skip
DRAWING = {"BatchNormDropout", "OwnGenerators", "GlobalGenerators"}
ON_RANKS = ("Counter", "RunningMean", "GlobalGenerators", "TiedAndFrozen")


def built(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return AWKWARD[name]()

    return build


def updates(model: FlatModel, order: Sequence[int], rounds: int = 2) -> dict[tuple[int, int], Tensor]:
    """Every client's update of the initial model by (round, client), trained in this order."""
    found: dict[tuple[int, int], Tensor] = {}
    for t in range(rounds):

        def note(client: int, update: Tensor, t: int = t) -> None:
            found[t, client] = update.clone()

        engine = SequentialEngine(model, InMemorySource(FLAT, SIZES), STREAMS, observe=note)
        tasks = [ClientTask(client, None, 1.0) for client in order]
        engine.train(tasks, RoundJob(model.initial, RULE, t, FloatSum(np.zeros(model.size, np.float32))))
    return found


@pytest.mark.parametrize("name", AWKWARD)
def test_clients_are_bit_identical_in_any_order(name: str) -> None:
    model = FlatModel(built(name)(), rebuild=built(name))
    one = updates(model, range(6))
    other = updates(FlatModel(built(name)(), rebuild=built(name)), (4, 0, 5, 2, 3, 1))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(torch.equal(one[key], update) for key, update in updates(model, (3, 1, 0, 2, 5, 4)).items())
    differ = [not torch.equal(one[0, client], one[1, client]) for client in range(6)]
    assert any(differ)  # every round has new batches and random numbers
    if name in DRAWING - {"BatchNormDropout"}:
        assert len({float(update.sum()) for update in one.values()}) == 12


@pytest.mark.parametrize("name", sorted(AWKWARD.keys() - DRAWING))
def test_an_update_is_that_of_a_plain_loop_with_a_fresh_module(name: str) -> None:
    found, source = updates(FlatModel(built(name)(), rebuild=built(name)), range(6), 1), InMemorySource(FLAT, SIZES)
    for client, size in enumerate(SIZES):
        module, (x, y) = built(name)(), source.load(client)
        first = travelling(module)
        order = STREAMS.generator(Purpose.BATCH_ORDER, 0, client)
        optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=RULE.lr)
        for rows in schedule(RULE, size, order):
            rows = np.arange(size) if rows is None else rows
            optimizer.zero_grad()
            functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
        expected = travelling(module) - first
        assert torch.allclose(found[0, client], expected, atol=1e-6), client


def travelling(module: nn.Module) -> Tensor:
    persistent = [one for name, one in module.named_buffers() if name in module.state_dict()]
    trained = [one for one in module.parameters() if one.requires_grad]
    values = [*trained, *(one for one in persistent if one.is_floating_point())]
    return torch.cat([one.detach().flatten() for one in values])


def data() -> ClientArrays:
    generator = np.random.default_rng(3)
    x, y = generator.standard_normal((sum(SIZES), 6)).astype(np.float32), np.arange(sum(SIZES)) % 3
    return ClientArrays(x, y, np.repeat(np.arange(6), SIZES), test=(x, y))


def trained(name: str, **given: Any) -> list[Any]:
    """The bits of the final model, and what was recorded, of a run with exact sums."""
    settings: dict[str, Any] = {"rounds": 2, "clients.count": 4, "local.batch_size": 4, "local.drop_last": True}
    settings |= {"server.exact": True, "cluster.threads": 1, "evaluation.clients": "all", "local.lr": 0.1}
    done = fedmpi.run("fedavg", settings, data=data(), model=f"tests.local.test_isolation:{name}_built", **given)
    values = travelling(done.model).numpy()
    scores = (
        [record[key] for key in sorted(record) if key.startswith(("test_", "client_"))] for record in done.records
    )
    return [crc32(values.tobytes()), *scores]


def resumed(name: str, folder: Path) -> list[Any]:
    """Return the same of a run that was stopped after its first round; ranks share it in tests/mpi."""
    trained(name, out=folder / name, stop=lambda: True)
    return trained(name, out=folder / name, resume=True)


def __getattr__(name: str) -> Any:
    """`NAME_built` builds one of the modules, as `model.name` names it."""
    if not name.endswith("_built"):
        raise AttributeError(name)
    return lambda description: AWKWARD[name.removesuffix("_built")]()


def changed(change: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(6, 3)
    change(layer)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("module", "plain"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)), True),
        (nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), True),
        (nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten()), False),
        (nn.LSTM(3, 3, num_layers=2), True),
        (nn.LSTM(3, 3, num_layers=2, dropout=0.5), False),
        (nn.Sequential(nn.Linear(6, 3), nn.RReLU()), False),
        (Own(), False),
        (utils.parametrizations.weight_norm(nn.Linear(6, 3)), False),
        (changed(lambda layer: setattr(layer, "forward", lambda x: x)), False),
        (changed(lambda layer: layer.register_forward_hook(lambda *_: None)), False),
        (changed(lambda layer: layer.weight.register_hook(lambda gradient: gradient)), False),
    ],
)
def test_known_layers_as_they_are_made_are_plain(module: nn.Module, plain: bool) -> None:
    assert is_plain(module) == plain


def test_a_plain_module_is_trained_where_it_is_and_any_other_one_is_left_as_it_was() -> None:
    plain, own = nn.Sequential(nn.Linear(6, 3)), built("Counter")()
    flat, other = FlatModel(plain), FlatModel(own)
    for model in (flat, other):
        updates(model, range(2), 1)
    assert flat.module is plain and other.module is not own
    assert own.calls == 0 and other.module.calls == 2


def test_parts_of_one_memory_are_rejected_if_they_overlap() -> None:
    overlapping, apart, whole = Own(), Own(), torch.zeros(9)
    overlapping.b.bias.data = overlapping.a.weight.data[0, :3]
    with pytest.raises(UserError, match="share memory"):
        FlatModel(overlapping)
    apart.a.bias.data, apart.b.bias.data = whole[:6], whole[6:]
    check_memory(apart)
    check_memory(built("TiedAndFrozen")())


class CountingLoss:
    """Weighs batches by how many came before."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return functional.cross_entropy(outputs, targets, reduction="none") / self.calls


def test_what_a_loss_keeps_is_reset_for_every_client() -> None:
    loss = Loss(resolve("loss", CountingLoss))
    model = FlatModel(nn.Sequential(nn.Linear(6, 3)), loss=loss)
    forwards, backwards = updates(model, range(6), 1), updates(model, range(5, -1, -1), 1)
    assert all(torch.equal(forwards[key], backwards[key]) for key in forwards)


class Growing(Own):
    def made(self) -> None:
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x: Tensor) -> Tensor:
        self.mean = x.detach()
        return x


class ChangesInput(Own):
    def forward(self, x: Tensor) -> Tensor:
        x /= 2
        return super().forward(x)


class Detached(Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Growing, "must stay"),
        (ChangesInput, "changes its input"),
        (Detached, "no gradient"),
        (lambda: nn.Linear(7, 3), "cannot read"),
    ],
)
def test_what_cannot_be_trained_is_rejected_before_round_0(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UserError, match=words):
        forward_traits(FlatModel(make()), FLAT)


class Coupled(Own):
    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("make", "couples", "evaluated", "keeps", "least"),
    [
        (Own, False, False, False, 1),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), True, False, True, 2),
        (Coupled, True, True, False, 1),
        (built("GlobalGenerators"), True, False, True, 1),
        *[(built(name), False, False, True, 1) for name in ("TiedAndFrozen", "Hooks")],
        (built("RunningMean"), True, False, True, 1),
        (built("OwnGenerators"), False, False, True, 1),
    ],
)
def test_what_a_few_passes_find_out(
    make: Callable[[], nn.Module], couples: bool, evaluated: bool, keeps: bool, least: int
) -> None:
    model = FlatModel(make())
    state = torch.get_rng_state()
    traits = forward_traits(model, FLAT)
    found = traits.couples, traits.couples_evaluated, traits.keeps, traits.least
    assert found == (couples, evaluated, keeps, least)
    assert torch.equal(torch.get_rng_state(), state)
