"""Checks of the results on a GPU; prints a line per check, and the exit code is 1 if one fails.

    python -m benchmarks.gpu.correctness                          every part, each in a process of its own
    python -m benchmarks.gpu.correctness engines presets --device cpu --quick

engines   both engines in float32 on the GPU against the sequential one in float64 on the CPU
presets   two rounds of every preset on the GPU against the CPU
repeats   the same run twice, and a stopped and resumed one, compared bit for bit
exact     every built-in model twice with deterministic algorithms, compared bit for bit
order     an exact run after another run in the same process
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

import fedmpi
from benchmarks.engines import Synthetic
from benchmarks.gpu.rounds import ENGINES, gpu_parser, quick
from benchmarks.measure import CPU
from benchmarks.workloads import MODELS, Workload
from fedmpi.aggregation.exact import FixedPointSum, FloatSum
from fedmpi.common.arithmetic import process_as_before, set_arithmetic
from fedmpi.common.streams import Streams
from fedmpi.local.batched.layers import NotStackable
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models import build
from fedmpi.models.flat import FlatModel

SMALL: dict[str, dict[str, Any]] = {"resnet18": {"width": 16, "groups": 8}}
"""Options of models that are too slow for a check otherwise."""
LIMITS = {"sgd": 2e-3, "adam": 5e-2}
"""Largest relative difference to float64. Adam divides by small second moments, which magnifies rounding."""
REPEATED: dict[str, dict[str, Any]] = {
    "batched": {"local.engine": "batched"},
    "sequential": {"local.engine": "sequential"},
    "adam": {"local.optimizer": "adam", "local.engine": "batched"},
    "scaffold": {"local.algorithm": "scaffold"},
}
Check = tuple[str, Callable[[], tuple[bool, str]]]


def update(
    engine: str,
    workload: Workload,
    device: torch.device,
    rule: LocalRule,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
) -> Tensor:
    """Return the sum of all clients' updates in a round, (d,) on the CPU."""
    source = Synthetic(workload, device)
    if source.all_x.is_floating_point():
        source.x = tuple(x.to(dtype) for x in source.x)
    module = build(workload.model, SMALL.get(workload.name, {}), workload.description, 1).to(dtype)
    flat = FlatModel(module, device)
    whole = torch.zeros_like(flat.initial, dtype=torch.int64)
    floats = FloatSum(torch.zeros_like(flat.initial))
    made = ENGINES[engine](SequentialEngine(flat, source, Streams(1)))
    tasks = [ClientTask(client, None, 1 / workload.clients) for client in range(workload.clients)]
    made.train(tasks, RoundJob(flat.initial, rule, 0, FixedPointSum(whole) if exact else floats))
    return whole.cpu() if exact else floats.tensor.cpu()


def engines(device: torch.device, models: dict[str, Workload]) -> list[Check]:
    """Compare each engine with float64 on the CPU."""

    def compared(workload: Workload, engine: str, optimizer: str) -> tuple[bool, str]:
        lr = 0.05 if optimizer == "sgd" else 1e-3
        rule = LocalRule(lr=lr, epochs=2, batch_size=4, optimizer=optimizer, proximal_mu=0.1)
        right = update("fedmpi, sequential", workload, CPU, rule, torch.float64)
        apart = float((update(engine, workload, device, rule).double() - right).norm() / right.norm())
        return apart < LIMITS[optimizer], f"{apart:.1e} from float64"

    return [
        (f"{name}, {engine}, {optimizer}", partial(compared, workload, engine, optimizer))
        for name, workload in models.items()
        for engine in ENGINES
        for optimizer in LIMITS
    ]


def exact(device: torch.device, models: dict[str, Workload]) -> list[Check]:
    """Compare two sums of the same updates bit for bit, computed by deterministic algorithms."""

    def summed(workload: Workload, engine: str) -> tuple[bool, str]:
        rule = LocalRule(lr=0.05, epochs=1, batch_size=4)
        with process_as_before():
            set_arithmetic(exact=True)
            first, second = (update(engine, workload, device, rule, exact=True) for _ in range(2))
        return torch.equal(first, second) and bool(first.any()), "compared bit for bit"

    return [
        (f"{name}, {engine}", partial(summed, workload, engine))
        for name, workload in models.items()
        for engine in ENGINES
    ]


def run(preset: str, device: torch.device, keys: dict[str, Any], **more: Any) -> Tensor:
    """Return the final model of a run on the digits, float64 (d,)."""
    short = {"rounds": 2, "cluster.device": device.type, "logging.tensorboard": False, "checkpoint.every": 0}
    model = fedmpi.run(preset, {**short, **keys}, data="digits", **more).model
    return torch.cat([v.reshape(-1).double() for v in model.state_dict().values() if v.is_floating_point()])


def presets(device: torch.device, models: dict[str, Workload]) -> list[Check]:
    """Compare two rounds of every preset with the CPU."""

    def compared(name: str) -> tuple[bool, str]:
        here, there = run(name, CPU, {}), run(name, device, {})
        apart = float((there - here).norm() / here.norm())
        return apart < 1e-3, f"{apart:.1e} from the CPU"

    names = [preset.name for preset in fedmpi.presets()]
    return [(name, partial(compared, name)) for name in names[: None if len(models) > 2 else 2]]


def repeats(device: torch.device, models: dict[str, Workload]) -> list[Check]:
    """Compare a second run and a resumed one bit for bit."""

    def compared(keys: dict[str, Any]) -> tuple[bool, str]:
        keys, rounds = {**keys, "rounds": 4, "checkpoint.every": 1}, count(1)
        first, second = (run("fedavg", device, keys) for _ in range(2))
        with tempfile.TemporaryDirectory() as folder:
            run("fedavg", device, keys, out=f"{folder}/run", stop=lambda: next(rounds) >= 2)
            third = run("fedavg", device, keys, out=f"{folder}/run", resume=True)
        apart = float((first - third).norm())
        return torch.equal(first, second) and torch.equal(first, third), f"resumed, {apart:.1e} apart"

    return [(name, partial(compared, keys)) for name, keys in REPEATED.items()]


def order(device: torch.device, models: dict[str, Workload]) -> list[Check]:
    """Run without and then with exact sums in this process."""

    def ran(exact: bool) -> tuple[bool, str]:
        return bool(run("fedavg", device, {"server.exact": exact}).isfinite().all()), "all parameters are finite"

    return [(f"server.exact = {exact}", partial(ran, exact)) for exact in (False, True)]


PARTS = {part.__name__: part for part in (engines, presets, repeats, exact, order)}


def main() -> int:
    asked = gpu_parser(__doc__, "parts", PARTS).parse_args()
    if len(asked.parts) != 1:
        command = [sys.executable, "-m", "benchmarks.gpu.correctness", *sys.argv[1 + len(asked.parts) :]]
        return max(subprocess.run([*command, part], check=False).returncode for part in asked.parts or PARTS)
    torch.set_num_threads(1)
    names = [name for name in MODELS if name[0].islower()]
    models = {name: quick(MODELS[name]) for name in (names[:2] if asked.quick else names)}
    began, failed = time.monotonic(), 0
    for name, check in PARTS[asked.parts[0]](asked.device, models):
        if time.monotonic() - began > asked.budget:
            print(f"{asked.parts[0]}: stopped, the time is over")
            break
        try:
            passed, detail = check()
        except NotStackable:
            continue
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {asked.parts[0]}: {name}. {detail}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
