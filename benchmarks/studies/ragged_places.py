"""Possible gain from refilling the places of finished clients: clients of unequal lengths against equal ones.

    python -m benchmarks.studies.ragged_places                  50 clients of 1 to 900 samples, every model
    python -m benchmarks.studies.ragged_places cnn --clients 12

In a batch, the places of shorter clients are empty until the longest has finished. Equal clients leave none empty, so
their time per step is the bound for refilling every place at no cost. Both take equally many steps, all with whole
batches, alternating, in one process on one core. The output shows medians over the passes, in CPU time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from benchmarks.devices import CPU
from benchmarks.engines import CASES, Case, MadeUp, in_turns
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.models.flat import FlatModel
from fedmpi.process.malloc import freed_memory_kept

MODELS = ("mlp", "cnn", "OddCNN", "LeNet", "TextCNN", "GRUClassifier")
"""Models whose clients are batched on a CPU."""
LARGEST = 900


def ragged_steps(clients: int, batch: int) -> Ints:
    """Return the steps of clients whose numbers of samples are evenly spaced in logarithms, int64 (N,)."""
    return np.maximum(1, np.rint(np.geomspace(1, LARGEST, clients) / batch)).astype(np.int64)


def equal_steps(steps: Ints) -> Ints:
    """Return the steps of as many clients with as many steps in total, differing by at most one."""
    each, more = divmod(int(steps.sum()), len(steps))
    return np.repeat([each + 1, each], [more, len(steps) - more])


def round_of(case: Case, steps: Ints) -> Callable[[], WorkReport]:
    """Return a round of the batched engine, of clients with these numbers of whole batches."""
    torch.manual_seed(1)
    source = MadeUp(replace(case, sizes=(steps * case.batch).tolist()))
    model = FlatModel(case.make(), CPU)
    engine, total = BatchedEngine(model, source, Streams(1)), FloatSum(np.zeros(model.size, np.float32), CPU)
    tasks = [ClientTask(client, None, 1 / len(steps)) for client in range(len(steps))]
    rule = LocalRule(lr=0.01, epochs=1, batch_size=case.batch)
    return lambda: engine.train(tasks, model.initial, rule, 0, total)


def measure(name: str, clients: int, passes: int) -> str:
    """Return a line of the table."""
    case = CASES[name]
    ragged = ragged_steps(clients, case.batch)
    ways = [round_of(case, steps) for steps in (ragged, equal_steps(ragged))]
    seconds = in_turns(ways, passes, CPU)
    ratios = [first / second for first, second in seconds]
    one, other = (1000 * statistics.median(column) / ragged.sum() for column in zip(*seconds, strict=True))
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {name} | {ragged.sum()} | {one:.2f} | {other:.2f} | {spread} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *CASES], help="which")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--passes", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | steps | ms a step, ragged | equal | ragged / equal (passes) |\n|---|---:|---:|---:|---:|")
    with freed_memory_kept():
        for name in asked.models or MODELS:
            print(measure(name, asked.clients, asked.passes), flush=True)


if __name__ == "__main__":
    main()
