"""Worker utilisation of the relay: equal clients, real training, a growing number of mediators on the same ranks.

    mpiexec -n 3 python -m benchmarks.relay

Rank 0 serves, the others train. In every round all workers start together, and wall time ends with the last worker.
Busy: training and transmission, as a share of workers x wall; median of the rounds, and the best. Planned: the upper
bound given by the order of visits if every visit takes equally long. CPU: CPU time as a share of workers x wall; on a
machine with other work it falls with the cores that the ranks do not get. In the paper's Algorithm 1 a mediator keeps
one worker busy, so M workers need M mediators.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass

import numpy as np
import torch

from fedmpi.aggregation.exact import FloatSum
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule
from fedmpi.mediators.relay import RelayPlan, place_mediators, plan_relay, run_relay
from fedmpi.mediators.scheduling import random_groups
from fedmpi.models import build
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster

CLIENTS, ONLINE, EPOCHS = 48, 24, 2
RULE = LocalRule("adam", lr=0.001, epochs=4, batch_size=10)


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    mediators: int
    placement: str = "owner"
    cohort: str = "even"
    """even: equally many clients of every worker; random: drawn from all clients, as in a run."""


CASES = (
    *(Case(mediators) for mediators in (1, 2, 3, 4, 6, 8, 12)),
    *(Case(mediators, cohort="random") for mediators in (2, 4, 8)),
    *(Case(mediators, "mediator") for mediators in (2, 4, 8)),
)


def cohort(case: Case, boundaries: Ints, generator: np.random.Generator) -> Ints:
    """Draw the selected clients, sorted."""
    if case.cohort == "random":
        return np.sort(generator.choice(CLIENTS, ONLINE, replace=False))
    each = ONLINE // (len(boundaries) - 1)
    owned = zip(boundaries, boundaries[1:], strict=False)
    return np.concatenate([np.sort(generator.choice(np.arange(a, b), each, replace=False)) for a, b in owned])


def round_plan(case: Case, workers: int, generator: np.random.Generator) -> RelayPlan:
    """Plan the relays of a round of equal clients."""
    boundaries = np.arange(workers + 1) * CLIENTS // workers
    clients = cohort(case, boundaries, generator)
    mediators = random_groups(len(clients), -(-len(clients) // case.mediators), generator)
    costs = np.ones(len(clients))
    owners = np.searchsorted(boundaries, clients, side="right") - 1
    if case.placement == "mediator":
        owners = place_mediators(costs, mediators, workers)
    return plan_relay(owners, clients, mediators, EPOCHS, costs, workers)


class Bench:
    """Cluster, clients and model, shared by all rows."""

    def __init__(self, width: int) -> None:
        self.cluster = Cluster.connect()
        torch.set_num_threads(1)
        self.streams = Streams(0)
        data = ClientData(open_store(f"digits:clients={CLIENTS},partition=iid"))
        model = FlatModel(build("mlp", {"hidden": [width, width]}, data.description, 0))
        self.engine = SequentialEngine(model, data, self.streams)
        self.start = model.initial.clone()
        self.buffer = self.cluster.sum_tensor(model.size, np.float32)

    def round(self, case: Case, number: int) -> Floats | None:
        """Return busy, CPU and planned shares and wall seconds of one round, on rank 0."""
        cluster, generator = self.cluster, self.streams.generator(Purpose.SCHEDULE, number)
        plan = round_plan(case, cluster.workers, generator)
        tasks = {k: ClientTask(k, None, 1.0) for leg in plan.of(cluster.worker) for k in leg.clients}
        total = FloatSum(self.buffer)
        total.reset()
        cluster.barrier()
        began, used = time.perf_counter(), time.process_time()
        report = run_relay(cluster, self.engine, plan, tasks, self.start, RULE, number, total)
        wall, cpu = time.perf_counter() - began, time.process_time() - used
        total.flush()
        cluster.reduce_tensor()
        gathered = cluster.gather(np.array([report.busy_seconds, cpu, wall]))
        if gathered is None:
            return None
        busy, cpu, wall = np.array(gathered[1:] or gathered).T
        whole = cluster.workers * wall.max()
        return np.array([busy.sum() / whole, cpu.sum() / whole, plan.efficiency, wall.max()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each row, after one to warm up")
    parser.add_argument(
        "--width", type=int, default=200, help="of the two hidden layers: what travels grows with its square"
    )
    parser.add_argument("--mediators", type=int, nargs="*", help="only the rows of so many mediators, evenly owned")
    asked = parser.parse_args()
    cases = CASES if asked.mediators is None else [Case(mediators) for mediators in asked.mediators]
    bench = Bench(asked.width)
    if bench.cluster.is_server:
        print(f"{bench.cluster.workers} workers, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
        print(
            "| mediators | placement | cohort | planned | busy, median (best) | CPU, median (best) | wall, ms | load |"
        )
        print("|---|---|---|---:|---:|---:|---:|---:|")
    for case in cases:
        rounds = [bench.round(case, number) for number in range(asked.rounds + 1)][1:]
        if bench.cluster.is_server:
            busy, cpu, planned, wall = np.array(rounds).T
            print(
                f"| {case.mediators} | {case.placement} | {case.cohort} | {planned.mean():.1%} | {np.median(busy):.1%} "
                f"({busy.max():.1%}) | {np.median(cpu):.1%} ({cpu.max():.1%}) | {1e3 * np.median(wall):.0f} | "
                f"{os.getloadavg()[0]:.1f} |",
                flush=True,
            )
    bench.cluster.close()


if __name__ == "__main__":
    main()
