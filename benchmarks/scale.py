"""Growth of fedmpi's cost with the clients, the cohort, the model and the ranks, one at a time:

python -m benchmarks.scale
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_records
from benchmarks.measure import run_tree, table
from benchmarks.workloads import WARM_UP, write

VALUES, CLASSES = 32, 10
CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6)
COHORTS = (10, 100, 1000, 10_000)
PARAMETERS = (10**5, 10**6, 10**7, 10**8)
RANKS = (1, 2, 3, 4, 8)
BYTES_PER_PARAMETER = 40
"""Bytes of a rank per parameter: model, slot of the sum, its result, working vector, gradients, and server step."""
HEADS = ("", "ms per round", "plan ms", "sum ms (waiting included)", "start and end s", "peak MB, all ranks")
Cases = list[tuple[str, int, dict[str, Any]]]
"""Varied quantity, number of ranks, fedmpi's keys beside the common ones."""


def experiments(work: Path, clients: Sequence[int]) -> Iterator[tuple[str, Cases]]:
    """Yield title and rows of each table."""
    small = {"preset": "fedavg", "model.hidden": "[96]", "local.lr": 0.01}
    asked = {"preset": "fedsampling", "model.hidden": "[96]"}
    shards = {n: {"data.source": population(work, n)} for n in clients}
    few, most = shards[clients[0]], max(clients)
    yield (
        "Clients (FedAvg, 50 per round, MLP of 4,000 parameters, 2 ranks)",
        [(f"{n:,}", 2, {**small, **shards[n], "clients.count": 50}) for n in clients],
    )
    yield (
        "Clients (FedSampling, all report sizes, K = 2048, 2 ranks)",
        [(f"{n:,}", 2, {**asked, **shards[n]}) for n in clients],
    )
    yield (
        f"Cohort (of {most:,} clients, 2 ranks)",
        [(f"{m:,}", 2, {**small, **shards[most], "clients.count": m}) for m in COHORTS if m < most],
    )
    largest = 0.6 * psutil.virtual_memory().available / (2 * BYTES_PER_PARAMETER)
    yield (
        "Parameters (4 clients per round, one step each, 2 ranks)",
        [(f"{p:,}", 2, {**few, "clients.count": 4, **wide(p)}) for p in PARAMETERS if p <= largest],
    )
    heavy = {**few, **wide(10**5), "clients.sampler": "all", "local.epochs": 10, "local.batch_size": 1}
    yield (
        f"Ranks on {os.cpu_count()} cores ({clients[0]} clients per round, 10^5 parameters)",
        [(str(n), n, heavy) for n in RANKS],
    )


def wide(parameters: int) -> dict[str, Any]:
    """Return the keys of an MLP of one hidden layer with about so many parameters."""
    width = (parameters - CLASSES) // (VALUES + CLASSES + 1)
    return {"preset": "fedavg", "model.hidden": f"[{width}]", "local.lr": 0.01}


def population(work: Path, clients: int) -> Path:
    """Write shards of clients with 1 to 4 small vectors."""
    home = work / f"population-{clients}"
    generator = np.random.default_rng(clients)
    sizes = generator.integers(1, 5, clients)
    y = generator.integers(0, CLASSES, int(sizes.sum()))
    x = generator.standard_normal((len(y), VALUES), dtype=np.float32)
    x[np.arange(len(y)), y] += 2
    write(home, "vector", sizes, (x, y), (x[:1000], y[:1000]), CLASSES)
    return home


def line(work: Path, label: str, ranks: int, keys: dict[str, Any]) -> list[str]:
    """Run one case."""
    out = Path(tempfile.mkdtemp(dir=work))
    common = {"rounds": 12, "evaluation.every": 10**6, "checkpoint.every": 0, "logging.tensorboard": "false"}
    started = time.monotonic()
    command = fedmpi_command(ranks, {**keys, **common}, out)
    used = run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1"}, REPOSITORY)
    wall, records = time.monotonic() - started, read_records(out)
    seconds = [
        [record["seconds"], *(record["phase_seconds"][name] for name in ("plan", "reduce"))] for record in records
    ]
    medians = [1e3 * statistics.median(column) for column in zip(*seconds[WARM_UP:], strict=True)]
    cells = [*medians, wall - sum(row[0] for row in seconds)]
    return [label, *(f"{cell:.1f}" for cell in cells), f"{used.peak_bytes / 1e6:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first two rows of each table")
    few = 2 if parser.parse_args().quick else None
    with tempfile.TemporaryDirectory(prefix="fedmpi-scale-") as folder:
        for title, cases in experiments(Path(folder), CLIENTS[:few]):
            print(f"### {title}\n\n{table(HEADS, [line(Path(folder), *case) for case in cases[:few]])}\n", flush=True)


if __name__ == "__main__":
    main()
