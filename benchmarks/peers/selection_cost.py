"""Seconds of a round with and without the selection of power-of-choice, in flgo, the thesis's code and fedmpi.

    python benchmarks/peers/selection_cost.py flgo raw/mnist            # an environment with flgo 0.4.4
    python benchmarks/peers/selection_cost.py thesis raw/mnist --code DIR
    python benchmarks/peers/selection_cost.py fedmpi raw/mnist

1,000 clients with 60 MNIST images each, d = 100 candidates, m = 10, flgo's CNN, B = 20, one epoch, SGD 0.05, one
thread. The thesis's code is euphoria0-0/Active-Client-Selection-for-Communication-efficient-Federated-Learning; DIR is
its folder src. It trains all candidates and selects by the training loss. Prints the median seconds of a round without
evaluation as JSON. The first round is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

CLIENTS, CANDIDATES, SELECTED, BATCH, RATE = 1000, 100, 10, 20, 0.05


def network(description: object = None) -> nn.Module:
    """Return the CNN that flgo has for MNIST."""
    first, second = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
    pooled = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*pooled, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


def images(raw: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training images (60000, 1, 28, 28), standardized, and labels."""
    x, y = (gzip.decompress((raw / f"train-{kind}-ubyte.gz").read_bytes()) for kind in ("images-idx3", "labels-idx1"))
    pixels = torch.from_numpy(np.frombuffer(x, np.uint8, offset=16).copy()).view(-1, 1, 28, 28) / 255
    return (pixels - 0.1307) / 0.3081, torch.from_numpy(np.frombuffer(y, np.uint8, offset=8).astype(np.int64))


def timed(owner: Any, name: str) -> list[float]:
    """Replace a method by one that notes the seconds of its calls."""
    seconds: list[float] = []
    method: Callable[..., Any] = getattr(owner, name)

    def measured(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = method(*given, **named)
        seconds.append(time.perf_counter() - began)
        return done

    setattr(owner, name, measured)
    return seconds


def flgo_rounds(asked: Namespace) -> dict[str, list[float]]:
    """Run flgo's fedavg and powerofchoice."""
    library = torch.library.Library("torchvision", "DEF")  # torchvision's kernels need a torch with CUDA
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import flgo
    import flgo.benchmark

    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "MNIST", "MNIST", "raw")
        kept.mkdir(parents=True)
        for file in asked.raw.glob("*.gz"):
            (kept / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        flgo.benchmark.data_root = folder
        import flgo.algorithm.fedavg
        import flgo.algorithm.powerofchoice
        import flgo.benchmark.mnist_classification as mnist
        import flgo.benchmark.partition
        from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe

        samples = FromDatasetPipe.TaskDataset
        samples.__getitems__ = lambda self, rows: [self[row] for row in rows]  # which newer versions of torch require
        task, found = str(Path(folder, "task")), {}
        flgo.gen_task_by_(mnist, flgo.benchmark.partition.IIDPartitioner(num_clients=CLIENTS), task)
        option = {"gpu": [], "num_rounds": asked.rounds, "num_epochs": 1, "batch_size": BATCH, "learning_rate": RATE}
        option |= {"proportion": SELECTED / CLIENTS, "eval_interval": 10 * asked.rounds, "train_holdout": 0}
        for name in ("fedavg", "powerofchoice"):
            given = option | ({"algo_para": [CANDIDATES]} if name == "powerofchoice" else {})
            server = flgo.init(task, getattr(flgo.algorithm, name), given)
            found[name] = timed(server, "iterate")
            server.run()
    return found


def thesis_rounds(asked: Namespace) -> dict[str, list[float]]:
    """Run the thesis's random selection and power-of-choice."""
    sys.path.insert(0, str(asked.code.parent))
    sys.modules["wandb"] = SimpleNamespace()  # type: ignore[assignment]
    package = asked.code.name
    server_of = __import__(f"{package}.FL_core.server", fromlist=["Server"]).Server
    methods = __import__(f"{package}.FL_core.client_selection", fromlist=["PowerOfChoice", "RandomSelection"])
    average = __import__(f"{package}.FL_core.federated_algorithm", fromlist=["FedAvg"]).FedAvg
    x, y = images(asked.raw)
    parts = np.split(np.random.default_rng(0).permutation(len(y)), CLIENTS)
    train = {"data": {k: torch.utils.data.TensorDataset(x[p], y[p]) for k, p in enumerate(parts)}}
    train["data_sizes"] = {k: len(p) for k, p in enumerate(parts)}
    data = {"train": train, "test": {"data": {}, "data_sizes": {}}}
    common = {"device": "cpu", "num_classes": 10, "lr_local": RATE, "wdecay": 0, "momentum": 0, "num_epoch": 1}
    common |= {"num_updates": None, "batch_size": BATCH, "client_optimizer": "sgd", "loss_div_sqrt": False}
    common |= {"loss_sum": False, "nCPU": 1, "total_num_client": CLIENTS, "num_clients_per_round": SELECTED}
    common |= {"num_available": None, "num_round": asked.rounds, "no_save_results": True, "save_probs": False}
    common |= {"use_mp": False, "fed_algo": "FedAvg", "test_freq": 10**9, "wandb": False, "num_candidates": CANDIDATES}
    found = {}
    for name, kind, more in (("Random", "RandomSelection", {}), ("Pow-d", "PowerOfChoice", {"d": CANDIDATES})):
        model, selection = network(), getattr(methods, kind)(total=CLIENTS, device="cpu", **more)
        files: dict[str, Any] = {}
        server = server_of(
            data, model, Namespace(**common, method=name), selection, average(train["data_sizes"], model), files
        )
        server.test = server.save_current_updates = server.save_selected_clients = lambda *_, **__: None
        begins: list[float] = []
        copied = server.federated_method.update

        def update(*given: Any, _copied: Any = copied, _begins: list[float] = begins) -> Any:
            done = _copied(*given)
            _begins.append(time.perf_counter())
            return done

        server.federated_method.update = update
        server.train()
        found[name] = np.diff(begins).tolist()
    return found


def fedmpi_rounds(asked: Namespace) -> dict[str, list[float]]:
    """Run fedmpi's uniform sampler and power-of-choice in one process."""
    import fedmpi

    x, y = (part.numpy() for part in images(asked.raw))
    owner = np.random.default_rng(0).permutation(len(y)) % CLIENTS
    data = fedmpi.ClientArrays(x, y, owner, test=(x[:100], y[:100]))
    table = {"rounds": asked.rounds, "clients.count": SELECTED, "local.batch_size": BATCH, "local.lr": RATE}
    table |= {"evaluation.every": 10 * asked.rounds, "cluster.threads": 1}
    found = {}
    for name, more in (("uniform", {}), ("power-of-choice", {"clients.sampler.candidates": CANDIDATES})):
        run = fedmpi.run("fedavg", table | {"clients.sampler.name": name} | more, data=data, model=network)
        found[name] = [record["seconds"] for record in run.records]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=["flgo", "thesis", "fedmpi"])
    parser.add_argument("raw", type=Path)
    parser.add_argument("--code", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        rounds = {"flgo": flgo_rounds, "thesis": thesis_rounds, "fedmpi": fedmpi_rounds}[asked.program](asked)
    print(json.dumps({name: statistics.median(seconds[1:]) for name, seconds in rounds.items()}))


if __name__ == "__main__":
    main()
