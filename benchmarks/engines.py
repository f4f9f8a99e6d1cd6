"""Naive loop, sequential engine and batched engine on one process and one core, for each model.

    python -m benchmarks.engines                  every model
    python -m benchmarks.engines lstm LeNet       some
    python -m benchmarks.engines --device cuda    on a GPU

The engines alternate within a pass, and ratios are taken within a pass. The output shows medians over the passes. On
the CPU these are CPU seconds, which other programs disturb less than wall-clock time; on other devices they are
wall-clock seconds. Samples are synthetic and stored on the device, except for the naive loop, whose batches are copied
to it. The last column is the distance between the summed client updates of the batched and the sequential engine,
relative to the length of the sum. `ms` are spent once to make the batched engine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import CPU, in_turns, seconds_of, table
from benchmarks.naive import train_round
from benchmarks.workloads import MODELS, SAMPLES, Workload, samples
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.process.malloc import freed_memory_kept

HEADS = (
    "model",
    "naive ms per step",
    "sequential / naive",
    "batched / naive",
    "batched / sequential",
    "ms",
    "apart",
)


class Synthetic:
    """Synthetic samples of every client, in the memory of a device."""

    def __init__(self, workload: Workload, device: torch.device = CPU):
        self.description, self.sizes = workload.description, workload.sizes()
        x, y = (torch.from_numpy(one).to(device) for one in samples(workload, int(self.sizes.sum()), SAMPLES))
        self.all_x, self.all_y = x, y
        self.x, self.y = torch.split(x, self.sizes.tolist()), torch.split(y, self.sizes.tolist())

    def load(self, client: int, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        if rows is None:
            return self.x[client], self.y[client]
        index = torch.from_numpy(rows).to(self.y[client].device)
        return self.x[client][index], self.y[client][index]

    def load_positions(self, positions: Ints) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(positions).to(self.all_y.device)
        return self.all_x[index], self.all_y[index]


def line(workload: Workload, passes: int, device: torch.device) -> list[str]:
    """Measure one model."""
    here, source = Synthetic(workload), Synthetic(workload, device)
    model = FlatModel(build(workload.model, {}, workload.description, 1), device)
    plain = workload.network().to(device)
    engines: list[SequentialEngine | BatchedEngine] = [SequentialEngine(model, source, Streams(1))]
    made = seconds_of(lambda: engines.append(BatchedEngine(SequentialEngine(model, source, Streams(1)))), device)
    tasks = [ClientTask(client, None, 1 / workload.clients) for client in range(workload.clients)]
    rule = LocalRule(lr=0.01, epochs=1, batch_size=workload.batch)

    def trained(engine: SequentialEngine | BatchedEngine) -> Tensor:
        total = FloatSum(torch.zeros(model.size, device=device))
        engine.train(tasks, RoundJob(model.initial, rule, 0, total))
        return total.tensor

    one, other = map(trained, engines)
    apart = float((one - other).norm() / one.norm())
    trainings: list[Callable[[], object]] = [
        lambda: train_round(workload, plain, list(zip(here.x, here.y, strict=True)))
    ]
    trainings += [lambda engine=engine: trained(engine) for engine in engines]  # type: ignore[misc]
    ways = [lambda way=way: seconds_of(way, device) for way in trainings]  # type: ignore[misc]
    seconds = in_turns(ways, passes + 1)[1:]
    sequential, batched, both = (
        statistics.median(row[way] / row[to] for row in seconds) for way, to in ((1, 0), (2, 0), (2, 1))
    )
    steps = (-(-source.sizes // workload.batch)).sum()
    ms = 1000 * statistics.median(row[0] for row in seconds) / steps
    cells = [f"{value:.2f}" for value in (ms, sequential, batched, both)]
    return [workload.name, *cells, f"{1000 * made:.0f}", f"{apart:.0e}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="which; all by default")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu (default), cuda, cuda:1, …")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with freed_memory_kept():  # as in every run
        print(table(HEADS, [line(MODELS[name], asked.passes, asked.device) for name in asked.models or MODELS]))


if __name__ == "__main__":
    main()
