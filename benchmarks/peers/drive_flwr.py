"""Flower: ServerApp, ClientApp and FedAvg on its simulation engine (Ray), one actor per process. Clients train as in
Flower's PyTorch quickstart. The server assigns a client to each sampled node, so that cohorts are the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when flwr is imported

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.flwr_client import app
from benchmarks.peers.race import Race


class Timed(FedAvg):  # type: ignore[misc]
    """FedAvg that times its rounds and uses the workload's cohorts."""

    def __init__(self, race: Race):
        workload = race.workload
        share = workload.cohort / workload.clients
        super().__init__(share, 0.0, min_train_nodes=workload.cohort, min_available_nodes=workload.clients)
        self.race = race
        self.started = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.started = time.perf_counter()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        cohort = self.race.workload.participants(server_round - 1).tolist()
        for client, message in zip(cohort, messages, strict=True):
            client_config = ConfigRecord({**config, "client": client})
            message.content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: client_config})
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
        answers = list(replies)
        result: tuple[Any, Any] = super().aggregate_train(server_round, answers)
        failed = [answer.error.reason for answer in answers if answer.has_error()]
        if failed:
            raise RuntimeError(f"{len(failed)} clients failed in round {server_round}: {failed[0]}")
        steps = sum(int(answer.content["metrics"]["steps"]) for answer in answers)
        self.race.note(time.perf_counter() - self.started, steps)
        return result


def main() -> None:
    race = Race(__doc__)
    server = ServerApp()
    about = {"workload": race.workload.name, "quick": race.quick, "folder": str(race.folder.resolve())}

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        result = Timed(race).start(
            grid=grid,
            initial_arrays=ArrayRecord(race.network.state_dict()),
            num_rounds=race.workload.rounds,
            train_config=ConfigRecord(about),
        )
        race.network.load_state_dict(result.arrays.to_torch_state_dict())
        race.finish(race.network)

    actors = {"num_cpus": race.processes, "include_dashboard": False}
    each = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(server, app, race.workload.clients, backend_config={"init_args": actors, "client_resources": each})


if __name__ == "__main__":
    main()
