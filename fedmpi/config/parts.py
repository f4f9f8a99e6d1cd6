"""A complete run as typed tables: what a user can choose, in the words of the configuration file.

Every published system is a choice of these parts (a preset); any other choice is legal unless it contradicts itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from fedmpi.common.errors import UserError
from fedmpi.config.base import Count, Part, limits
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
    """A complete run: `Config(preset="fedavg", rounds=20, local={"lr": 0.1})`; what is left out has its default.

    Raises
    ------
    UserError
        An unknown preset or key, a value out of range, or choices that contradict each other.
    """

    preset: str | None = None
    """A published system that fills the parts below; the file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run follows from it."""
    rounds: Annotated[Count, limits(0, 99_999_999, "checkpoints number rounds with eight digits")] = 50
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

    def __init__(self, **values: Any):
        from fedmpi.config.loading import filled, sentence

        try:
            super().__init__(**filled(values))
        except ValidationError as error:
            raise UserError(sentence(error)) from error

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
        """The configuration of a TOML file, with some of its keys set otherwise.

        Parameters
        ----------
        path : str or Path
        overrides : mapping, optional
            Values by key, as {"local.lr": 0.1} or {"local": {"lr": 0.1}}.

        Raises
        ------
        UserError
            As the constructor; or the file cannot be read.
        """
        from fedmpi.config.loading import given_config

        return given_config(Path(path), overrides or {})

    @classmethod
    def exactly(cls, values: Mapping[str, Any]) -> Config:
        """Nested tables as they stand: validated, without a look at what the preset says beside them.

        Raises
        ------
        pydantic.ValidationError
        """
        config = cls.__new__(cls)
        cls.__pydantic_validator__.validate_python(dict(values), self_instance=config)
        return config

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from fedmpi.config.checks import contradiction
        from fedmpi.config.choices import check_options

        check_options(self)
        reason = contradiction(self)
        if reason is not None:
            raise ValueError(reason)
        return self
