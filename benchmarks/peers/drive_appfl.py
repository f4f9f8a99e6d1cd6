"""APPFL: a server and one client agent per selected client in one process, with its option `optimize_memory` off. The
default collects garbage about four times per client, which takes 97 % of the time."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
import time
from typing import Any

from appfl.agent import ClientAgent, ServerAgent
from appfl.config import ClientAgentConfig, ServerAgentConfig
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.peers.race import Race


def network() -> nn.Module:
    """Build the network; APPFL imports this file again to find the network, the samples and the metric."""
    return copy.deepcopy(Race.running.network)


def samples(client: int) -> tuple[TensorDataset, None]:
    return TensorDataset(*Race.running.clients[client]), None


def metric(true: Any, predicted: Any) -> float:
    return 0.0


def server_agent(race: Race, logs: dict[str, str]) -> ServerAgent:
    workload = race.workload
    thrifty = {"optimize_memory": False}
    training = {
        **{"trainer": "VanillaTrainer", "mode": "epoch", "num_local_epochs": 1, "train_data_shuffle": True},
        **{"train_batch_size": workload.batch, "optim": "SGD", "optim_args": {"lr": workload.lr}},
        **{"loss_fn": "CrossEntropyLoss", "metric_path": __file__, "metric_name": "metric", "do_validation": False},
        **{"device": "cpu", "use_dp": False, "clip_grad": False, **logs, **thrifty},
    }
    serving = {
        **{"num_clients": workload.cohort, "num_global_epochs": workload.rounds, "device": "cpu", **logs, **thrifty},
        **{"scheduler": "SyncScheduler", "scheduler_kwargs": {"same_init_model": True, **thrifty}},
        **{"aggregator": "FedAvgAggregator", "aggregator_kwargs": {"client_weights_mode": "sample_size", **thrifty}},
    }
    models = {"model_path": __file__, "model_name": "network"}
    clients = OmegaConf.create({"train_configs": training, "model_configs": models})
    return ServerAgent(OmegaConf.structured(ServerAgentConfig(clients, OmegaConf.create(serving))))


def client_agent(client: int, server: ServerAgent, logs: dict[str, str]) -> ClientAgent:
    training = OmegaConf.create({"logging_id": str(client), "device": "cpu", **logs})
    data = {"dataset_path": __file__, "dataset_name": "samples", "dataset_kwargs": {"client": client}}
    config = ClientAgentConfig(train_configs=training, data_configs=OmegaConf.create(data))
    agent = ClientAgent(OmegaConf.structured(config))
    agent.optimize_memory = False
    agent.load_config(server.get_client_configs())
    server.set_sample_size(client_id=str(client), sample_size=agent.get_sample_size())
    return agent


def train_round(cohort: list[ClientAgent], server: ServerAgent, model: dict[str, Any]) -> dict[str, Any]:
    answer = None
    for agent in cohort:
        agent.load_parameters(model)
        agent.train()
        update, facts = agent.get_parameters()
        answer = server.global_update(client_id=agent.get_id(), local_model=update, blocking=False, **facts)
    assert answer is not None
    mean: dict[str, Any] = answer.result()
    return mean


def main() -> None:
    race = Race(__doc__)
    race.count_steps()
    cohorts = [race.workload.participants(round).tolist() for round in range(race.workload.rounds)]
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        logs = {"logging_output_dirname": folder, "logging_output_filename": "log"}
        server = server_agent(race, logs)
        agents = {client: client_agent(client, server, logs) for client in sorted({k for c in cohorts for k in c})}
        logging.disable(logging.CRITICAL)
        model = server.get_parameters(serial_run=True)
        with contextlib.redirect_stdout(nowhere):
            for cohort in cohorts:
                started = time.perf_counter()
                model = train_round([agents[client] for client in cohort], server, model)
                race.note(time.perf_counter() - started)
    race.network.load_state_dict(model)
    race.finish(race.network)


if __name__ == "__main__":
    main()
