"""Every tensor names its device: on one that mixes with no other, engines and runs compute what the CPU does."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmpi import ClientFailure, ComponentFailure, presets
from fedmpi.aggregation.exact import FixedPointSum, FloatSum
from fedmpi.common.streams import Streams
from fedmpi.config import load_config
from fedmpi.core import experiment as core_experiment
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.core.reduce import RoundSum
from fedmpi.local import client_state
from fedmpi.local.batched import convolution, stack
from fedmpi.local.batched.engine import BatchedEngine, chunk_size
from fedmpi.local.batched.stack import Stack
from fedmpi.local.batched.translation import translate
from fedmpi.local.graphs import Graphs
from fedmpi.local.hooks import ClientHooks, Hooks
from fedmpi.local.measures import Gradients
from fedmpi.local.merged import MergedEngine
from fedmpi.local.optimizers import Adam
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models import build, flat
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from fedmpi.tasks.losses import task_loss
from tests.end_to_end.in_process import run_into
from tests.local import networks
from tests.local.elsewhere import Away, Mixed, elsewhere, recorded, transfers
from tests.local.synthetic import MIDDLE_IMAGES, TEXTS, InMemorySource, made, summed
from tests.local.test_algorithms import OWN, make

HERE = torch.device("cpu")
SIZES = np.array([5, 9, 3, 7])
TASKS = [ClientTask(client, None, 0.3) for client in range(len(SIZES))]
STEPS = LocalRule(lr=0.05, epochs=1, batch_size=4, proximal_mu=0.1)
RULES = {
    BatchedEngine: [replace(STEPS, epochs=2, optimizer="adam")],
    SequentialEngine: [STEPS, replace(STEPS, optimizer="adam")],
    MergedEngine: [LocalRule(lr=0.05, epochs=1, batch_size=None)],
}
NETWORKS = {
    "mlp": MIDDLE_IMAGES,
    **dict.fromkeys(("text-cnn", "transformer"), TEXTS),
    **dict.fromkeys(("graph gru, time first", "graph convolutions"), networks.TEXTS),
    "graph dropout at several places": networks.IMAGES,
}
CONVOLUTIONS = {
    "cnn": MIDDLE_IMAGES,
    **dict.fromkeys(("convolutions", "means", "means of eight filters", "odd sizes"), networks.IMAGES),
}
FEDAVG = ("preset=fedavg", "clients.count=4", "local.engine=sequential")
SIDE_BY_SIDE = (*FEDAVG[:2], "local.engine=batched")
RUNS = {
    "batched": SIDE_BY_SIDE,
    "fedsampling": ("preset=fedsampling", "samples.budget=64"),
    "scaffold": (*SIDE_BY_SIDE, "local.algorithm=scaffold"),
    "mediators": (*FEDAVG, *(f"topology{of}" for of in ("=mediators", ".keep_optimizer=true")), "local.optimizer=adam"),
    "scaffold, sequential": (*FEDAVG, "local.algorithm=scaffold", "evaluation.clients=all"),
    "copies": (*FEDAVG, "model.copies=3", "local.batch_size=20"),
}
MORE_RUNS = {
    "private": (*FEDAVG, "server.weights=uniform", "privacy.clip_norm=1", "privacy.noise_multiplier=1"),
    "median of few values": (*FEDAVG, "compression=top-k", "server.aggregator=median"),
} | {preset.name: (f"preset={preset.name}",) for preset in presets()}
MORE_RUNS["ifca"] += ("local.epochs=1",)  # ten epochs of rate 0.1 multiply a rounding in float32 by a thousand


class OwnModule(torch.nn.Sequential):
    """A class that need not be plain."""


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU with one GB of free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def built(name: str, device: torch.device) -> tuple[FlatModel, InMemorySource]:
    """Build a network and clients' samples on a device."""
    torch.manual_seed(1)
    description = (NETWORKS | CONVOLUTIONS).get(name, MIDDLE_IMAGES)
    own = name in networks.CHAINS or name.startswith("graph ")
    module = networks.made(name)[0] if own else build("cnn" if name == "own" else name, {}, description, 1)
    if name == "own":
        module = OwnModule(module)
    return FlatModel(module.double(), device), InMemorySource(description, SIZES, torch.float64, device)


def trained(name: str, engine: type, rules: Sequence[LocalRule], device: torch.device, counts: Any = (4, 4)) -> Tensor:
    """Return the sums of the updates of `counts` clients in rounds of one engine, (rounds, d)."""
    model, source = built(name, device)
    trains, rounds = made(engine, model, source), enumerate(zip(counts, rules, strict=False))
    found = torch.stack([summed(trains, model, TASKS[:count], rule, round)[0] for round, (count, rule) in rounds])
    assert found.device == device
    return found.cpu()


def ran(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, device: torch.device | None) -> Tensor:
    """The model after two rounds, each of which is evaluated."""
    prepared = core_experiment.prepare_device
    with monkeypatch.context() as patched:
        if device is not None:
            patched.setattr(core_experiment, "prepare_device", lambda *given: (prepared(*given), device)[1])
        few = ("data.source=digits:clients=12", "rounds=2", "local.batch_size=40", "evaluation.every=1")
        quiet = ("logging.tensorboard=false", "checkpoint.every=0")
        experiment = Experiment.connect(load_config(None, [*few, *quiet, *settings]))
        simulation = Simulation(experiment, None)
        assert simulation.run() == "finished"
        experiment.close()
    assert device is None or simulation.model.device == device
    return simulation.model.cpu().clone()


def assert_alike(there: Tensor, here: Tensor, tolerance: float = 1e-12) -> None:
    """Equal up to rounding: some layers have special kernels for tensors that are plainly on a CPU."""
    assert there.dtype == here.dtype
    assert float((there - here).norm()) <= tolerance * float(here.norm())


@contextmanager
def watched(*methods: tuple[type, str]) -> Iterator[list[str]]:
    """Record the kernels and transfers of calls of these methods."""
    seen: list[str] = []

    def watching(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with transfers() as found:
                result = method(*given, **named)
            seen.extend(found)
            return result

        return call

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in methods:
            patched.setattr(owner, name, watching(getattr(owner, name)))
        yield seen


def test_what_forgets_its_device_or_travels_is_noticed():
    with elsewhere() as device:
        there = torch.zeros(3, 2, device=device)
        there[:, 1].copy_(torch.ones(3))
        assert isinstance(there.sum(0), Away) and there.sum(0).cpu().tolist() == [0, 3]
        for forgetful in (lambda: there + torch.ones(2), lambda: there[torch.tensor([0, 1])], there.numpy):
            with pytest.raises(Mixed):
                forgetful()
    with elsewhere() as device, transfers() as found:
        there = torch.ones(2, device=device)
        there.copy_(torch.zeros(2))
        assert there.mul_(2).sum().item() == 0
        there.cpu()
    assert [one for one in found if one != "kernel"] == ["to the device", "to the host", "to the host"]


def test_steps_that_cannot_be_captured_start_eagerly_after_one_warning(caplog: pytest.LogCaptureFixture):
    with elsewhere() as device:
        values, graphs = torch.zeros(2, device=device), Graphs(device)
        for _ in range(4):
            graphs.run("step", lambda: values.add_(10))
        assert values.cpu().tolist() == [40, 40]
    (message,) = caplog.messages
    assert "cannot capture local steps" in message


@pytest.mark.parametrize("engine", RULES)
@pytest.mark.parametrize("name", ["cnn", "text-cnn"])
def test_engines_name_the_device_of_every_tensor(name: str, engine: type):
    for rule in RULES[engine]:
        here = trained(name, engine, [rule], HERE)
        with elsewhere() as device, recorded() as graphs, watched((FlatModel, "weighted_gradient")) as seen:
            assert_alike(trained(name, engine, [rule], device), here)
        assert engine is not BatchedEngine or graphs["captured"] == 2
        assert set(seen) <= {"kernel"}  # from a merged step


@pytest.mark.parametrize("name", NETWORKS)
def test_stacked_forms_name_the_device_of_every_tensor_and_copy_nothing_in_a_step(name: str):
    """One graph serves the steps of three and four clients, another those of one client, at every learning rate."""
    rules = (STEPS, replace(STEPS, lr=0.02))
    here = trained(name, BatchedEngine, rules, HERE)
    with elsewhere() as device, recorded() as graphs, watched((Graphs, "run")) as seen:
        assert_alike(trained(name, BatchedEngine, rules, device), here)
    assert set(seen) == {"kernel"} and graphs == {"captured": 2, "replayed": 4}
    assert name != "mlp" or len(seen) == 6 * 20


@pytest.mark.parametrize("name", ["mlp", "cnn", pytest.param("text-cnn", marks=pytest.mark.slow)])
def test_a_stack_serves_more_clients_and_larger_batches_than_its_first_round(name: str):
    rules, counts = 2 * [STEPS, replace(STEPS, batch_size=8)], (4, 2, 4, 4)
    here = trained(name, BatchedEngine, rules, HERE, counts)
    with elsewhere() as device, recorded():
        assert_alike(trained(name, BatchedEngine, rules, device, counts), here, 1e-10)


@pytest.mark.parametrize("name", ["mlp", pytest.param("text-cnn", marks=pytest.mark.slow)])
def test_a_stack_is_gone_before_a_larger_one_takes_memory(name: str, monkeypatch: pytest.MonkeyPatch):
    values: list[Any] = []
    make_stack = Stack.__init__

    def init(stack: Stack, *given: Any) -> None:
        assert all(one() is None for one in values)
        make_stack(stack, *given)
        values.append(weakref.ref(stack.values))

    monkeypatch.setattr(Stack, "__init__", init)
    with elsewhere() as device, recorded():
        trained(name, BatchedEngine, 4 * [STEPS], device, (2, 2, 2, 4))
    assert len(values) == 3  # one is that of a trial


@pytest.mark.parametrize(("batch_size", "graphs"), [(4, 10), (16, 7)])
def test_cohorts_of_all_sizes_share_few_graphs(batch_size: int, graphs: int, monkeypatch: pytest.MonkeyPatch):
    """Graphs cover 1, 2, 3, 4, 6, 8 or 12 clients; no client fills a batch of 16."""
    monkeypatch.setattr(stack, "MOST_BINDINGS", 4)  # on a CPU
    sizes = np.arange(1, 13)
    tasks, rule = [ClientTask(k, None, 0.3) for k in range(12)], replace(STEPS, batch_size=batch_size)

    def found(device: torch.device) -> Tensor:
        model = built("mlp", device)[0]
        engine = made(BatchedEngine, model, InMemorySource(MIDDLE_IMAGES, sizes, torch.float64, device))
        counts = [*range(12, 0, -1)] * 2
        return torch.stack([summed(engine, model, tasks[:count], rule)[0].cpu() for count in counts])

    here = found(HERE)
    with elsewhere() as device, recorded() as used:
        assert_alike(found(device), here)
    assert used["captured"] == graphs


def test_probes_of_all_numbers_of_clients_share_few_bindings():
    """Bindings cover 1, 2, 3, 4, 6, 8 or 12 clients."""
    sizes = np.resize(SIZES, 12)
    with elsewhere() as device:
        model = built("mlp", device)[0]
        engine = made(BatchedEngine, model, InMemorySource(MIDDLE_IMAGES, sizes, torch.float64, device))
        for count in range(12, 0, -1):
            found = [*engine.gradients(np.arange(count), [None] * count, sizes[:count], model.initial, 12)]
            assert sum(len(block) for _, block in found) == count
    assert len(engine._stack._bound) == 7


@pytest.mark.parametrize(("optimizer", "vectors"), [("sgd", 2), ("adam", 6)])
def test_tables_of_all_words_and_samples_count_as_memory(optimizer: str, vectors: int, monkeypatch: pytest.MonkeyPatch):
    """`vectors` are values and their start; for Adam also the gradient, two moments and working memory."""
    description, rule = replace(TEXTS, vocabulary=100_000), replace(STEPS, optimizer=optimizer)
    net, start = translate(build("text-cnn", {}, description, 1), description), torch.empty(1, device="meta")
    table = 4 * vectors * net.embedding.weight.size
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 4 * 8 * table))  # the tables of eight clients
    assert [chunk_size(net, 1, rule, start, sizes=np.ones(clients)) for clients in (20, 5)] == [6, 6]
    assert chunk_size(net, 1, rule, start, sizes=np.full(20, table // (3 * 4 * 12))) == 3


def test_a_resumed_run_trains_as_many_clients_at_once_on_a_larger_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = (*SIDE_BY_SIDE, "data.source=digits:clients=12", "rounds=3", "logging.tensorboard=false")
    prepared = core_experiment.prepare_device
    with elsewhere() as device:
        monkeypatch.setattr(core_experiment, "prepare_device", lambda *given: (prepared(*given), device)[1])
        for folder, bits, rounds in (("whole", 23, None), ("parts", 23, 1), ("parts", 30, None)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=1 << bits: (free, free))
            run_into(tmp_path / folder, *settings, resume=bits == 30, stop_after=rounds)
    whole, parts = (tmp_path / folder for folder in ("whole", "parts"))
    assert [json.loads((run / "summary.json").read_text())["clients_at_once"] for run in (whole, parts)] == [3, 3]
    assert (whole / "model.safetensors").read_bytes() == (parts / "model.safetensors").read_bytes()


def test_what_the_host_reads_after_a_round_names_the_client():
    """The client has state that is not finite, or a loss that is too large."""
    with elsewhere() as device:
        model, source = built("mlp", device)
        hooks, total = make(f"{OWN}:Wrong", model, how="infinite"), FloatSum(torch.empty_like(model.initial))
        hooks.begin(7, model.initial, {"dc": FloatSum(torch.empty_like(model.initial))})
        made(SequentialEngine, model, source, hooks=hooks).train(TASKS[1:2], RoundJob(model.initial, STEPS, 7, total))
        with pytest.raises(ComponentFailure, match=r"round 7, client 1: ValueError: client\.c is not finite"):
            hooks.settle()
        source.x[source.offsets[2] :] *= 1e14
        with pytest.raises(ClientFailure, match="client 2 on rank 3: .*lower local.lr"):
            summed(made(SequentialEngine, model, source, rank=3), model, TASKS, STEPS)


@pytest.mark.parametrize("patch_bytes", [0, 1 << 40])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_both_forms_of_convolutions_have_the_gradients_of_the_module(
    name: str, patch_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """By products with patches of any size, and grouped."""
    monkeypatch.setattr(convolution, "PATCH_BYTES", patch_bytes)
    here = trained(name, SequentialEngine, [STEPS, STEPS], HERE)
    with elsewhere() as device, recorded() as graphs, watched((Graphs, "run")) as seen:
        assert_alike(trained(name, BatchedEngine, [STEPS, STEPS], device), here, 1e-10)
    assert set(seen) == {"kernel"} and graphs["replayed"] == 4


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        *(("sgd", name) for name in ("mlp", "cnn", "text-cnn", "own")),
        *(("adam", name) for name in ("mlp", "own")),
        *(pytest.param("adam", name, marks=pytest.mark.slow) for name in ("cnn", "text-cnn", "transformer")),
        pytest.param("sgd", "transformer", marks=pytest.mark.slow),
    ],
)
def test_sequential_steps_copy_nothing_and_a_round_waits_once(name: str, optimizer: str):
    """Steps of built-in models become graphs; the later rounds have new rates and masks. An observer sees updates
    after they are checked, one by one."""

    def found(device: torch.device) -> Tensor:
        model, source = built(name, device)
        engine = made(SequentialEngine, model, source)
        kinds = (optimizer, 0.05, True), ("sgd", 0.05, False), (optimizer, 0.02, True)
        rules = [replace(STEPS, optimizer=kind, lr=lr, dropout=dropout) for kind, lr, dropout in kinds]
        inside_steps = (Graphs, "run"), (FlatModel, "loss_gradient"), (Adam, "step"), (Adam, "finish")
        with watched(*inside_steps) as inside:
            sums = [summed(engine, model, TASKS, rule, round)[0] for round, rule in enumerate(rules)]
        total = FloatSum(torch.empty_like(model.initial))
        with transfers() as seen:
            engine.train(TASKS, RoundJob(model.initial, rules[0], 3, total))
        engine.observe = lambda client, update: None
        with transfers() as observed:
            engine.train(TASKS, RoundJob(model.initial, rules[0], 3, total))
        waits = [one.count("to the host") for one in (seen, observed)]
        assert device == HERE or (set(inside) == {"kernel"} and waits == [1, len(TASKS)])
        return torch.stack(sums).cpu()

    here = found(HERE)
    with elsewhere() as device, recorded() as used:
        assert_alike(found(device), here)
    assert (used["replayed"] > 20) == (name != "own")


def test_custom_objectives_may_pass_other_samples_than_the_batch():
    """Dropout masks are drawn for the samples that the objective passes, as on a CPU."""

    def found(device: torch.device) -> Tensor:
        model, source = built("cnn", device)
        hooks = make(f"{OWN}:Doubling", model)
        hooks.begin(0, model.initial, {})
        return summed(made(SequentialEngine, model, source, hooks=hooks), model, TASKS, STEPS)[0].cpu()

    here = found(HERE)
    with elsewhere() as device:
        assert_alike(found(device), here)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [("label-smoothing", "classification"), ("cross-entropy", "tokens"), ("bce", "multilabel"), ("mse", "regression")],
)
def test_losses_copy_nothing_in_a_step(loss: str, targets: str):
    """Batches are ragged in some steps, which has no effect on the place of the computation."""
    shape = {"tokens": (2,), "multilabel": (5,), "regression": (5,)}.get(targets, ())
    description = replace(MIDDLE_IMAGES, targets=targets, target_shape=shape)

    def found(engine: type, device: torch.device) -> Tensor:
        module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(196, math.prod(description.output_shape)))
        if targets == "tokens":
            module.append(torch.nn.Unflatten(1, description.output_shape))
        torch.nn.init.normal_(module[1].weight, generator=torch.Generator().manual_seed(0))
        torch.nn.init.zeros_(module[1].bias)
        model = FlatModel(module, device, task_loss(loss, kind=targets))
        source = InMemorySource(description, SIZES, torch.float32, device)
        numbers = torch.Generator().manual_seed(1)
        if targets != "classification":
            source.y = torch.randint(2 if targets != "tokens" else 5, (len(source.y), *shape), generator=numbers)
            source.y = source.y if description.counted else source.y.float()
        return summed(made(engine, model, source), model, TASKS, STEPS)[0].cpu()

    here = found(SequentialEngine, HERE)
    with elsewhere() as device, watched((Graphs, "run")) as seen:
        assert_alike(found(BatchedEngine, device), here, 1e-4)
    assert set(seen) == {"kernel"}


@pytest.mark.parametrize("engine", RULES)
def test_the_next_samples_are_loaded_before_these_train(engine: type, monkeypatch: pytest.MonkeyPatch):
    """Earlier samples are freed before that."""
    events: list[str] = []
    samples_of_loads: list[Any] = []

    def load_positions(source: InMemorySource, positions: Any) -> Any:
        assert sum(one() is not None for one in samples_of_loads) < 2
        found = [one.clone() for one in loads(source, positions)]
        samples_of_loads.append(weakref.ref(found[0]))
        return found

    def spy(owner: type, name: str, event: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (events.append(event), method(*given))[1])

    with elsewhere() as device:
        model, samples = built("mlp", device)
        trains = made(engine, model, samples, chunk=1)
        trains._rows = 6  # per merged pass
        spy(*((Stack, "open") if engine is BatchedEngine else (FlatModel, "begin")), "train")
        loads = InMemorySource.load_positions
        monkeypatch.setattr(InMemorySource, "load_positions", load_positions)
        spy(InMemorySource, "load_positions", "load")
        summed(trains, model, TASKS, RULES[engine][0])
    assert events == ["load", *3 * ["load", "train"], "train"]


def test_custom_losses_are_in_no_graph():
    with elsewhere() as device, recorded() as used:
        model, source = built("mlp", device)
        model.loss = task_loss(lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
        summed(made(BatchedEngine, model, source), model, TASKS, STEPS, 0)
    assert not used


@pytest.mark.parametrize("name", ["cnn", "text-cnn"])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_probes_name_the_device_of_every_tensor(name: str, side_by_side: bool):
    def probed(device: torch.device) -> Tensor:
        model, source = built(name, device)
        batched = made(BatchedEngine, model, source) if side_by_side else None
        blocks = Gradients(source, model, Streams(1), batched=batched).blocks(range(len(SIZES)), model.initial, 0)
        found = {int(k): row for clients, rows in blocks for k, row in zip(clients, rows, strict=True)}
        return torch.stack([found[client].cpu() for client in range(len(SIZES))])

    here = probed(HERE)
    with elsewhere() as device:
        assert_alike(probed(device), here)


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_RUNS)])
def test_runs_name_the_device_of_every_tensor(name: str, monkeypatch: pytest.MonkeyPatch):
    settings = (RUNS | MORE_RUNS)[name]
    here = ran(settings, monkeypatch, None)
    with elsewhere() as device, recorded():
        assert_alike(ran(settings, monkeypatch, device), here, 1e-5)


@pytest.mark.parametrize(
    ("exact", "algorithm"),
    [
        *((True, "scaffold"), (False, "feddyn")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, "feddyn"), (False, "scaffold"))),
    ],
)
def test_sums_and_state_stay_on_the_device(algorithm: str, exact: bool, monkeypatch: pytest.MonkeyPatch):
    """A sum that MPI does not read there is copied once per round in each direction, as is state beyond the device's
    share for each client; the bits are those of the CPU."""
    settings = (*FEDAVG, f"local.algorithm={algorithm}", f"server.exact={exact}", "server.weights=uniform")
    monkeypatch.setattr(flat, "is_plain", lambda module: False)  # steps that become graphs round differently
    here, sum_tensor = ran(settings, monkeypatch, None), Cluster.sum_tensor
    for near in (True, False):
        if not near:
            monkeypatch.setattr(Cluster, "sum_tensor", lambda self, count, dtype, _: sum_tensor(self, count, dtype))
            monkeypatch.setattr(client_state, "DEVICE_SHARE", 0.0)
        with (
            elsewhere() as device,
            watched((Hooks, "open"), (ClientHooks, "finish"), (FixedPointSum, "add"), (FloatSum, "add")) as of_clients,
            watched((Hooks, "settle"), (RoundSum, "close"), (RoundSum, "reduce")) as of_rounds,
        ):
            assert torch.equal(ran(settings, monkeypatch, device), here)
        assert of_clients.count("to the host") == (0 if near else 2 * 4)
        assert of_clients.count("to the device") <= (0 if near else 4)
        checks = exact * (1 + (algorithm == "scaffold"))  # one of each sum
        assert of_rounds.count("to the host") == 2 * (2 + checks) and of_rounds.count("to the device") == 2
