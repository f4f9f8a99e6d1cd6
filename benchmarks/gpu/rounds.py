"""Milliseconds of a round on a GPU: fedmpi's engines beside plain PyTorch, with and without CUDA graphs.

    python -m benchmarks.gpu.rounds                         every case
    python -m benchmarks.gpu.rounds W1 lstm --tf32          some, with TensorFloat-32
    python -m benchmarks.gpu.rounds W2 --patch-bytes 0      all convolutions grouped; with 1e12 all by products
    python -m benchmarks.gpu.rounds --device cpu --quick    a smoke test without a GPU and without graphs

The ways alternate within a pass; ratios to the plain loop are taken within a pass, and the table shows medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.engines import Synthetic
from benchmarks.gpu.ways import WAYS, Task
from benchmarks.measure import in_turns, table, wait_for
from benchmarks.workloads import MODELS, WORKLOADS, Workload
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.local.batched import convolution
from fedmpi.local.batched.engine import BatchedEngine
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models import build
from fedmpi.models.flat import FlatModel

CASES: dict[str, Workload] = {
    "W1": replace(WORKLOADS["W1"], clients=10),
    "W2": replace(WORKLOADS["W2"], clients=25, each=240),
    "resnet18": replace(MODELS["resnet18"], clients=4, each=100),
    "cifar-cnn": replace(MODELS["cifar-cnn"], clients=10),
    **{name: MODELS[name] for name in ("lstm", "transformer", "text-cnn")},
    "W1 with 100 clients": WORKLOADS["W1"],
}
ENGINES: dict[str, Callable[[SequentialEngine], SequentialEngine | BatchedEngine]] = {
    "fedmpi, sequential": lambda engine: engine,
    "fedmpi, batched": BatchedEngine,
}


def quick(workload: Workload) -> Workload:
    """Return a tiny form of a case."""
    return replace(workload, clients=2, each=4, batch=2)


def rounds_of(workload: Workload, device: torch.device) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """Return each engine and way as a function, after two rounds to warm up, and the errors of those that fail."""
    source = Synthetic(workload, device)
    x = source.all_x.view(workload.clients, workload.each, *source.all_x.shape[1:])
    y = source.all_y.view(workload.clients, workload.each)

    def model() -> FlatModel:
        return FlatModel(build(workload.model, {}, workload.description, 1), device)

    def by_engine(name: str) -> Callable[[], Tensor]:
        flat = model()
        engine = ENGINES[name](SequentialEngine(flat, source, Streams(1)))
        tasks = [ClientTask(client, None, 1 / workload.clients) for client in range(workload.clients)]
        rule = LocalRule(lr=workload.lr, epochs=1, batch_size=workload.batch)

        def round() -> Tensor:
            total = FloatSum(torch.zeros(flat.size, device=device))
            engine.train(tasks, RoundJob(flat.initial, rule, 0, total))
            return total.tensor

        return round

    def by_way(name: str) -> Callable[[], Tensor]:
        task = Task(build(workload.model, {}, workload.description, 1).to(device), x, y, workload.batch, workload.lr)
        start = task.work.clone()
        round = WAYS[name](task)
        return lambda: round(start)

    found: dict[str, Callable[[], Tensor]] = {}
    failed: dict[str, str] = {}
    for name in [*ENGINES, *WAYS]:
        try:
            run = by_engine(name) if name in ENGINES else by_way(name)
            for _ in range(2):
                run()
            wait_for(device)
            found[name] = run
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return found, failed


def measure(name: str, workload: Workload, device: torch.device, passes: int) -> None:
    """Print the table of one case."""
    found, failed = rounds_of(workload, device)

    def seconds(run: Callable[[], Tensor]) -> float:
        wait_for(device)
        began = time.perf_counter()
        run()
        wait_for(device)
        return time.perf_counter() - began

    measured = in_turns([lambda run=run: seconds(run) for run in found.values()], passes)  # type: ignore[misc]
    names = list(found)
    rows = []
    for place, way in enumerate(names):
        ms = 1e3 * statistics.median(row[place] for row in measured)
        base = [row[place] / row[names.index("loop")] for row in measured] if "loop" in found else [float("nan")]
        rows.append([way, f"{ms:.2f}", f"{statistics.median(base):.3f}"])
    rows += [[way, "failed", reason] for way, reason in failed.items()]
    print(f"### {name}: {workload.clients} clients of {workload.each} samples, B = {workload.batch}\n")
    print(table(("way", "ms per round", "against the loop"), rows), flush=True)
    if set(ENGINES) <= set(found):
        one, other = (found[way]() for way in ENGINES)
        print(f"\nDistance of the engines' updates: {float((one - other).norm() / one.norm()):.0e}")
    print(flush=True)


def gpu_parser(description: str | None, what: str, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return the command line of a program that measures or checks the named things on a GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(what, nargs="*", choices=[[], *names], metavar=what.removesuffix("s").upper())
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--budget", type=float, default=600, help="nothing further after so many seconds")
    parser.add_argument("--quick", action="store_true", help="few and tiny")
    return parser


def main() -> None:
    parser = gpu_parser(__doc__, "cases", CASES)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--patch-bytes", type=float, default=convolution.PATCH_BYTES)
    asked = parser.parse_args()
    convolution.PATCH_BYTES = asked.patch_bytes
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = asked.tf32
    torch.set_float32_matmul_precision("high" if asked.tf32 else "highest")
    began = time.monotonic()
    for name in asked.cases or CASES:
        if time.monotonic() - began > asked.budget:
            print(f"{name}: left out, the time is over")
            continue
        measure(name, quick(CASES[name]) if asked.quick else CASES[name], asked.device, asked.passes)


if __name__ == "__main__":
    main()
