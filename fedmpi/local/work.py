"""A client's work as plain values: the rule of a round, the task of a selected client, the report, the interfaces.

The work has one definition and several engines, which agree up to floating-point rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.registry import Component
from fedmpi.common.types import Ints

if TYPE_CHECKING:
    from fedmpi.config.client_tables import LocalTable

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
    # Passes over the data, or a number of steps on freshly drawn samples: exactly one of the two
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int | None = 10  # None: the whole (sampled) local set
    drop_last: bool = False  # True leaves out an epoch's last batch if it is shorter than the first
    proximal_mu: float = 0.0  # μ of FedProx (Li et al. 2020, Eq 2): the gradient gains μ (w − w_start)
    beta1: float = 0.9  # of Adam (Kingma & Ba 2015, Algorithm 1)
    beta2: float = 0.999
    epsilon: float = 1e-8
    own: OwnOptimizer | None = None
    dropout: bool = True  # False disables dropout layers, as in probes of clients

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a local rule has either epochs or steps")

    @classmethod
    def scheduled(cls, part: LocalTable) -> LocalRule:
        """Build the rule from the batches and the rate of a configuration."""
        return cls(
            lr=part.lr,
            epochs=part.epochs if part.epochs is not None or part.steps is not None else 1,
            steps=part.steps,
            batch_size=None if part.batch_size == "all" else part.batch_size,
            drop_last=part.drop_last,
        )


@dataclass(frozen=True)
class RoundJob:
    """Values that all tasks of a rank share in a round."""

    start: Tensor  # w (d,), from which each task trains; it is not changed
    rule: LocalRule
    round: int
    total: Accumulator  # sum to which the weighted updates are added


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
    diverged: int = 0  # selected clients left out because their training diverged; no other number includes them

    def __iadd__(self, other: WorkReport) -> WorkReport:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class Engine(Protocol):
    """Interface of an engine, which carries out the tasks of one rank."""

    name: str  # in the run log

    def train(self, tasks: Sequence[ClientTask], job: RoundJob) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to the job's sum; a failing client is named by a ClientFailure."""


def task_size(task: ClientTask, sizes: Ints) -> int:
    """Return the number of samples that the task trains on."""
    return int(sizes[task.client]) if task.rows is None else len(task.rows)
