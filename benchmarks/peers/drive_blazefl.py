"""BlazeFL: its FedAvg with the serial trainer (1 process) or two threads (its fastest parallel mode on a CPU)."""

from __future__ import annotations

import copy
import time
from typing import Any

from blazefl.contrib import fedavg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.race import Race

fedavg.tqdm = lambda iterable, **_: iterable  # disable its progress bar


class Models:
    """Models for BlazeFL, which requests one per client; a copy is cheaper than a new one."""

    def __init__(self, network: nn.Module):
        self.network = network

    def select_model(self, name: str) -> nn.Module:
        return copy.deepcopy(self.network)


class Clients:
    """Clients' samples in the form that BlazeFL requests."""

    def __init__(self, race: Race):
        self.race = race

    def get_dataset(self, type_: Any, cid: int) -> TensorDataset:
        return TensorDataset(*self.race.clients[cid])

    def set_dataset(self, type_: Any, cid: int, dataset: Any) -> None:
        pass

    def get_dataloader(self, type_: Any, cid: int, batch_size: int, generator: Any = None) -> DataLoader[Any]:
        data = TensorDataset(*self.race.clients[cid])
        return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)


def main() -> None:
    race = Race(__doc__)
    workload, models, clients = race.workload, Models(race.network), Clients(race)
    everybody = len(race.clients)
    options = {
        "model_selector": models,
        "model_name": "network",
        "dataset": clients,
        "device": "cpu",
        "num_clients": everybody,
        "epochs": 1,
        "batch_size": workload.batch,
        "lr": workload.lr,
        "seed": 0,
    }
    server = fedavg.FedAvgBaseServerHandler(
        models, "network", clients, workload.rounds, everybody, workload.cohort / everybody, "cpu", workload.batch, 0
    )
    if race.processes == 1:
        trainer = fedavg.FedAvgBaseClientTrainer(**options)
    else:
        trainer = fedavg.FedAvgThreadPoolClientTrainer(**options, num_parallels=race.processes)
    for round in range(workload.rounds):
        started = time.perf_counter()
        trainer.local_process(server.downlink_package(), workload.participants(round).tolist())
        for update in trainer.uplink_package():
            server.load(update)
        race.note(time.perf_counter() - started)
    race.finish(server.model)


if __name__ == "__main__":
    main()
