"""Rounds of Astraea on the embedded digits: `mpiexec -n 5 python -m tests.mediators.relay_runs FOLDER`.

`relayed` runs them through sub-communicators, `plain` is Algorithm 1 as three nested loops in one process. One job of
five ranks runs them on all five, and then on two and three of them at the same time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedmpi.aggregation.exact import FixedPointSum, FloatSum
from fedmpi.common.streams import Streams
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.local.optimizers import AdamState
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule, WorkReport
from fedmpi.mediators.relay import RelayReport, place_mediators, plan_relay, run_relay, visiting_order
from fedmpi.mediators.scheduling import greedy
from fedmpi.models.flat import FlatModel
from fedmpi.mpi import Cluster
from fedmpi.mpi.collectives import Communicators
from tests.quick_end import end_quickly

ROUNDS, CLIENTS = 3, 24
SGD = LocalRule(lr=0.1, batch_size=24)
ADAM = LocalRule("adam", lr=0.003, epochs=2, batch_size=40)
Owners = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Variant:
    """One way to run the rounds."""

    rule: LocalRule = SGD
    exact: bool = True
    owners: str = "ranges"
    keep: bool = False
    most: int = 5
    epochs: int = 2


VARIANTS = {
    "exact": Variant(),
    "float": Variant(exact=False),
    "scattered": Variant(owners="scattered"),
    "placed": Variant(owners="placed"),
    "kept-adam": Variant(rule=ADAM, keep=True),
    "fresh-adam": Variant(rule=ADAM),
    "proximal": Variant(rule=replace(SGD, proximal_mu=0.5)),
    "fedavg": Variant(most=1, epochs=1),
}


def digits_engine() -> SequentialEngine:
    """A small network with dropout on the digits, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 12), nn.LayerNorm(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10)
        )
    data = ClientData(open_store(f"digits:clients={CLIENTS},alpha=0.5"))
    return SequentialEngine(FlatModel(module), data, Streams(11))


def cohort(engine: SequentialEngine, round: int, most: int) -> tuple[np.ndarray, np.ndarray, dict[int, ClientTask]]:
    """Clients, mediators and tasks of a round; two participants have no sampled rows, two only some."""
    assert isinstance(engine.source, ClientData)
    clients = np.sort(np.random.default_rng(round).choice(CLIENTS, 17, replace=False))
    mediators = greedy(engine.source.store.class_counts(clients), most)
    rows = {int(k): np.arange(0, int(engine.source.sizes[k]), 3) for k in clients[[3, 8]]}
    used = {int(k): len(rows[int(k)]) if int(k) in rows else int(engine.source.sizes[k]) for k in clients}
    used = {k: n for k, n in used.items() if k not in clients[[5, 6]]}
    total = sum(used.values())
    return clients, mediators, {k: ClientTask(k, rows.get(k), n / total) for k, n in used.items()}


def plain(variant: Variant, engine: SequentialEngine) -> Tensor:
    """Algorithm 1, line by line."""
    w = engine.model.initial.clone()
    for t in range(ROUNDS):
        clients, mediators, tasks = cohort(engine, t, variant.most)
        buffer = np.empty(engine.model.size, np.int64 if variant.exact else np.float32)
        total = sum_of(variant, buffer)
        for ring in visiting_order(clients, mediators):
            model, state = w.clone(), AdamState.fresh(engine.model) if variant.keep else None
            for epoch in range(variant.epochs):
                for k in ring.tolist():
                    if k in tasks:
                        engine.advance(model, replace(tasks[k], visit=epoch), variant.rule, t, state)
            total.add(model - w, sum(tasks[k].coefficient for k in ring.tolist() if k in tasks))
        total.flush()
        w += total.to_update(buffer)
    return w


def relayed(variant: Variant, engine: SequentialEngine, cluster: Cluster) -> tuple[Tensor, RelayReport]:
    """The same rounds on the workers of a cluster; the report adds up this rank's."""
    w, sums = engine.model.initial.clone(), RelayReport(WorkReport())
    for t in range(ROUNDS):
        clients, mediators, tasks = cohort(engine, t, variant.most)
        costs = np.asarray(engine.source.sizes)[clients].astype(float)
        owners = owners_of(variant, clients, mediators, costs, cluster.workers)
        plan = plan_relay(owners, clients, mediators, variant.epochs, costs, cluster.workers)
        mine = {k: task for k, task in tasks.items() if owners[np.searchsorted(clients, k)] == cluster.worker}
        buffer = cluster.sum_tensor(engine.model.size, np.int64 if variant.exact else np.float32)
        total = sum_of(variant, buffer, cluster.size)
        report = run_relay(cluster, engine, plan, mine, w, variant.rule, t, total, variant.keep)
        total.flush()
        w += total.to_update(cluster.reduce_tensor())
        sums.work += report.work
        sums.visits += report.visits
        sums.hops += report.hops
    return w, sums


def sum_of(variant: Variant, buffer: np.ndarray, ranks: int = 1) -> FixedPointSum | FloatSum:
    return FixedPointSum(buffer, ranks=ranks) if variant.exact else FloatSum(buffer)


def owners_of(
    variant: Variant, clients: np.ndarray, mediators: np.ndarray, costs: np.ndarray, workers: int
) -> np.ndarray:
    if variant.owners == "placed":
        return place_mediators(costs, mediators, workers)
    if variant.owners == "scattered":
        return np.random.default_rng(99).integers(0, workers, CLIENTS)[clients]
    return clients * workers // CLIENTS


def run_all(cluster: Cluster, folder: Path) -> None:
    """Run all variants on a cluster; rank 0 saves models and counts as `ranks.npz`."""
    engine, results = digits_engine(), {}
    for name, variant in VARIANTS.items():
        w, report = relayed(variant, engine, cluster)
        work = report.work
        counts = [work.clients, work.samples, work.steps, report.visits, report.hops, work.loss_sum, work.weight]
        rows = cluster.gather(np.array(counts, np.float64))
        moved = cluster.share_bytes()["relay"]
        if rows is not None:
            results[name] = w.numpy()
            results[f"{name}-counts"] = np.append(np.sum(rows, axis=0), moved)
    if cluster.is_server:
        np.savez(folder / f"{cluster.size}.npz", **results)
    cluster.close()


def main(folder: Path) -> None:
    """All ranks together, then the first two beside the others."""
    run_all(Cluster.connect(), folder)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part = world.Split(int(world.rank >= 2), world.rank)
    run_all(Cluster(Communicators.split(part), "part of the job"), folder)
    part.Free()


if __name__ == "__main__":
    end_quickly()
    main(Path(sys.argv[1]))
