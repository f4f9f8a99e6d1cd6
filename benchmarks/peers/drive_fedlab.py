"""FedLab: its standalone serial pipeline. Its handler averages without weights, so this driver passes the weights to
FedLab's own aggregator."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.race import Race


class Clients:
    """Clients' samples in the form that FedLab requests."""

    def __init__(self, race: Race):
        self.race = race

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*self.race.clients[client]), batch_size=batch_size, shuffle=True)


class Server(SyncServerHandler):  # type: ignore[misc]
    """Server with given cohorts that averages by number of samples."""

    def __init__(self, race: Race, logger: logging.Logger):
        workload = race.workload
        super().__init__(race.network, workload.rounds, workload.cohort / workload.clients, logger=logger)
        self.race = race
        self.cohort: list[int] = []
        self.started = 0.0

    @property
    def num_clients_per_round(self) -> int:
        return len(self.cohort)

    def sample_clients(self) -> list[int]:
        self.started = time.perf_counter()
        self.cohort = self.race.workload.participants(self.round).tolist()
        return self.cohort

    def global_update(self, buffer: list[list[torch.Tensor]]) -> None:
        samples = [len(self.race.clients[client][1]) for client in self.cohort]
        mean = Aggregators.fedavg_aggregate([upload[0] for upload in buffer], samples)
        SerializationTool.deserialize_model(self._model, mean)
        self.race.note(time.perf_counter() - self.started)


class Pipeline(StandalonePipeline):  # type: ignore[misc]
    """Pipeline without evaluation between the rounds."""

    def evaluate(self) -> None:
        pass


def main() -> None:
    race = Race(__doc__)
    race.count_steps()
    quiet = logging.getLogger("quiet")
    server = Server(race, quiet)
    trainer = SGDSerialClientTrainer(race.network, len(race.clients), logger=quiet)
    trainer.setup_dataset(Clients(race))
    trainer.setup_optim(1, race.workload.batch, race.workload.lr)
    Pipeline(server, trainer).main()
    race.finish(server.model)


if __name__ == "__main__":
    main()
