"""fluke: FedAVG with its own FastDataLoader, sequential clients; clients with a single sample train as well."""

from __future__ import annotations

import time
from typing import Any

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

from benchmarks.peers.race import Race


class Clock:
    """Timer of the rounds between fluke's own calls."""

    def __init__(self, race: Race):
        self.race = race
        self.started = 0.0

    def start_round(self, **_: Any) -> None:
        self.started = time.perf_counter()

    def end_round(self, **_: Any) -> None:
        self.race.note(time.perf_counter() - self.started)


def settings(race: Race) -> DDict:
    """Return the hyper-parameters in the form of fluke's configuration files."""
    workload = race.workload
    client = DDict(
        batch_size=workload.batch,
        local_epochs=1,
        loss="CrossEntropyLoss",
        optimizer=DDict(name="SGD", lr=workload.lr),
        scheduler=DDict(name="StepLR", step_size=1, gamma=1.0),
    )
    return DDict(client=client, server=DDict(weighted=True), model=race.network)


def main() -> None:
    race = Race(__doc__)
    race.count_steps()
    workload, everybody = race.workload, len(race.clients)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    nothing = {"pre_fit": False, "post_fit": False, "server": False, "locals": False}
    environment.set_eval_cfg(task="classification", eval_every=10**6, **nothing)
    loaders = [
        FastDataLoader(x, y, num_labels=workload.classes, batch_size=workload.batch, shuffle=True, skip_singleton=False)
        for x, y in race.clients
    ]
    samples = DummyDataContainer(loaders, [None] * everybody, loaders[0], workload.classes)
    averaging = FedAVG(everybody, DataSplitter(samples, distribution="iid"), settings(race))
    server = averaging.server
    cohorts = (workload.participants(round) for round in range(workload.rounds))
    server.get_eligible_clients = lambda share: [averaging.clients[k] for k in next(cohorts)]
    averaging.attach(Clock(race))
    averaging.run(workload.rounds, workload.cohort / everybody, finalize=False)
    race.finish(server.model)


if __name__ == "__main__":
    main()
