"""Custom components that misbehave: each returns, raises or spoils something, and the run names it or is right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fedmpi
from fedmpi import ClientArrays, Cohort, ComponentFailure, LocalAlgorithm
from tests.fuzz.damage import REFUSED, Finding, outcome

Case = tuple[str, str]


class Unspeakable(Exception):
    """An exception whose message cannot be read."""

    def __str__(self) -> str:
        raise ValueError


class NoException(BaseException):
    """Exceptions that `except Exception` lets through."""


def _recur(*given: Any) -> Any:
    return _recur(*given)


def _raise(error: BaseException) -> Any:
    raise error


RETURNS: dict[str, Callable[[Any], Any]] = {
    "none": lambda value: None,
    "text": lambda value: "x",
    "itself": lambda value: value,
    "empty": lambda value: np.empty(0),
    "zeros": lambda value: np.zeros(np.shape(value)),
    "nan": lambda value: np.full(np.shape(value), np.nan),
    "huge": lambda value: np.full(np.shape(value), 1e300),
    "negative": lambda value: -np.asarray(value, float) - 1,
    "longer": lambda value: np.ones(np.size(value) + 1),
    "one more axis": lambda value: np.ones((*np.shape(value), 2)),
    "objects": lambda value: np.array([{}] * max(np.size(value), 1), object),
    "complex": lambda value: np.ones(np.shape(value), complex),
    "texts": lambda value: ["1"] * max(np.size(value), 1),
    "bools": lambda value: np.ones(np.shape(value), bool),
    "tensor": lambda value: torch.ones(np.shape(value)),
    "meta tensor": lambda value: torch.ones(np.shape(value), device="meta"),
    "sparse tensor": lambda value: torch.ones(max(np.size(value), 1)).to_sparse(),
    "tensor with a gradient": lambda value: torch.ones(np.shape(value), requires_grad=True),
    "whole numbers": lambda value: np.full(np.shape(value), 2**62),
    "generator": lambda value: (item for item in [1, 2]),
    "function": lambda value: _recur,
    "raises": lambda value: _raise(RuntimeError("no\n" * 3000)),
    "leaves": lambda value: sys.exit(0),
    "leaves with words": lambda value: sys.exit("done"),
    "recurs": _recur,
    "unspeakable": lambda value: _raise(Unspeakable()),
    "no exception": lambda value: _raise(NoException("x")),
    "stop iteration": lambda value: _raise(StopIteration()),
    "out of memory": lambda value: _raise(MemoryError()),
    "a user's error": lambda value: _raise(fedmpi.UserError("a sentence of the user")),
    "another's failure": lambda value: _raise(ComponentFailure("model", "x", "y")),
    "assertion": lambda value: _raise(AssertionError()),
}


def _parts(wrong: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """One misbehaving component of each kind, as settings."""

    def sampler(view: Any) -> Any:
        return wrong(view.available[: view.count])

    def cohort(view: Any) -> Any:
        return Cohort(view.available[: view.count], wrong(np.full(view.count, 0.5)))

    def members(view: Any) -> Any:
        return Cohort(wrong(view.available[: view.count]))

    def rows(client: Any) -> Any:
        return wrong(np.arange(len(client.labels)))

    def weights(cohort: Any, sizes: Any) -> Any:
        return wrong(sizes[cohort.clients] / sizes[cohort.clients].sum())

    def combined(updates: Tensor, coefficients: Tensor) -> Any:
        return wrong(coefficients @ updates)

    class Server:
        state = ("m",)

        def __init__(self, *, lr: float = 1.0):
            self.m: Any = None

        def step(self, w: Tensor, update: Tensor) -> Any:
            self.m = update.clone()
            return wrong(w + update)

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        return wrong(nn.functional.cross_entropy(outputs, targets, reduction="none"))

    def model(description: Any) -> Any:
        return wrong(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))

    class Forward(nn.Module):
        def __init__(self, description: Any):
            super().__init__()
            self.inner = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Any:
            return wrong(self.inner(x.flatten(1)))

    def optimizer(parameters: Any, lr: float) -> Any:
        return wrong(torch.optim.SGD(parameters, lr))

    def presence(view: Any) -> Any:
        return wrong(np.full(len(view.sizes), 0.5))

    class Algorithm(LocalAlgorithm):
        client_state = ("c",)
        sums = ("s",)

        def correction(self, client: Any, server: Any, generator: Any) -> Any:
            return wrong(client.c)

        def finish(self, client: Any, server: Any, work: Any, generator: Any) -> Any:
            return {"s": work.delta}

    class Finishing(LocalAlgorithm):
        client_state = ("c",)
        sums = ("s",)

        def finish(self, client: Any, server: Any, work: Any, generator: Any) -> Any:
            client.c = wrong(work.delta)
            return {"s": wrong(work.delta)}

    def arrays() -> Any:
        return wrong(ClientArrays(np.zeros((8, 1, 8, 8), np.float32), np.arange(8) % 10, np.arange(8) % 4))

    def labels() -> Any:
        return ClientArrays(np.ones((12, 1, 8, 8), np.float32), wrong(np.arange(12) % 10), np.arange(12) % 4)

    def features() -> Any:
        return ClientArrays(wrong(np.ones((12, 1, 8, 8), np.float32)), np.arange(12) % 10, np.arange(12) % 4)

    def groups(class_counts: Any, most: int, generator: Any, target: Any) -> Any:
        return wrong(np.arange(len(class_counts)) // most)

    mediators = {"topology": "mediators", "topology.clients_per_mediator": 2}
    return {
        "sampler": {"clients.sampler": sampler},
        "cohort": {"clients.sampler": cohort, "server.weights": "unbiased"},
        "members": {"clients.sampler": members},
        "rows": {"samples.sampler": rows},
        "weights": {"server.weights": weights},
        "aggregator": {"server.aggregator": combined},
        "server": {"server.optimizer": Server},
        "loss": {"task.loss": loss},
        "model": {"model.name": model},
        "forward": {"model.name": Forward},
        "optimizer": {"local.optimizer": optimizer},
        "availability": {"clients.availability": presence},
        "correction": {"local.algorithm": Algorithm},
        "finish": {"local.algorithm": Finishing},
        "data": {"data.source": arrays},
        "labels": {"data.source": labels},
        "features": {"data.source": features},
        "scheduling": {"topology.scheduling": groups, **mediators},
    }


KINDS = tuple(_parts(lambda value: value))


def strategy() -> st.SearchStrategy[Case]:
    """(kind of component, what it returns)."""
    return st.tuples(st.sampled_from(KINDS), st.sampled_from(sorted(RETURNS)))


def attempt(case: Case) -> str:
    """The run ends with a finite model, or in a sentence that names the component or the client."""
    kind, returned = case
    settings = {"rounds": 2, "clients.count": 3, "model.hidden": [4], "data.source": "digits:clients=6"}
    chosen = settings | _parts(RETURNS[returned])[kind]
    if "model.name" in chosen:
        del chosen["model.hidden"]
    run = outcome(lambda: fedmpi.run("fedavg", chosen), failures=True)
    if isinstance(run, str):
        return REFUSED
    if not all(bool(value.isfinite().all()) for value in run.model.state_dict().values()):
        raise Finding("the run is finished, but its model is not finite")
    if len(run.records) != 2:
        raise Finding(f"the run is finished after {len(run.records)} of 2 rounds")
    return "run"
