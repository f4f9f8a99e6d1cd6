"""Cost of evaluating every client: `evaluation.clients` against a plain PyTorch pass over the samples.

    python -m benchmarks.client_evaluation                       10,000 clients, 1 and 2 processes
    python -m benchmarks.client_evaluation --model cnn --rows 20

The plain pass ignores clients. Each process takes an equal share of the samples of the same shards and passes 2,000 at
a time through the same network, for the mean loss and the accuracy of all. "as stored" normalizes the bytes during the
pass, as fedmpi does. "in memory" has normalized tensors before the clock starts. fedmpi's seconds are the phase
`clients` of its own records, which ends when rank 0 has the results of every client. All variants alternate, and ratios
are taken within a pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.contestants import REPOSITORY, fedmpi_command, read_records
from benchmarks.measure import run_tree
from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from data_prep.writer import write_shards
from fedmpi.common.types import Ints
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from fedmpi.models import build

ROWS_AT_ONCE = 2000
EVALUATIONS = 6
"""Number of evaluations. The first is not counted, because it reads files and allocates memory."""
IMAGE, CLASSES, POOL = (1, 28, 28), 10, 4096
MEAN, STD = 0.5, 0.3
OPTIONS: dict[str, dict[str, Any]] = {"mlp": {"hidden": [200, 200]}, "cnn": {}}
WAYS = ("plain, as stored", "plain, in memory", "fedmpi")


def sizes_of(clients: int, rows: int) -> Ints:
    """Draw the samples of each client, int64 (N,): log-normal (σ = 0.8), about `rows` on average."""
    drawn = np.random.default_rng(0).lognormal(0.0, 0.8, clients)
    return np.maximum(1, np.round(drawn * rows / drawn.mean())).astype(np.int64)


def make_shards(folder: Path, clients: int, rows: int) -> None:
    """Write a folder of shards of synthetic images."""
    sizes, generator = sizes_of(clients, rows), np.random.default_rng(1)
    pool = generator.integers(0, 256, (POOL, *IMAGE), np.uint8)
    labels = generator.integers(0, CLASSES, int(sizes.sum()))
    raw = RawDataset(
        name="generated",
        task="image",
        classes=CLASSES,
        class_names=tuple(map(str, range(CLASSES))),
        feature_shape=IMAGE,
        dtype="uint8",
        mean=(MEAN,),
        std=(STD,),
        labels=labels,
        users=None,
        user_names=None,
        read=lambda wanted: pool.take(wanted % POOL, axis=0),
        test_x=pool[:100],
        test_y=labels[:100],
        skipped=0,
        licence="none: generated",
        citation="",
    )
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    made = Partition(np.arange(offsets[-1]), offsets, "contiguous", {})
    write_shards(raw, made, folder, 4, 0, "python -m benchmarks.client_evaluation")


def rows_between(store: ShardStore, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows start … stop − 1 of the training part, normalized."""
    pieces = store.span(start, stop)
    x = torch.cat([torch.from_numpy(np.array(x)) for x, _ in pieces])
    y = torch.cat([torch.from_numpy(y.astype(np.int64)) for _, y in pieces])
    return x.float().div_(255 * STD).sub_(MEAN / STD), y


def plain_pass(store: ShardStore, network: nn.Module, share: tuple[int, int], kept: list[Any] | None) -> float:
    """Return the seconds of one pass over a share of the rows."""
    started, loss, right = time.perf_counter(), 0.0, 0
    with torch.inference_mode():
        for number, first in enumerate(range(*share, ROWS_AT_ONCE)):
            last = min(first + ROWS_AT_ONCE, share[1])
            x, y = rows_between(store, first, last) if kept is None else kept[number]
            outputs = network(x)
            loss += float(nn.functional.cross_entropy(outputs, y, reduction="sum"))
            right += int((outputs.argmax(1) == y).sum())
    return time.perf_counter() - started


def plain(process: int, processes: int, folder: Path, model: str, in_memory: bool, barrier: Barrier, out: Any) -> None:
    """Run one process of the plain pass; report the seconds of each pass, from the common start to the common end."""
    torch.set_num_threads(1)
    store = open_store(folder)
    network = build(model, OPTIONS[model], store.description, 0).eval()
    share = store.samples * process // processes, store.samples * (process + 1) // processes
    borders = range(*share, ROWS_AT_ONCE)
    kept = [rows_between(store, a, min(a + ROWS_AT_ONCE, share[1])) for a in borders] if in_memory else None
    seconds = []
    for _ in range(EVALUATIONS):
        barrier.wait()
        started = time.perf_counter()
        plain_pass(store, network, share, kept)
        barrier.wait()
        seconds.append(time.perf_counter() - started)
    if process == 0:
        out.put(seconds)


def seconds_of_plain(processes: int, folder: Path, model: str, in_memory: bool) -> float:
    """Return the median seconds of a pass over all rows by `processes` processes."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=plain, args=(k, processes, folder, model, in_memory, barrier, out))
        for k in range(processes)
    ]
    for process in started:
        process.start()
    seconds = out.get(timeout=600)
    for process in started:
        process.join()
    return statistics.median(seconds[1:])


def seconds_of_fedmpi(ranks: int, folder: Path, model: str, out: Path) -> float:
    """Return the median seconds of an evaluation of all clients by `ranks` ranks."""
    keys = {
        "preset": "fedavg",
        "data.source": str(folder),
        "model": model,
        **{f"model.{name}": value for name, value in OPTIONS[model].items()},
        "rounds": EVALUATIONS,
        "clients.count": 1,
        "local.steps": 1,
        "cluster.threads": 1,
        "cluster.server_trains": "always",
        "evaluation.every": 10**6,
        "evaluation.clients": "all",
        "evaluation.clients_every": 1,
        "logging.tensorboard": "false",
        "checkpoint.every": 0,
    }
    out.mkdir(parents=True)
    run_tree(fedmpi_command(ranks, keys, out), out / "log.txt", {"OMP_NUM_THREADS": "1"}, REPOSITORY)
    return statistics.median(record["phase_seconds"]["clients"] for record in read_records(out)[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=60, help="samples of a client on average (60)")
    parser.add_argument("--model", choices=[*OPTIONS], default="mlp")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--passes", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "shards"
        make_shards(folder, asked.clients, asked.rows)
        print(
            f"{asked.clients:,} clients, {open_store(folder).samples:,} rows, {asked.model}; median of {asked.passes}"
        )
        print(
            "| processes | " + " | ".join(f"{way}, s" for way in WAYS) + " | fedmpi / as stored | fedmpi / in memory |"
        )
        print("|---:|---:|---:|---:|---:|---:|", flush=True)
        for processes in asked.processes:
            found = []
            for number in range(asked.passes):
                stored, held = (seconds_of_plain(processes, folder, asked.model, way) for way in (False, True))
                ours = seconds_of_fedmpi(processes, folder, asked.model, Path(work) / f"{processes}-{number}")
                found.append((stored, held, ours))
            medians = " | ".join(f"{statistics.median(column):.3f}" for column in zip(*found, strict=True))
            shares = [sorted(ours / row[way] for *row, ours in found) for way in (0, 1)]
            cells = " | ".join(f"{statistics.median(s):.2f} ({s[0]:.2f} to {s[-1]:.2f})" for s in shares)
            print(f"| {processes} | {medians} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
