"""Compare built-in models at the papers' batch size and users' own models with the naive loop and with rooflines.

    python -m benchmarks.rooflines                       all of them
    python -m benchmarks.rooflines lstm lenet W1 S4      some, or workloads of `python -m benchmarks`
    python -m benchmarks.rooflines --peer pfl=PYTHON     pfl with two processes as well
    python -m benchmarks.rooflines --device cuda         on a GPU: one process each, fedmpi on 1 and 2 ranks

The roofline of a step is the larger of two times on one core or on the device. The first is its floating-point
operations at the speed of a large matrix product. The second is the bytes that it moves at the speed of a copy. Both
speeds are measured in the same run. The roofline of a round is the sum over its batches, with smaller last ones counted
as such. For W3 the one-step clients count as one gradient. For S4 and S6 the naive loop's and the tight loop's columns
show the gradient of K samples. Torch counts the operations of a forward and a backward pass. The bytes are every
layer's output and its gradient, written and read once each, and the trained parameters, read twice and written once; of
word vectors only those of the batch's words. Rows are marked as disturbed if other programs used more than 0.3 cores.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.compare import BUSY_ELSEWHERE, Row, result_folder, run_all
from benchmarks.contestants import Contestant, by_fedmpi, by_floor, by_peer, find_peers
from benchmarks.devices import CPU, described, now, refusing
from benchmarks.workloads import MODELS, OWN, QUICK_MODELS, WORKLOADS, Workload, all_samples, prepare
from fedmpi.common.types import Ints

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """Device and number of processes of a table's entrants."""

    device: str | None  # Device of all entrants; None = CPU cores
    processes: int  # Processes of the tight loop and of pfl
    ranks: int  # Ranks of fedmpi's second entrant
    cores: int  # Cores used by these ranks at once: the roofline of one core is divided by this number

    @property
    def columns(self) -> tuple[str, ...]:
        """Column titles of the table."""
        processes = f"{self.processes} process{'es' * (self.processes > 1)}"
        share = "half the roofline" if self.cores == 2 else "roofline"
        return (
            "model", "clients", "naive ms a step", f"tight, {processes}", f"pfl, {processes}", "1 rank",
            f"{self.ranks} ranks", "engine", "MFLOP a step", "MB a step", "roofline ms a step", "1 rank / roofline",
            f"{self.ranks} ranks / {share}",
        )  # fmt: skip


ON_CORES = Setting(None, processes=2, ranks=3, cores=2)


@dataclass(frozen=True)
class Machine:
    """Best performance of one core or a device."""

    flops: float  # Operations per second of a large matrix product
    bandwidth: float  # Bytes per second that a large copy moves, read and written
    stacked: float = math.nan  # Operations per second of small batched products: 16 clients, 64 × 256 by 256 × 256
    # Bytes per second of a large copy from the host's memory (page-locked if the device is a GPU)
    from_host: float = math.nan
    call: float = math.nan  # Seconds per call on one value, in a sequence of many

    def __str__(self) -> str:
        return (
            f"products {self.flops / 1e9:,.0f} GFLOP/s, of 16 clients side by side {self.stacked / 1e9:,.0f}; copies "
            f"{self.bandwidth / 1e9:,.1f} GB/s, from the host {self.from_host / 1e9:,.1f}; "
            f"a call {1e6 * self.call:.1f} µs"
        )


@dataclass(frozen=True)
class Step:
    """Floating-point operations and bytes of one step of one client."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """Return the roofline of the step on one core."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)


def measure_machine(device: torch.device = CPU, quick: bool = False) -> Machine:
    """Measure the machine as the best of some trials, on one thread on the CPU; `quick` uses small sizes."""
    torch.set_num_threads(1)
    size, values = (1536, 1 << 26) if device.type == "cpu" else (8192, 1 << 28)
    if quick:
        size, values = 256, 1 << 16
    left, right, product = (torch.rand(size, size, device=device) for _ in range(3))
    multiply = _best(lambda: torch.mm(left, right, out=product), device)
    source, target = torch.rand(values, device=device), torch.empty(values, device=device)
    copy = _best(lambda: target.copy_(source), device)
    host = torch.rand(values, pin_memory=device.type == "cuda")
    brought = _best(lambda: target.copy_(host, non_blocking=True), device)
    clients, rows, width = 16, 64, 256
    x, w = (torch.rand(clients, count, width, device=device) for count in (rows, width))
    stacked = _best(lambda: torch.bmm(x, w), device, 10)
    one = torch.zeros(1, device=device)
    return Machine(
        flops=2 * size**3 / multiply,
        bandwidth=2 * FLOAT_BYTES * values / copy,
        stacked=2 * clients * rows * width**2 / stacked,
        from_host=FLOAT_BYTES * values / brought,
        call=_best(lambda: one.add_(1), device, 1000),
    )


def _best(call: Callable[[], object], device: torch.device, calls: int = 1, trials: int = 8) -> float:
    """Return the least seconds per call over some trials of `calls` calls in sequence."""
    call()
    seconds = []
    for _ in range(trials):
        began = now(device)
        for _ in range(calls):
            call()
        seconds.append((now(device) - began) / calls)
    return min(seconds)


def count_step(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Count operations and bytes of a forward and a backward pass over one batch, and of plain SGD."""
    network = network.double()  # torch counts the products of recurrent layers only in this precision
    network(x if not x.is_floating_point() else x.double())  # tensors made in the first pass are not counted
    moved = 0.0
    words = _words(network, x)

    def note(part: nn.Module, _: object, made: object) -> None:
        nonlocal moved
        for one in made if isinstance(made, tuple) else (made,):
            moved += 4 * one.numel() if isinstance(one, Tensor) else 0

    leaves = [part for part in network.modules() if not list(part.children())]
    hooks = [part.register_forward_hook(note) for part in leaves]
    with FlopCounterMode(display=False) as counter:
        cross_entropy(network(x if not x.is_floating_point() else x.double()), y).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    moved += 4 * sum(words.get(id(value), value.numel()) for value in network.parameters())
    return Step(float(counter.get_total_flops()), FLOAT_BYTES * moved)


def _words(network: nn.Module, x: Tensor) -> dict[int, int]:
    """Return how many values of each table of word vectors (by id) the batch reads."""
    present = 0 if x.is_floating_point() else len(torch.unique(x))
    tables = [part.weight for part in network.modules() if isinstance(part, nn.Embedding)]
    return {id(table): present * table.shape[1] for table in tables if not x.is_floating_point()}


def batches_of_a_round(workload: Workload) -> Counter[int]:
    """Return the sizes of the batches of the last round, and how many of each."""
    if workload.wanted:
        return Counter([workload.wanted])
    sizes = workload.sizes()[workload.participants(workload.rounds - 1)]
    few = np.count_nonzero(sizes <= workload.batch) > len(sizes) / 2
    merged = few and workload.epochs == 1  # most take one step: one gradient of them all
    alone = sizes[sizes > workload.batch] if merged else sizes
    together = int(sizes.sum() - alone.sum())
    found = Counter({workload.batch: int((alone // workload.batch).sum())})
    found.update((alone % workload.batch).tolist())
    found.update([together])
    return Counter({rows: workload.epochs * count for rows, count in found.items() if rows and count})


def entrants(workload: Workload, quick: bool, pythons: Mapping[str, str], setting: Setting) -> list[Contestant]:
    """Return the measured contestants; the naive loop first, fedmpi last."""
    device, processes = setting.device or "cpu", setting.processes
    joins = "pfl" in pythons and not workload.wanted  # it samples clients, not single samples of all clients
    others = [by_peer(workload, "pfl", pythons["pfl"], processes, quick, device)] if joins else []
    one, several = ("gradient", "gradient") if workload.wanted else ("naive", "tight")
    floors = [by_floor(workload, name, n, quick, device) for name, n in ((one, 1), (several, processes))]
    return [*floors, *others, *(by_fedmpi(workload, ranks, device=device) for ranks in (1, setting.ranks))]


def line(
    workload: Workload,
    rows: Sequence[Row],
    batches: Sequence[tuple[int, Step]],
    machine: Machine,
    engine: str,
    setting: Setting = ON_CORES,
) -> str:
    """Return a row of the table; `batches` gives the number of batches of each kind in a round, the largest first."""
    naive, tight, *peer, one, several = rows
    (_, step), sizes = batches[0], workload.sizes()
    steps = naive.steps or sum(count for count, _ in batches)
    roofline = sum(count * part.seconds(machine) for count, part in batches)
    whole = f"K = {workload.wanted}" if workload.wanted else f"B = {workload.batch}"
    whole += f", E = {workload.epochs}" * (workload.epochs > 1)
    cells = [
        f"{workload.name}{' !' if _disturbed(rows) else ''}",
        f"{workload.cohort or workload.clients:,} × {_range(sizes)}, {whole}",
        f"{1e3 * statistics.median(naive.seconds) / steps:.2f}" if naive.seconds else "failed",
        _ratio(tight),
        _ratio(peer[0]) if peer else "",
        _ratio(one),
        _ratio(several),
        engine,
        f"{step.flops / 1e6:.0f}",
        f"{step.bytes / 1e6:.1f}",
        f"{1e3 * step.seconds(machine):.3g}",
        f"{statistics.median(one.seconds) / roofline:.1f}" if one.seconds else "",
        f"{setting.cores * statistics.median(several.seconds) / roofline:.1f}" if several.seconds else "",
    ]
    return f"| {' | '.join(cells)} |"


def _range(sizes: Ints) -> str:
    least, most = int(sizes.min()), int(sizes.max())
    return str(most) if least == most else f"{least} to {most}"


def _disturbed(rows: Sequence[Row]) -> bool:
    return any(other > BUSY_ELSEWHERE for row in rows for other in row.others)


def _ratio(row: Row) -> str:
    return "failed" if row.failure else f"{statistics.median(row.ratios):.2f}"


def chosen_engine(run: Path) -> str:
    """Return the engine that fedmpi chose in a run, as logged."""
    log = run / "run.log"
    found = re.search(r"engine: auto: .*?(batched|sequential)", log.read_text()) if log.exists() else None
    return found[1] if found else ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", choices=[[], *MODELS, *OWN, *WORKLOADS], help="which; all models by default"
    )
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[], metavar="pfl=PYTHON", help="where pfl is installed")
    parser.add_argument("--quick", action="store_true", help="one tiny model, a smoke test")
    parser.add_argument("--device", help="all entrants on this device, e.g. cuda; by default on the processor's cores")
    asked = parser.parse_args()
    chosen = QUICK_MODELS if asked.quick else MODELS | OWN
    known = QUICK_MODELS if asked.quick else chosen | WORKLOADS
    with refusing():
        pythons = find_peers(asked.peer, known=["pfl"])
    setting = ON_CORES if asked.device is None else Setting(asked.device, processes=1, ranks=2, cores=1)
    device = CPU if asked.device is None else torch.device(asked.device)
    machine = measure_machine(device, asked.quick)
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{described(device)}; {machine}\n"
    )
    print(f"| {' | '.join(setting.columns)} |\n|---|---|{'---:|' * (len(setting.columns) - 2)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedmpi-rooflines-") as temporary:
        data, work = Path(temporary) / "data", Path(temporary) / "work"
        for name in asked.models or chosen:
            workload = known[name]
            rows = run_all(workload, entrants(workload, asked.quick, pythons, setting), data, work, asked.passes)
            engine = chosen_engine(result_folder(work, workload, 0, len(rows) - 2) / "run")
            store = prepare(workload, data)
            x, y = all_samples(store)
            batches = [
                (count, count_step(workload.network(store).train(), x[-size:], y[-size:]))
                for size, count in sorted(batches_of_a_round(workload).items(), reverse=True)
            ]
            print(line(workload, rows, batches, machine, engine, setting), flush=True)


if __name__ == "__main__":
    main()
