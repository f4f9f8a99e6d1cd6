"""Bytes that the simulated method would send over its links: clients, mediators, server.

Duan et al. 2019 (Astraea), section IV-C and Table III. The cluster counts the bytes actually moved by MPI. In a star
the "client" links lead to the server. Values are sent as 4-byte numbers unless a transport defines another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.config import Config
from fedmpi.config.tables import Mediators, copies_of, further_vectors, of_labels, stratification
from fedmpi.updates.compression import upload_bits

if TYPE_CHECKING:
    from fedmpi.models.flat import FlatModel

BYTES_PER_VALUE = 4
MEGABYTE = 10**6


@dataclass(frozen=True)
class RoundTraffic:
    """Bytes of one round, or of part of one; add with +."""

    client_up: int = 0  # From and to the clients; the other end is their mediator, or the server in a star
    client_down: int = 0
    mediator_up: int = 0  # From and to the mediators; the other end is the server
    mediator_down: int = 0

    def __add__(self, other: RoundTraffic) -> RoundTraffic:
        return RoundTraffic(*(getattr(self, link.name) + getattr(other, link.name) for link in fields(self)))

    @property
    def total(self) -> int:
        """Bytes on all links."""
        return self.client_up + self.client_down + self.mediator_up + self.mediator_down


def numbers_sent(up: int = 0, down: int = 0) -> RoundTraffic:
    """Return the traffic of so many 4-byte numbers from and to all clients together."""
    return RoundTraffic(up * BYTES_PER_VALUE, down * BYTES_PER_VALUE)


def astraea_formula(values: int, clients: int, clients_per_mediator: int, mediator_epochs: int = 1) -> int:
    """Return 2 |w| (⌈c/γ⌉ + c), the paper's bytes of a synchronization round (section IV-C).

    The paper's formula has no E_m although its text sends the model in every mediator epoch. With `mediator_epochs` it
    becomes 2 |w| (⌈c/γ⌉ + E_m c), as counted by `round_links`. The costs of Table III match neither: with 4 ·
    68,873 bytes per model, 215 MB (c = 50, γ = 10, E_m = 2) are 7.1 rounds by the first and 3.7 by the second.
    """
    mediators = -(-clients // clients_per_mediator)
    return 2 * values * BYTES_PER_VALUE * (mediators + mediator_epochs * clients)


class TargetCost(NamedTuple):
    """Cost to a target accuracy: rounds, and megabytes (10⁶ bytes) on all links."""

    rounds: int
    megabytes: float


def cost_to_target(accuracies: Sequence[float | None], round_bytes: Sequence[int], target: float) -> TargetCost | None:
    """Return rounds and traffic up to the first evaluation that reaches the target (Table III)."""
    for index, accuracy in enumerate(accuracies):
        if accuracy is not None and accuracy >= target:
            return TargetCost(index + 1, sum(round_bytes[: index + 1]) / MEGABYTE)
    return None


def _bytes_of(values: int, bits: float | Fraction) -> int:
    """Return the whole bytes of `values` numbers of `bits` bits."""
    return -int(-values * bits // 8)


def client_bytes(config: Config, values: int) -> tuple[int, int]:
    """Return the bytes that a client receives and sends in a round: model and update, and what the algorithm adds."""
    down, up, numbers = further_vectors(config)
    update = _bytes_of(values // copies_of(config), upload_bits(config.compression, values))
    return BYTES_PER_VALUE * (1 + down) * values, update + BYTES_PER_VALUE * (up * values + numbers)


def round_links(
    config: Config, model: FlatModel, clients: int, classes: int, plan: Plan, measured: int, visits: int = 0
) -> RoundTraffic:
    """Return bytes of one round on every link.

    With mediators every visit moves the model to a client and back: steps 5 and 6 of the paper's workflow, repeated in
    each mediator epoch. So `visits` is E_m · c, where the formula of the paper (`astraea_formula`) has c. Clients that
    drop out receive a model and do not return it.
    """
    values, participants = model.size, len(plan.clients)
    asked = int(plan.facts.get("asked", participants))
    if config.topology.name == "mediators":
        kept = keeps_moments(config, plan.one_step)
        moved = BYTES_PER_VALUE * (values + (2 * model.trainable if kept else 0))  # Adam has no moments for buffers
        to_server = BYTES_PER_VALUE * values * len(np.unique(plan.mediators))
        total = RoundTraffic(visits * moved, (visits + asked - participants) * moved, to_server, to_server)
    else:
        down, up = client_bytes(config, values)
        total = RoundTraffic(participants * up, asked * down)
    if "size_asked" in plan.facts:  # size reports; K and the estimate come back (FedSampling, Algorithm 1)
        total += numbers_sent(int(plan.facts["size_asked"]), 2 * asked)
    if measured:
        total += _probes(config, values, measured, classes)
    if plan.round == 0 and config.rebalance is not None:  # class counts; numbers of copies (Astraea, Algorithm 2)
        total += numbers_sent(clients * classes, clients * classes)
    elif plan.round == 0 and config.topology.name == "mediators":  # class counts (Astraea, step 1)
        total += numbers_sent(clients * classes)
    return total


def keeps_moments(config: Config, one_step: bool) -> bool:
    """Return whether a mediator sends the optimizer's moments with the model; SGD, as in probing rounds, has none."""
    return (
        isinstance(config.topology, Mediators)
        and config.topology.keep_optimizer
        and config.local.optimizer.name == "adam"
        and not one_step
    )


def paper_formula(config: Config, values: int, participants: int) -> int:
    """Return bytes of a round's models by the formulas of Astraea's section IV-C: 2 c |w| in a star, no E_m."""
    if isinstance(config.topology, Mediators):
        return astraea_formula(values, participants, config.topology.clients_per_mediator)
    return 2 * participants * values * BYTES_PER_VALUE


def _probes(config: Config, values: int, clients: int, classes: int) -> RoundTraffic:
    """Return the traffic of measuring so many clients for strata.

    A client sends its class counts; or it gets the model and sends a gradient, or for FedSTS's IS() d' centres and the
    norm as 4-byte numbers and d indices of ⌈log2 d'⌉ bits.
    """
    features = stratification(config).features
    if of_labels(config):
        return numbers_sent(clients * classes)
    if features.name != "compressed-gradient":
        return numbers_sent(clients * values, clients * values)
    levels = features.options["codebook_size"]
    indices = RoundTraffic(clients * _bytes_of(values, max(1, (levels - 1).bit_length())))
    return indices + numbers_sent(clients * (levels + 1), clients * values)
