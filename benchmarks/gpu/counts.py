"""Kernels, copies and waits of the host per local step on a GPU, counted without one.

    python -m benchmarks.gpu.counts              both engines, every case
    python -m benchmarks.gpu.counts mlp lstm

The emulated device of the tests computes on the CPU. The counts per step are those of a second epoch; the rest happens
once per round: loading, batches, the sum. A step of the batched engine trains all clients, a sequential step one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import torch

from benchmarks.engines import Synthetic
from benchmarks.gpu.rounds import ENGINES
from benchmarks.measure import table
from benchmarks.workloads import MODELS, WORKLOADS, Workload
from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Streams
from fedmpi.local.batched.layers import NotStackable
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, RoundJob
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from tests.local.elsewhere import elsewhere, transfers

CASES = {
    "W1": replace(WORKLOADS["W1"], clients=4, each=40),
    "W2": replace(WORKLOADS["W2"], clients=4, each=40),
    **{name: replace(w, clients=2, each=2 * w.batch) for name, w in MODELS.items() if name != "resnet18"},
}
KINDS = ("kernel", "to the device", "to the host")
HEADS = (
    "case",
    "engine",
    *(f"{what} per {per}" for what in ("kernels", "copies", "waits") for per in ("step", "round")),
)


def counts(workload: Workload, engine: str, epochs: int, device: torch.device) -> tuple[Counter[str], int]:
    """Return the counts of a round by kind, and the number of consecutive steps."""
    flat = FlatModel(build(workload.model, {}, workload.description, 1), device)
    made = ENGINES[engine](SequentialEngine(flat, Synthetic(workload, device), Streams(1)))
    tasks = [ClientTask(client, None, 1 / workload.clients) for client in range(workload.clients)]
    rule = LocalRule(lr=0.01, epochs=epochs, batch_size=workload.batch)
    job = RoundJob(flat.initial, rule, 0, FloatSum(torch.zeros(flat.size, device=device)))
    made.train(tasks, job)  # the second round has all buffers
    with transfers() as found:
        report = made.train(tasks, job)
    return Counter(found), report.steps // (1 if "sequential" in engine else workload.clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], metavar="CASE")
    rows = []
    torch.cuda.mem_get_info = lambda device=None: (64 << 30, 80 << 30)  # type: ignore[assignment]
    with elsewhere() as device:
        for name in parser.parse_args().cases or CASES:
            for engine in ENGINES:
                try:
                    (one, steps), (two, more) = (counts(CASES[name], engine, epochs, device) for epochs in (1, 2))
                except NotStackable:
                    continue
                step = {kind: (two[kind] - one[kind]) / (more - steps) for kind in KINDS}
                cells = [value for kind in KINDS for value in (step[kind], one[kind] - step[kind] * steps)]
                rows.append([name, engine, *(f"{value:.1f}" for value in cells)])
    print(table(HEADS, rows))


if __name__ == "__main__":
    main()
