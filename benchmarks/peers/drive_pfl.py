"""pfl (Apple, pfl-research): SimulatedBackend and FederatedAveraging; two processes under torchrun with gloo.

pfl uses a GPU if torch finds one, and moves every batch there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch.nn.functional import cross_entropy

from benchmarks.measure import wait_for
from benchmarks.peers.race import Race


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Timer of the rounds between pfl's own calls."""

    def __init__(self, race: Race):
        self.race = race
        self.started = 0.0

    def on_train_begin(self, *, model: Any) -> Any:
        self.started = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        wait_for(next(self.race.network.parameters()).device)
        self.race.note(time.perf_counter() - self.started)
        self.started = time.perf_counter()
        return False, Metrics()


def main() -> None:
    race = Race(__doc__)
    workload, network = race.workload, race.network

    def loss(x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        network.train(not eval)
        return cross_entropy(network(x), y)

    network.loss = loss  # pfl calls these two methods of the user's module
    network.metrics = lambda x, y, eval=False: {}

    def cohorts() -> Iterator[int]:
        for round in range(workload.rounds):
            yield from workload.participants(round).tolist()
        while True:  # processes request some clients beyond the last cohort
            yield 0

    users = cohorts()
    data = FederatedDataset(lambda k: Dataset([*race.clients[k]], user_id=str(k)), lambda: next(users))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=workload.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_learning_rate=workload.lr, local_num_epochs=workload.epochs, local_batch_size=workload.batch
        ),
        callbacks=[Clock(race)],
        send_metrics_to_platform=False,
    )
    ranks = pytorch_ops.distributed
    if ranks.global_rank == 0:
        race.finish(network)
    if ranks.world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
