"""What a run will hold in memory at the least, compared with what there is before any of it is taken.

A process that touches more memory than its machine or control group has is killed without a word. What is counted here
is known from the configuration, the data and the model; each is less than what is really taken, so that nothing is
refused that would have worked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedmpi.clients.cohort import cohort_size
from fedmpi.cluster import Cluster
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.choices import chosen
from fedmpi.data.schema import DataDescription
from fedmpi.local.batched.engine import LAID_OUT_BYTES
from fedmpi.local.hooks import Hooks
from fedmpi.local.schedule import step_count
from fedmpi.local.traits import known_traits
from fedmpi.local.work import LocalRule
from fedmpi.models import build, in_words
from fedmpi.models.flat import FlatModel
from fedmpi.models.model_memory import VECTORS, VECTORS_BESIDE_A_DEVICE, NoRoom, shown_bytes, too_large
from fedmpi.rounds.evaluated import rows_evaluated

BYTES_A_VISIT = 100
"""Of the plan of a round's relays: client, epoch, worker and cost of a visit, as arrays and as tuples."""


@dataclass(frozen=True)
class Need:
    """Something that takes memory on a rank.

    Attributes
    ----------
    bytes : int
        At the least.
    what : str
        What it is and which keys say so.
    remedy : str
        What to change.
    """

    bytes: int
    what: str
    remedy: str


def build_model(config: Config, description: DataDescription, device: torch.device, cluster: Cluster) -> nn.Module:
    """The configured model, on the CPU; collective.

    Raises
    ------
    NoRoom
        Its vectors do not fit in the memory that this rank may take; said before the first copy of it is made.
    UserError
        As `models.build`.
    """
    room, what = cluster.memory_for_rank(), in_words(config.model.name, config.model.options)
    vectors = VECTORS if device.type == "cpu" else VECTORS_BESIDE_A_DEVICE
    module = build(config.model.name, config.model.options, description, config.seed, room, vectors)
    size = sum(value.numel() * value.element_size() for value in (*module.parameters(), *module.buffers()))
    if room is not None and size * vectors > room:
        raise too_large(what, size, vectors, room)
    return module


def refuse_large_run(
    config: Config,
    cluster: Cluster,
    model: FlatModel,
    description: DataDescription,
    sizes: Ints,
    test_rows: int,
    workers: int,
    hooks: Hooks | None,
    room: int | None,
) -> None:
    """Refuse what the configuration makes of clients and model where it does not fit in the host's memory.

    Parameters
    ----------
    config : Config
    cluster : Cluster
    model : FlatModel
        Tried already (`local.traits`).
    description : DataDescription
    sizes : int64 (N,)
        Effective sizes of all clients.
    test_rows : int
        Samples of the largest part that is evaluated on.
    workers : int
        Ranks that train.
    hooks : Hooks or None
        Of a local algorithm that has some.
    room : int or None
        Bytes that each rank may take now; None where nobody says.

    Raises
    ------
    NoRoom
        On all ranks alike.
    """
    needs = [
        _relays(config, len(sizes)),
        _updates(config, cluster, model, len(sizes)),
        _kept_of_clients(config, model, len(sizes), workers, hooks),
    ]
    if model.device.type == "cpu":
        evaluated = _evaluated(config, model, description, test_rows)
        needs += [_laid_out(config, sizes), _batch(config, model, sizes), evaluated]
    refuse([need for need in needs if need is not None], room)


def refuse(needs: list[Need], room: int | None) -> None:
    """Refuse the largest of several needs, not all of which come together, where it does not fit.

    Raises
    ------
    NoRoom
    """
    largest = max(needs, key=lambda need: need.bytes, default=None)
    if room is None or largest is None or largest.bytes <= room:
        return
    raise NoRoom(
        f"{largest.what}: at least {shown_bytes(largest.bytes)} of memory, but there is room for {shown_bytes(room)} "
        f"on a rank: {largest.remedy}"
    )


def _participants(config: Config, clients: int) -> int:
    part = config.participation
    if part.clients == "all" or part.count is None and part.fraction is None:
        return clients
    return cohort_size(clients, part.count, part.fraction)


def _relays(config: Config, clients: int) -> Need | None:
    part = config.topology
    if part.kind != "mediators":
        return None
    visits = _participants(config, clients) * part.mediator_epochs
    return Need(
        visits * BYTES_A_VISIT,
        f"the {visits:,} visits of a round, topology.mediator_epochs = {part.mediator_epochs:,} of each participant",
        "set fewer mediator epochs, and more rounds",
    )


def _updates(config: Config, cluster: Cluster, model: FlatModel, clients: int) -> Need | None:
    if config.aggregation.rule == "mean":
        return None
    participants = _participants(config, clients)
    return Need(
        participants * model.size * model.dtype.itemsize // cluster.size,
        f'aggregation.rule = "{chosen(config, "combiner").name}", which keeps the updates of all {participants:,} '
        "participants of a round",
        "let fewer take part, or start more ranks on more nodes",
    )


def _kept_of_clients(config: Config, model: FlatModel, clients: int, workers: int, hooks: Hooks | None) -> Need | None:
    if hooks is None or not hooks.client_state:
        return None
    held = len(hooks.client_state) * model.size * model.dtype.itemsize * -(-clients // workers)
    most = config.cluster.state_memory
    return Need(
        min(held, int(most * 2**30)),
        f"what local.algorithm = {hooks.part.name!r} keeps of its clients in memory, up to cluster.state_memory = "
        f"{most:g} GiB",
        "lower cluster.state_memory, and the rest goes to a file",
    )


def _largest(config: Config, sizes: Ints) -> int:
    """Samples of the largest client, where all of them are used; else one, for nobody knows before they are drawn."""
    return int(sizes.max(initial=0)) if config.samples.rule == "all" else 1


def _laid_out(config: Config, sizes: Ints) -> Need | None:
    """The batches of one client in the batched engine."""
    rule, largest = LocalRule.scheduled(config.local), _largest(config, sizes)
    steps = step_count(rule, largest)
    if config.local.engine != "batched" or not largest:
        return None
    key = f"local.steps = {rule.steps:,}" if rule.steps else f"local.epochs = {rule.epochs:,}"
    rows = min(rule.batch_size or largest, largest)
    return Need(
        steps * rows * LAID_OUT_BYTES,
        f"the {steps:,} batches of a client that {key} makes, laid out before it trains",
        'set fewer, or local.engine = "sequential"',
    )


def _batch(config: Config, model: FlatModel, sizes: Ints) -> Need | None:
    """The largest batch of one client, where it is not merged with others and cut into passes."""
    rule, largest = LocalRule.scheduled(config.local), _largest(config, sizes)
    if not largest or (config.local.optimizer == "sgd" and step_count(rule, largest) == 1):
        return None
    rows = min(rule.batch_size or largest, largest)
    return Need(
        rows * known_traits(model).bytes_kept,
        f"a batch of {rows:,} samples (local.batch_size = {config.local.batch_size!r}) on its way through the model",
        "set a smaller one",
    )


def _evaluated(config: Config, model: FlatModel, description: DataDescription, test_rows: int) -> Need:
    rows = min(rows_evaluated(config.evaluation, model, description), test_rows)
    return Need(
        rows * known_traits(model).bytes_widest,
        f"{rows:,} samples evaluated at once (evaluation.batch_size = {config.evaluation.batch_size!r})",
        "set a smaller one",
    )
