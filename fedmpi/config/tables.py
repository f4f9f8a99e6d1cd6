"""A complete run as typed tables: what a user can choose, in the words of the configuration file.

Every published system is a choice of these (a preset); any other choice is legal unless it contradicts itself.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedmpi.config.base import Count, Table, limits
from fedmpi.config.client_tables import DataTable, LocalTable, ModelTable, ParticipationTable, SamplesTable, TaskTable
from fedmpi.config.server_tables import (
    AggregationTable,
    AttackTable,
    CheckpointTable,
    ClusterTable,
    EvaluationTable,
    LoggingTable,
    PrivacyTable,
    RebalanceTable,
    ServerTable,
    SystemTable,
    TopologyTable,
    TransportTable,
)


class ConfigTables(Table):
    """All tables of a configuration, each value in its range; whether they go together is `loading.Config`'s affair."""

    preset: str | None = None
    """A published system that fills the parts below; the file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run follows from it."""
    rounds: Annotated[Count, limits(0, 99_999_999, "checkpoints number rounds with eight digits")] = 50
    """T, the number of rounds."""
    data: DataTable = DataTable()
    model: ModelTable = ModelTable()
    task: TaskTable = TaskTable()
    participation: ParticipationTable = ParticipationTable()
    samples: SamplesTable = SamplesTable()
    local: LocalTable = LocalTable()
    topology: TopologyTable = TopologyTable()
    rebalance: RebalanceTable = RebalanceTable()
    aggregation: AggregationTable = AggregationTable()
    attack: AttackTable = AttackTable()
    transport: TransportTable = TransportTable()
    privacy: PrivacyTable = PrivacyTable()
    system: SystemTable = SystemTable()
    server: ServerTable = ServerTable()
    cluster: ClusterTable = ClusterTable()
    evaluation: EvaluationTable = EvaluationTable()
    checkpoint: CheckpointTable = CheckpointTable()
    logging: LoggingTable = LoggingTable()
