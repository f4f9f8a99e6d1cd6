"""Naive loop, sequential engine and batched engine on one process and one core, for each model.

    python -m benchmarks.engines                  every model
    python -m benchmarks.engines lstm LeNet       some
    python -m benchmarks.engines --passes 5
    python -m benchmarks.engines --device cuda    on a GPU; see the last column

The engines alternate within a pass, and ratios are taken within a pass. The output shows medians over the passes. On
the CPU these are CPU seconds, which other programs disturb less than wall-clock time; on other devices they are
wall-clock seconds. The table also shows the bound of the device per step (`benchmarks.rooflines`). Samples are
synthetic and stored on the device, except for the naive loop, whose batches are copied to it. The last column is the
distance between the summed client updates of the batched and the sequential engine, relative to the length of the sum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import own_networks as own
from benchmarks.devices import CPU, described, now
from benchmarks.networks import as_users_write_it
from benchmarks.rooflines import Machine, count_step, measure_machine
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.process.malloc import freed_memory_kept

GREY = DataDescription((1, 28, 28), "float32", 10, "image", 0, (), ())
COLOUR = DataDescription((3, 32, 32), "float32", 10, "image", 0, (), ())
WORDS = DataDescription((30,), "int32", 17, "text", 20_002, (), ())


COLUMNS = (
    "model", "naive ms a step", "one by one / naive", "side by side / naive", "side by side / one by one", "form ms",
    "MFLOP a step", "MB a step", "roofline ms a step", "quickest / roofline",
    "apart",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and the sizes and batch size of its clients."""

    description: DataDescription
    make: Callable[[], nn.Module]
    sizes: list[int]
    batch: int = 20


def built_in(name: str, description: DataDescription, clients: int, samples: int) -> Case:
    return Case(description, lambda: build(name, {}, description, 1), [samples] * clients)


RAGGED = [int(size) for size in np.geomspace(1, 900, 12)]
CASES = {
    "mlp": built_in("mlp", GREY, 10, 100),
    "cnn": built_in("cnn", GREY, 10, 100),
    "cifar-cnn": built_in("cifar-cnn", COLOUR, 5, 100),
    "image-cnn": built_in("image-cnn", GREY, 5, 100),
    "resnet18": built_in("resnet18", COLOUR, 2, 40),
    "text-cnn": built_in("text-cnn", WORDS, 10, 60),
    "fedsampling-text-cnn": built_in("fedsampling-text-cnn", WORDS, 10, 60),
    "transformer": built_in("transformer", WORDS, 10, 60),
    "lstm": built_in("lstm", WORDS, 10, 60),
    "bilstm": built_in("bilstm", WORDS, 10, 60),
    "OddCNN": Case(GREY, lambda: own.OddCNN(10), RAGGED, 32),
    "Residual": Case(COLOUR, lambda: own.Residual(10), [96] * 4, 16),
    "LeNet": Case(GREY, lambda: own.LeNet(10), [100] * 10),
    "VGGLike": Case(COLOUR, lambda: own.VGGLike(10), [100] * 4),
    "GRUClassifier": Case(WORDS, lambda: own.GRUClassifier(20_002, 17), [60] * 10),
    "TextCNN": Case(WORDS, lambda: own.TextCNN(20_002, 17), [60] * 10),
    "TinyViT": Case(COLOUR, lambda: own.TinyViT(10), [100] * 4),
}


class MadeUp:
    """Synthetic samples of every client, in the memory of a device."""

    def __init__(self, case: Case, device: torch.device = CPU):
        self.description, self.sizes = case.description, np.array(case.sizes)
        shape, text = case.description.feature_shape, case.description.task == "text"
        high = case.description.vocabulary
        self.x = [torch.randint(high, (n, *shape)).int() if text else torch.randn(n, *shape) for n in case.sizes]
        self.y = [torch.randint(case.description.classes, (n,)) for n in case.sizes]
        self.x, self.y = [x.to(device) for x in self.x], [y.to(device) for y in self.y]

    def load(self, client: int, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        if rows is None:
            return self.x[client], self.y[client]
        index = torch.from_numpy(rows).to(self.y[client].device)
        return self.x[client][index], self.y[client][index]

    def load_many(self, clients: list[int], rows_of: list[Ints | None]) -> tuple[Tensor, Tensor]:
        loaded = [self.load(client, rows) for client, rows in zip(clients, rows_of, strict=True)]
        return torch.cat([x for x, _ in loaded]), torch.cat([y for _, y in loaded])


def naive(case: Case, module: nn.Module, source: MadeUp) -> None:
    """Train the clients sequentially with PyTorch's own tools; samples on the CPU, the module on its own device."""
    device = next(module.parameters()).device
    received = {name: value.clone() for name, value in module.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in received.items()}
    module.train()
    for x, y in zip(source.x, source.y, strict=True):
        module.load_state_dict(received)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for some_x, some_y in DataLoader(TensorDataset(x, y), batch_size=case.batch, shuffle=True):
            optimizer.zero_grad()
            loss = cross_entropy(module(some_x.to(device)), some_y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for name, value in module.state_dict().items():
            mean[name].add_(value, alpha=1 / len(source.y))
    module.load_state_dict(received)


def in_turns(ways: Sequence[Callable[[], object]], passes: int, device: torch.device) -> list[list[float]]:
    """Return the seconds of each way in each pass; the ways alternate, and a first warm-up pass is not counted."""
    seconds = []
    for _ in range(passes + 1):
        row = []
        for way in ways:
            began = now(device)
            way()
            row.append(now(device) - began)
        seconds.append(row)
    return seconds[1:]


def measure(name: str, passes: int, machine: Machine, device: torch.device) -> str:
    """Return a line of the table."""
    case = CASES[name]
    torch.manual_seed(1)
    here, model, plain = MadeUp(case), FlatModel(case.make(), device), as_users_write_it(case.make()).to(device)
    torch.manual_seed(1)
    source = MadeUp(case, device)
    began = now(device)
    batched = BatchedEngine(model, source, Streams(1))
    made = now(device) - began
    sequential = SequentialEngine(model, source, Streams(1))
    tasks = [ClientTask(client, None, 1 / len(case.sizes)) for client in range(len(case.sizes))]
    rule = LocalRule(lr=0.01, epochs=1, batch_size=case.batch)
    total, one, other = (FloatSum(np.zeros(model.size, np.float32), device) for _ in range(3))
    sequential.train(tasks, model.initial, rule, 0, one)
    batched.train(tasks, model.initial, rule, 0, other)
    apart = float((one.tensor - other.tensor).norm() / one.tensor.norm())
    ways: list[Callable[[], object]] = [
        lambda: naive(case, plain, here),
        lambda: sequential.train(tasks, model.initial, rule, 0, total),
        lambda: batched.train(tasks, model.initial, rule, 0, total),
    ]
    seconds = in_turns(ways, passes, device)
    first, tight, side = (statistics.median(row[way] / row[0] for row in seconds) for way in range(3))
    steps = sum(-(-size // case.batch) for size in case.sizes)
    naive_ms = 1000 * statistics.median(row[0] for row in seconds) / steps
    count = min(case.batch, max(case.sizes))
    largest = int(source.sizes.argmax())
    step = count_step(case.make().train(), here.x[largest][:count], here.y[largest][:count])
    least = 1000 * step.seconds(machine)
    quickest = naive_ms * min(tight, side) / least
    cells = [f"{naive_ms:.2f}", f"{tight:.2f}", f"{side:.2f}", f"{side / tight:.2f}", f"{1000 * made:.0f}"]
    cells += [f"{step.flops / 1e6:.0f}", f"{step.bytes / 1e6:.1f}", f"{least:.3g}", f"{quickest:.1f}", f"{apart:.0e}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[[], *CASES], help="which; all by default")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu (default), cuda, cuda:1, …")
    parser.add_argument("--quick", action="store_true", help="the device's speed from small sizes, one pass")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = measure_machine(arguments.device, arguments.quick)
    passes = 1 if arguments.quick else arguments.passes
    print(f"{described(arguments.device)}; {machine}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    with freed_memory_kept():  # as in every run
        for name in arguments.models or CASES:
            print(measure(name, passes, machine, arguments.device), flush=True)


if __name__ == "__main__":
    main()
