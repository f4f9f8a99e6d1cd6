"""A complete run as typed tables: what a user can choose, in the words of the configuration file.

Every published system is a choice of these parts (a preset); any other choice is legal unless it contradicts itself.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fedmpi.config.base import Count, Part
from fedmpi.config.client_parts import DataPart, LocalPart, ModelPart, ParticipationPart, SamplesPart, TaskPart
from fedmpi.config.server_parts import (
    AggregationPart,
    AttackPart,
    CheckpointPart,
    ClusterPart,
    EvaluationPart,
    LoggingPart,
    PrivacyPart,
    RebalancePart,
    ServerPart,
    SystemPart,
    TopologyPart,
    TransportPart,
)


class Config(Part):
    """A complete run."""

    preset: str | None = None
    """A published system that fills the parts below; the file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run follows from it."""
    rounds: Count = 50
    """T, the number of rounds."""
    data: DataPart = DataPart()
    model: ModelPart = ModelPart()
    task: TaskPart = TaskPart()
    participation: ParticipationPart = ParticipationPart()
    samples: SamplesPart = SamplesPart()
    local: LocalPart = LocalPart()
    topology: TopologyPart = TopologyPart()
    rebalance: RebalancePart = RebalancePart()
    aggregation: AggregationPart = AggregationPart()
    attack: AttackPart = AttackPart()
    transport: TransportPart = TransportPart()
    privacy: PrivacyPart = PrivacyPart()
    system: SystemPart = SystemPart()
    server: ServerPart = ServerPart()
    cluster: ClusterPart = ClusterPart()
    evaluation: EvaluationPart = EvaluationPart()
    checkpoint: CheckpointPart = CheckpointPart()
    logging: LoggingPart = LoggingPart()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from fedmpi.config.checks import contradiction

        reason = contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self
