"""A complete run as typed tables: what a user can choose, in the words of the configuration file.

Every published method is a choice of these (a preset). Any other choice is valid unless its keys contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from fedmpi.common.calling import calling
from fedmpi.common.errors import UserError
from fedmpi.common.registry import MARKS, Chosen, Component
from fedmpi.config.base import Count, Table, chooses
from fedmpi.config.client_tables import (
    ClientsTable,
    DataTable,
    LabelHistogram,
    LocalTable,
    Model,
    Norms,
    SamplesTable,
    Strata,
    TaskTable,
)
from fedmpi.config.server_tables import (
    CheckpointTable,
    ClusterTable,
    Devices,
    EvaluationTable,
    LoggingTable,
    PrivacyTable,
    Rebalance,
    ServerTable,
    Star,
    Topology,
)

PLAIN = "plain"


class ConfigTables(Table):
    """All tables of a configuration, each value in its range; `loading.Config` checks that they go together."""

    preset: str | None = None
    """A published method that chooses the components below. The file and --set override it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Every random number of the run follows from it."""
    rounds: Annotated[Count, Field(le=99_999_999)] = 50
    """T, the number of rounds."""
    data: DataTable = DataTable()
    model: Model = Chosen("model", "mlp")
    """Built-in model (mlp, cnn, …) or a custom "package.module:function": function(description, **options). `lora` =
    { rank, alpha, targets }: small matrices beside Linear layers that alone are trained and sent (Hu et al. 2022)."""
    task: TaskTable = TaskTable()
    clients: ClientsTable = ClientsTable()
    samples: SamplesTable = SamplesTable()
    local: LocalTable = LocalTable()
    topology: Topology = Star()
    """star: every selected client sends its update to the server; mediators: groups of clients train sequentially
    (Astraea)."""
    rebalance: Rebalance = None
    """Astraea's augmentation of scarce classes; absent or false = off, true = on with the defaults."""
    server: ServerTable = ServerTable()
    attack: Annotated[Chosen, chooses("attack", "none")] = Chosen("attack", "none")
    """Attack of the dishonest clients, whose share is clients.attack_fraction: none; sign-flip; noise; label-flip; or a
    custom "package.module:function": (update (d,), generator) -> what an attacker sends."""
    compression: Annotated[Chosen, chooses("compressor", "none")] = Chosen("compressor", "none")
    """Lossy upload of updates, simulated: none; float16; bfloat16; int8; top-k; or a custom
    "package.module:function": (update (d,), generator) -> what arrives."""
    privacy: PrivacyTable = PrivacyTable()
    devices: Devices = None
    """Simulated time; absent or false = none, true = with the defaults."""
    cluster: ClusterTable = ClusterTable()
    evaluation: EvaluationTable = EvaluationTable()
    checkpoint: CheckpointTable = CheckpointTable()
    logging: LoggingTable = LoggingTable()


def local_algorithm(config: ConfigTables) -> tuple[Component, Any] | None:
    """Return the component that `local.algorithm` chooses and an instance of it; None for plain local steps."""
    if config.local.algorithm.name == PLAIN:
        return None
    chosen = config.local.algorithm
    part = chosen.component
    if getattr(part.object, MARKS, {}).get("kind") != part.kind:
        raise UserError(f"local.algorithm = {part.name!r} is no subclass of fedmpi.LocalAlgorithm. Make it one")
    with calling(part):
        return part, chosen.make()


def probe_of(config: ConfigTables) -> Literal["full", "batch", "sample"]:
    """Return how much of a client's data a probe of its gradient uses."""
    features = stratification(config).features
    return "full" if isinstance(features, LabelHistogram) else features.probe


def stratification(config: ConfigTables) -> Strata:
    """Return how clients are measured and grouped for the sampler of a configuration."""
    services = config.clients.sampler.services
    if isinstance(services, Strata):
        return services
    return Strata(**({} if services is None else {name: getattr(services, name) for name in Norms.model_fields}))


def further_vectors(config: ConfigTables) -> tuple[int, int, int]:
    """Count the values sent in addition to a client's model and update: vectors (d,) down, vectors up, numbers up."""
    found = local_algorithm(config)
    if found is None:
        return 0, 0, 0
    sent = "server_state" if found[1].sent is None else "sent"
    down, up, numbers = (len(names_in(*found, field)) for field in (sent, "sums", "numbers"))
    return down, up, numbers


def names_in(part: Component, algorithm: Any, field: str) -> tuple[str, ...]:
    """Return the names that an algorithm declares in a field. A single name needs no tuple."""
    declared = getattr(algorithm, field)
    if isinstance(declared, str):
        return (declared,)
    if not isinstance(declared, Sequence):
        raise UserError(f'{part.key} = {part.name!r} has {field} = {declared!r}. List names, as in {field} = ("c",)')
    return tuple(declared)
