"""Which messages a round of the configured system sends, counted link by link for the record."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fedmpi.common.plan import Plan
from fedmpi.config import Config
from fedmpi.config.local_algorithm import further_vectors
from fedmpi.updates import traffic
from fedmpi.updates.compression import upload_bits
from fedmpi.updates.traffic import RoundTraffic


class ModelSize(Protocol):
    """How many values a model has."""

    @property
    def size(self) -> int:
        """All that travel, d."""

    @property
    def trainable(self) -> int:
        """Those with a gradient."""


def round_links(
    config: Config, model: ModelSize, clients: int, classes: int, plan: Plan, measured: int, visits: int = 0
) -> RoundTraffic:
    """Bytes of one round on every link."""
    values, participants = model.size, len(plan.clients)
    asked = int(plan.facts.get("asked", participants))
    if config.topology.kind == "mediators":
        kept = keeps_moments(config, plan.one_step)
        moments = 2 * model.trainable if kept else 0  # Adam knows nothing of buffers
        groups = len(np.unique(plan.mediators))
        total = traffic.mediator_models(values, visits, groups, moments, lost=asked - participants)
    else:
        bits = upload_bits(config.transport.kind, config.transport.fraction, values)
        total = traffic.star_models(values, asked, participants, bits)
        down, up, numbers = further_vectors(config)
        total += traffic.further_values(asked * down * values, participants * (up * values + numbers))
    if "size_asked" in plan.facts:
        total += traffic.size_answers(int(plan.facts["size_asked"]), asked)
    if measured:
        total += _probes(config, values, measured, classes)
    if plan.round == 0 and config.rebalance.enabled:
        total += traffic.rebalancing(clients, classes)
    elif plan.round == 0 and config.topology.kind == "mediators":
        total += traffic.class_counts(clients, classes)
    return total


def keeps_moments(config: Config, one_step: bool) -> bool:
    """Whether a mediator sends the optimizer's moments with the model: SGD, which opening rounds use too, has none."""
    return config.topology.keep_optimizer and config.local.optimizer == "adam" and not one_step


def paper_formula(config: Config, values: int, participants: int) -> int:
    """Bytes of a round's models by the formulas of Astraea's section IV-C, which know no E_m."""
    if config.topology.kind == "mediators":
        return traffic.astraea_formula(values, participants, config.topology.clients_per_mediator)
    return traffic.fedavg_formula(values, participants)


def _probes(config: Config, values: int, clients: int, classes: int) -> RoundTraffic:
    features = config.participation.features
    if features == "label-histogram":
        return traffic.class_counts(clients, classes)
    if features == "compressed-gradient":
        return traffic.compressed_probes(clients, values, config.participation.levels)
    return traffic.full_probes(clients, values)
