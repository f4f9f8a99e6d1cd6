"""Built-in models at the papers' batch size and users' own, beside the naive loop and beside what the machine allows.

    python -m benchmarks.rooflines                       all of them
    python -m benchmarks.rooflines lstm lenet            some
    python -m benchmarks.rooflines --peer pfl=PYTHON     pfl with two processes as well

The roofline of a step is the larger of two times on one core: its floating-point operations at the speed of a large
matrix product, and the bytes that it moves at the speed of a copy, both measured in the same run. Operations are
counted by torch in a forward and a backward pass; bytes are every layer's output and its gradient, written and read
once each, and the values that are trained, read twice, changed once; of word vectors only those of the batch's words.
Rows that others disturbed are marked: more than 0.3 cores busy elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.compare import BUSY_ELSEWHERE, Row, result_folder, run_all
from benchmarks.contestants import Contestant, by_fedmpi, by_floor, by_peer
from benchmarks.workloads import MODELS, OWN, QUICK_MODELS, Workload, client_tensors, prepare
from fedmpi.common.types import Ints

FLOAT_BYTES = 4
COLUMNS = (
    "model", "clients", "naive ms a step", "tight, 2 processes", "pfl, 2 processes", "1 rank", "3 ranks", "engine",
    "MFLOP a step", "MB a step", "roofline ms a step", "1 rank / roofline", "3 ranks / half the roofline",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """One core: operations a second of a large product of matrices, bytes a second that a large copy moves."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Step:
    """What one step of one client asks for: floating-point operations and bytes."""

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """Its roofline on one core."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)


def measure_machine(size: int = 1536, values: int = 1 << 26, trials: int = 8) -> Machine:
    """The best of some trials on one thread: products of size × size, copies of that many float32."""
    torch.set_num_threads(1)
    left, right, product = (torch.rand(size, size) for _ in range(3))
    source, target = torch.rand(values), torch.empty(values)
    multiply = _best(lambda: torch.mm(left, right, out=product), trials)
    copy = _best(lambda: target.copy_(source), trials)
    return Machine(2 * size**3 / multiply, 2 * FLOAT_BYTES * values / copy)


def _best(call: Callable[[], object], trials: int) -> float:
    """Least processor time of some trials on one thread."""
    seconds = []
    for _ in range(trials):
        began = time.process_time()
        call()
        seconds.append(time.process_time() - began)
    return min(seconds)


def count_step(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Operations and bytes of a forward and a backward pass over one batch, and of plain SGD."""
    network = network.double()  # torch counts the products of recurrent layers in this precision alone
    network(x if not x.is_floating_point() else x.double())  # what is made in the first pass is not counted
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
    """Table of word vectors (by id) -> how many of its values the batch reads."""
    present = 0 if x.is_floating_point() else len(torch.unique(x))
    tables = [part.weight for part in network.modules() if isinstance(part, nn.Embedding)]
    return {id(table): present * table.shape[1] for table in tables if not x.is_floating_point()}


def entrants(workload: Workload, quick: bool, pythons: Mapping[str, str]) -> list[Contestant]:
    """Who is measured; the naive loop first, fedmpi last."""
    others = [by_peer(workload, "pfl", pythons["pfl"], 2)] if "pfl" in pythons else []
    floors = [by_floor(workload, "naive", 1, quick), by_floor(workload, "tight", 2, quick)]
    return [*floors, *others, by_fedmpi(workload, 1), by_fedmpi(workload, 3)]


def line(workload: Workload, rows: Sequence[Row], step: Step, machine: Machine, engine: str) -> str:
    """A model's row of the table."""
    naive, tight, *peer, one, three = rows
    sizes = workload.sizes()
    steps = int((-(-sizes // workload.batch)).sum())
    roofline = steps * step.seconds(machine)
    cells = [
        f"{workload.name}{' !' if _disturbed(rows) else ''}",
        f"{workload.clients} × {_range(sizes)}, B = {workload.batch}",
        f"{1e3 * statistics.median(naive.seconds) / steps:.2f}",
        _ratio(tight),
        _ratio(peer[0]) if peer else "",
        _ratio(one),
        _ratio(three),
        engine,
        f"{step.flops / 1e6:.0f}",
        f"{step.bytes / 1e6:.1f}",
        f"{1e3 * roofline / steps:.2f}",
        f"{statistics.median(one.seconds) / roofline:.1f}" if one.seconds else "",
        f"{statistics.median(three.seconds) / (roofline / 2):.1f}" if three.seconds else "",
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
    """The engine that the trial of a run's first round chose."""
    try:
        return str(json.loads((run / "engine.json").read_text())["engine"])
    except FileNotFoundError:
        return ""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS, *OWN], help="which; all by default")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[], metavar="pfl=PYTHON", help="where pfl is installed")
    parser.add_argument("--quick", action="store_true", help="one tiny model, a smoke test")
    asked = parser.parse_args()
    chosen = QUICK_MODELS if asked.quick else MODELS | OWN
    pythons = dict(peer.split("=", 1) for peer in asked.peer)
    machine = measure_machine(256, 1 << 16) if asked.quick else measure_machine()
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, torch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f}; one core: {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fedmpi-rooflines-") as temporary:
        data, work = Path(temporary) / "data", Path(temporary) / "work"
        for name in asked.models or chosen:
            workload = chosen[name]
            rows = run_all(workload, entrants(workload, asked.quick, pythons), data, work, asked.passes)
            engine = chosen_engine(result_folder(work, workload, 0, len(rows) - 2) / "run")
            store = prepare(workload, data)
            x, y = client_tensors(store)[-1]
            step = count_step(workload.network(store).train(), x[: workload.batch], y[: workload.batch])
            print(line(workload, rows, step, machine, engine), flush=True)


if __name__ == "__main__":
    main()
