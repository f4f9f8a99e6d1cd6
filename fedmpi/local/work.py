"""A client's work, which all engines share: rule of a round, task, batches, report, handling of failures.

The work has one definition and several engines, which agree up to floating-point rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedmpi.aggregation.exact import Adder
from fedmpi.common.errors import ClientFailure, ComponentFailure, Divergence, UserError
from fedmpi.common.imports import innermost
from fedmpi.common.registry import Component
from fedmpi.common.types import Floats, Ints

STEPS_DRAWN_TOGETHER = 32
SMALL = 64
"""Most samples of a client that is probed in a batch with others; a larger client fills the device alone."""
LARGEST_LOSS = 2.0**40
"""Loss above which nothing is learned any more; the loss sums sent with the update stay below 2**50."""

Observer = Callable[[int, Tensor], Tensor | None]
"""observe(client, Δ) sees a client's update before it is summed and may return a replacement."""


@dataclass(frozen=True)
class OwnOptimizer:
    """Custom local optimizer."""

    part: Component  # the chosen component, for messages
    make: Callable[..., Any]  # make(parameters, lr=η) returns an object whose `step()` uses the parameters' `grad`


@dataclass(frozen=True)
class LocalRule:
    """Rule of the local work of every selected client in a round."""

    # Adam resets for every client and round, unless its state is handed on; "own" is a custom optimizer
    optimizer: Literal["sgd", "adam", "own"] = "sgd"
    lr: float = 0.05  # η of this round
    # Passes over the data, or a number of steps on freshly drawn samples; both: the first so many steps of the passes
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int | None = 10  # None: the whole (sampled) local set
    drop_last: bool = False  # True leaves out an epoch's last batch if it is shorter than the first
    proximal_mu: float = 0.0  # μ of FedProx (Li et al. 2020, Eq 2): the gradient gains μ (w − w_start)
    beta1: float = 0.9  # of Adam (Kingma & Ba 2015, Algorithm 1)
    beta2: float = 0.999
    epsilon: float = 1e-8
    own: OwnOptimizer | None = None
    clip_norm: float | None = None  # the norm that the gradient of a batch's loss is scaled down to
    rates: tuple[float, ...] = ()  # η of each step, if it changes; all clients then take as many steps
    dropout: bool = True  # False disables dropout layers, as in probes of clients

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None:
            raise ValueError("a local rule has epochs or steps")

    def at(self, number: int) -> LocalRule:
        """Return the rule with the learning rate of step `number` (from 1)."""
        return replace(self, lr=self.rates[number - 1]) if self.rates else self


@dataclass(frozen=True)
class RoundJob:
    """Values that all tasks of a rank share in a round."""

    start: Tensor  # w (d,), from which each task trains; it is not changed
    rule: LocalRule
    round: int
    total: Adder  # sum to which the weighted updates are added


@dataclass(frozen=True)
class ClientTask:
    """Task of one selected client in a round."""

    client: int  # index in the shard folder
    rows: Ints | None  # sampled local rows (r,); None: all
    coefficient: float  # factor of the client's update in the sum
    visit: int = 0  # a mediator visits E_m times in a round, each time with its own batch order and masks

    def stream_round(self, round: int) -> int:
        """Return the round that keys this visit's random streams; the round itself at the first visit."""
        return round + (self.visit << 32)


class Rows(NamedTuple):
    """Samples of any number of clients, grouped by client."""

    clients: Ints  # (r,): owner of each sample
    rows: Ints  # (r,): its local row
    weights: Floats  # (r,): c_k / r_k of the owner


@dataclass
class WorkReport:
    """Sums over the completed work; reports add up with +=."""

    clients: int = 0
    steps: int = 0
    samples: int = 0  # distinct samples of these clients, not times epochs
    loss_sum: float = 0.0  # Σ batch loss · samples of the batch, before each step
    loss_count: int = 0  # Σ samples
    weight: float = 0.0  # Σ coefficient
    load_seconds: float = 0.0

    def __iadd__(self, other: WorkReport) -> WorkReport:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class Engine(Protocol):
    """Interface of an engine, which carries out the tasks of one rank."""

    name: str  # in the run log

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; a failing client is named by a ClientFailure."""


class OneStepEngine(Engine, Protocol):
    """Interface of an engine for clients that take a single step."""

    def accepts(self, task: ClientTask, rule: LocalRule) -> bool:
        """Check whether the task is a single step."""

    def train_rows(self, drawn: Rows, job: RoundJob) -> WorkReport:
        """Train samples of any number of clients, without a task for each."""


def task_size(task: ClientTask, sizes: Ints) -> int:
    """Return the number of samples that the task trains on."""
    return int(sizes[task.client]) if task.rows is None else len(task.rows)


# Batches: the local samples of every step


def batch_rows(rule: LocalRule, n: int) -> int:
    """Return the number of samples in a full batch of a client with n samples: min(B, n)."""
    return n if rule.batch_size is None else min(rule.batch_size, n)


def step_count(rule: LocalRule, n: int) -> int:
    """Return the number of steps of a client with n samples, without drawing any randomness."""
    if n == 0:
        return 0
    if rule.epochs is None:
        assert rule.steps is not None
        return rule.steps
    size = batch_rows(rule, n)
    steps = rule.epochs * (n // size if rule.drop_last else -(-n // size))
    return steps if rule.steps is None else min(steps, rule.steps)


def needs_order(rule: LocalRule, n: int) -> bool:
    """Check whether the batches depend on the random stream: not if every batch is the whole local set."""
    return batch_rows(rule, n) < n


def passes(rule: LocalRule, n: int, generator: np.random.Generator | None) -> Iterator[Ints | None]:
    """Yield the samples in the order of visits, one pass at a time; a pass is cut into batches of `batch_rows`."""
    if n == 0:
        return
    if not needs_order(rule, n):
        for _ in range(step_count(rule, n)):
            yield None
        return
    if generator is None:
        raise ValueError("batches smaller than the local set need a generator")
    size = batch_rows(rule, n)
    if rule.epochs is not None:
        left = step_count(rule, n)
        while left > 0:
            yield generator.permutation(n)[: n - n % size if rule.drop_last else n][: left * size]
            left -= n // size if rule.drop_last else -(-n // size)
        return
    assert rule.steps is not None
    for first in range(0, rule.steps, STEPS_DRAWN_TOGETHER):
        count = min(STEPS_DRAWN_TOGETHER, rule.steps - first)
        yield np.concatenate([generator.choice(n, size, replace=False, shuffle=False) for _ in range(count)])


def schedule(rule: LocalRule, n: int, generator: np.random.Generator | None) -> list[Ints | None]:
    """Return all batches of a client."""
    size = batch_rows(rule, n)
    batches: list[Ints | None] = []
    for order in passes(rule, n, generator):
        if order is None:
            batches.append(None)
        else:
            batches.extend(order[first : first + size] for first in range(0, len(order), size))
    return batches


# Clients that fail: their names and a remedy


@contextmanager
def named_client(client: int, rank: int) -> Iterator[None]:
    """Turn an exception into a ClientFailure that names client and rank. A UserError passes unchanged, a
    ComponentFailure gains the client's name."""
    try:
        yield
    except (ClientFailure, UserError, KeyboardInterrupt):
        raise
    except ComponentFailure as failure:
        raise failure.during(client=client) from failure.__cause__
    except BaseException as cause:  # a sys.exit() in a model must not end the run as if it were done
        raise ClientFailure(client, rank, cause, innermost(cause)) from cause


def check_loss(loss_sum: float, lr: float) -> None:
    """Reject a loss that is not a number or is at least `LARGEST_LOSS`."""
    if not abs(loss_sum) < LARGEST_LOSS:
        raise Divergence(
            f"the loss is {loss_sum:g}. Training diverged at lr = {lr:g}; lower local.lr or server.optimizer.lr"
        )


def check_update(delta: Tensor, lr: float) -> None:
    """Reject an update (d,) with values that are infinite, not a number, or too large to be squared."""
    check_square(float(delta.dot(delta)), lr)


def check_square(square: float, lr: float) -> None:
    """Reject the squared norm of an update that is not finite."""
    if not math.isfinite(square):
        raise Divergence(f"the update is not finite. Training diverged at lr = {lr:g}; lower local.lr")


def check_model(model: Tensor, round: int, lr: float) -> None:
    """Reject a global model (d,) with values that are infinite or not a number; all ranks raise the same error."""
    if not math.isfinite(float(model.sum(dtype=torch.float64))):
        raise Divergence(
            f"the global model is not finite after round {round}. Training diverged at lr = {lr:g}; lower local.lr or "
            "server.optimizer.lr"
        )
