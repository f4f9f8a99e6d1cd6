"""Flower's clients: a separate module, since Ray's actors import it once and so read the samples once."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import Workload, client_tensors, find, prepare

app = ClientApp()


@functools.cache
def _task(name: str, quick: bool, folder: str) -> tuple[Workload, list[tuple[Tensor, Tensor]], nn.Module]:
    torch.set_num_threads(1)
    workload = find(name, quick)
    store = prepare(workload, Path(folder))
    return workload, client_tensors(store), workload.network().train()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train one epoch on the samples of the client that the message names."""
    config = message.content["config"]
    workload, clients, network = _task(str(config["workload"]), bool(config["quick"]), str(config["folder"]))
    samples = TensorDataset(*clients[int(config["client"])])
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=workload.lr)
    steps = 0
    for x, y in DataLoader(samples, batch_size=workload.batch, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(samples), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)
