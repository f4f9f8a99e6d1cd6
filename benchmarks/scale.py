"""Scaling of fedmpi's cost with the clients, the cohort, the model and the ranks, one at a time."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_records
from benchmarks.measure import run_tree
from benchmarks.workloads import WARM_UP
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.types import Ints

VALUES, CLASSES = 32, 10
CLIENTS = (10**2, 10**3, 10**4, 10**5, 10**6)
COHORTS = (10, 100, 1000, 10_000)
PARAMETERS = (10**5, 10**6, 10**7, 10**8)
RANKS = (1, 2, 3, 4, 8)
BYTES_PER_PARAMETER = 40
"""Bytes of a rank per parameter: model, slot of the sum, its result, working vector, gradients, and server step."""


@dataclass(frozen=True)
class Run:
    """One measured run."""

    round_ms: float
    plan_ms: float
    reduce_ms: float
    start_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Case:
    """One row: varied quantity, number of ranks, fedmpi's keys beside the common ones, environment variables."""

    label: str
    ranks: int
    keys: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


def scale(work: Path, quick: bool) -> str:
    """Return the tables as Markdown; `quick` runs the first two rows of each."""
    parts = []
    for title, what, cases in _experiments(work, CLIENTS[:2] if quick else CLIENTS):
        rows = [(case.label, _run(work, case)) for case in (cases[:2] if quick else cases)]
        parts.append(_table(title, what, rows))
        print(parts[-1], file=sys.stderr, flush=True)
    return "\n\n".join(parts)


def _experiments(work: Path, clients: Sequence[int]) -> Iterator[tuple[str, str, list[Case]]]:
    small = {"preset": "fedavg", "model.hidden": "[96]", "local.lr": 0.01}
    asked = {"preset": "fedsampling", "model.hidden": "[96]"}
    shards = {n: {"data.source": _population(work, n)} for n in clients}
    yield (
        "Clients (FedAvg, 50 a round, MLP of 4,000 parameters, 2 ranks)",
        "clients",
        [Case(f"{n:,}", 2, {**small, **shards[n], "clients.count": 50}) for n in clients],
    )
    yield (
        "Clients (FedSampling, all asked, K = 2048, 2 ranks)",
        "clients",
        [Case(f"{n:,}", 2, {**asked, **shards[n]}) for n in clients],
    )
    most = max(clients)
    yield (
        f"Cohort (of {most:,} clients, 2 ranks)",
        "participants",
        [Case(f"{m:,}", 2, {**small, **shards[most], "clients.count": m}) for m in COHORTS if m < most],
    )
    some = {**shards[clients[0]], "clients.count": 4}
    room = 0.6 * psutil.virtual_memory().available / (2 * BYTES_PER_PARAMETER)
    yield (
        "Parameters (4 clients a round, one step each, 2 ranks)",
        "parameters",
        [Case(f"{p:,}", 2, {**some, **_wide(p)}) for p in PARAMETERS if p <= room],
    )
    heavy = {**shards[clients[0]], **_wide(10**5), "clients.sampler": "all"}
    heavy |= {"local.epochs": 10, "local.batch_size": 1}
    yield (
        f"Ranks on {os.cpu_count()} cores ({clients[0]} clients a round, 10^5 parameters)",
        "ranks",
        [Case(str(n), n, heavy) for n in RANKS]
        + [Case(f"{n} as on two hosts", n, heavy, {"MPIR_CVAR_NUM_CLIQUES": "2"}) for n in (4, 8)],
    )


def _wide(parameters: int) -> dict[str, Any]:
    width = (parameters - CLASSES) // (VALUES + CLASSES + 1)
    return {"preset": "fedavg", "model.hidden": f"[{width}]", "local.lr": 0.01}


def _population(work: Path, clients: int) -> Path:
    """Write shards of clients with 1 to 4 small vectors."""
    home = work / f"population-{clients}"
    if home.exists():
        return home
    generator = np.random.default_rng(clients)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(1, 5, clients))])
    n = int(offsets[-1])
    y = generator.integers(0, CLASSES, n)
    x = generator.standard_normal((n, VALUES), dtype=np.float32)
    x[np.arange(n), y] += 2
    write_shards(
        vectors(x, y, CLASSES),
        Partition(np.arange(n), offsets, "contiguous", {}),
        home,
        8,
        0,
        "python -m benchmarks --scale",
    )
    return home


def vectors(x: NDArray[np.float32], y: Ints, classes: int) -> RawDataset:
    """Return vectors x (n, width) with labels y (n,) as a data set to partition; the first thousand also test it."""
    return RawDataset(
        name="vectors",
        task="vector",
        classes=classes,
        class_names=tuple(map(str, range(classes))),
        feature_shape=x.shape[1:],
        dtype="float32",
        mean=(),
        std=(),
        labels=y,
        users=None,
        user_names=None,
        read=lambda rows: x[rows],
        test_x=x[:1000],
        test_y=y[:1000],
        skipped=0,
        licence="none: generated",
        citation="",
    )


def _run(work: Path, case: Case) -> Run:
    out = work / f"scale-{time.monotonic_ns()}"
    out.mkdir()
    common = {"rounds": 12, "evaluation.every": 10**6, "checkpoint.every": 0, "logging.tensorboard": "false"}
    command = fedmpi_command(case.ranks, {**case.keys, **common}, out)
    started = time.monotonic()
    used = run_tree(command, out / "log.txt", {"OMP_NUM_THREADS": "1", **case.environment}, REPOSITORY)
    wall = time.monotonic() - started
    records = read_records(out)

    def median(name: str) -> float:
        return 1e3 * statistics.median(float(record["phase_seconds"][name]) for record in records[WARM_UP:])

    seconds = [record["seconds"] for record in records]
    return Run(
        1e3 * statistics.median(seconds[WARM_UP:]),
        median("plan"),
        median("reduce"),
        wall - sum(seconds),
        used.peak_bytes,
    )


def _table(title: str, what: str, rows: list[tuple[str, Run]]) -> str:
    lines = [
        f"### {title}",
        "",
        f"| {what} | ms a round | plan ms | sum ms (waiting included) | start and end s | peak MB, all ranks |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for name, run in rows:
        cells = (run.round_ms, run.plan_ms, run.reduce_ms, run.start_seconds)
        lines.append(f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + f" | {run.peak_bytes / 1e6:.0f} |")
    return "\n".join(lines)
