"""A client's work as plain values: the rule of a round, one participant's task, what was done, and who does it.

One definition of the work, several engines that carry it out and agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.registry import Part
from fedmpi.common.types import Ints
from fedmpi.data.schema import DataDescription

if TYPE_CHECKING:
    from fedmpi.config.client_tables import LocalTable

Observer = Callable[[int, Tensor], Tensor | None]
"""observe(client, Δ) sees a client's update before it is summed and may return another one in its place."""

VISIT_BITS = 32


@dataclass(frozen=True)
class OwnOptimizer:
    """A user's own local optimizer."""

    part: Part  # What was chosen, for messages
    make: Callable[..., Any]  # make(parameters, lr=η) returns what takes a `step()` on the parameters' `grad`


@dataclass(frozen=True)
class LocalRule:
    """What every participant does in a round."""

    # Adam starts afresh at every client and round, unless its state is handed on; "own" is a user's own optimizer
    optimizer: Literal["sgd", "adam", "own"] = "sgd"
    lr: float = 0.05  # η of this round
    # Passes over the data, or a number of steps on freshly drawn rows: exactly one of the two
    epochs: int | None = 1
    steps: int | None = None
    batch_size: int | None = 10  # None: the whole (sampled) local set
    drop_last: bool = False  # Whether an epoch's last batch is left out where it is shorter than the first
    proximal_mu: float = 0.0  # μ of FedProx (Li et al. 2020, Eq 2): the gradient gains μ (w − w_start)
    beta1: float = 0.9  # Adam's (Kingma & Ba 2015, Algorithm 1)
    beta2: float = 0.999
    epsilon: float = 1e-8
    own: OwnOptimizer | None = None
    dropout: bool = True  # False: dropout layers pass everything on, as when clients are probed

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a local rule has either epochs or steps")

    @classmethod
    def scheduled(cls, part: LocalTable) -> LocalRule:
        """The rule with the batches and the rate of a configuration."""
        return cls(
            lr=part.lr,
            epochs=part.epochs if part.epochs is not None or part.steps is not None else 1,
            steps=part.steps,
            batch_size=None if part.batch_size == "all" else part.batch_size,
            drop_last=part.drop_last,
        )


@dataclass(frozen=True)
class ClientTask:
    """One participant's part in a round."""

    client: int  # Index in the shard folder
    rows: Ints | None  # Sampled local rows (r,); None: all
    coefficient: float  # The client's update enters the sum times this
    visit: int = 0  # A mediator comes E_m times in a round, each time with its own batch order and masks

    def stream_round(self, round: int) -> int:
        """The round that keys this visit's random streams; the round itself at the first visit."""
        return round + (self.visit << VISIT_BITS)


@dataclass
class WorkReport:
    """Sums over the work done; reports add up with +=."""

    clients: int = 0
    steps: int = 0
    samples: int = 0  # Distinct samples that they had, not times epochs
    loss_sum: float = 0.0  # Σ batch loss · rows of the batch, before each step
    loss_count: int = 0  # Σ rows
    weight: float = 0.0  # Σ coefficient
    load_seconds: float = 0.0
    train_seconds: float = 0.0
    diverged: int = 0  # Participants left out because their training diverged; they count nowhere else

    def __iadd__(self, other: WorkReport) -> WorkReport:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


class DataSource(Protocol):
    """The clients' samples, ready for the model: normalised tensors on the device."""

    @property
    def sizes(self) -> Ints:
        """Samples of each client, int64 (N,)."""

    @property
    def description(self) -> DataDescription:
        """Shape and type of a sample."""

    def load(self, client: int, rows: Ints | None = None) -> tuple[Tensor, Tensor]:
        """The given local rows of a client (None = all): x (r, …) float32 or int32, y int64 (r,). Read-only."""

    def load_many(self, clients: Sequence[int] | Ints, rows_of: Sequence[Ints | None]) -> tuple[Tensor, Tensor]:
        """The rows of several clients, concatenated client after client."""


class Engine(Protocol):
    """Carries out the tasks of one rank."""

    @property
    def name(self) -> str:
        """The engine's name in the run log."""

    def train(
        self, tasks: Sequence[ClientTask], start: Tensor, rule: LocalRule, round: int, total: Accumulator
    ) -> WorkReport:
        """Add Σ coefficient · Δ of the tasks to `total`, each trained from `start` (d,), which stays as it is.

        Raises
        ------
        ClientFailure
            Anything that went wrong inside a client's work, naming the client.
        """


def task_size(task: ClientTask, sizes: Ints) -> int:
    """How many samples the task trains on."""
    return int(sizes[task.client]) if task.rows is None else len(task.rows)
