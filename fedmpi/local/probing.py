"""How the strata look at clients: gradients of a rank's clients at the current model, in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedmpi.clients.stratifier import ClientProbe
from fedmpi.clients.turnout import opens_with_a_step
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.local.batched.engine import why_not_side_by_side
from fedmpi.local.batched.probes import BatchedProbe
from fedmpi.local.probes import gradient_blocks
from fedmpi.local.work import DataSource
from fedmpi.models.flat import FlatModel


def make_probe(config: Config, model: FlatModel, data: DataSource, streams: Streams, rank: int) -> ClientProbe:
    """The probe of a run: (round, model, clients) -> blocks of (clients, gradients (k, d)).

    Small clients are probed side by side where the model has a stacked form, unless sums are to be exact: the rounding
    of a stack depends on who is in it.
    """
    rows = None if config.local.batch_size == "all" else config.local.batch_size
    side_by_side = config.local.engine in ("auto", "batched") and not config.aggregation.exact
    stackable = side_by_side and why_not_side_by_side(model, data.description) is None
    batched = BatchedProbe(model, data, rank) if stackable else None

    def probe(t: int, w: Tensor, clients: Ints) -> Iterator[tuple[Ints, Tensor]]:
        part = config.participation
        purpose = Purpose.BATCH_ORDER if opens_with_a_step(config, t) else Purpose.PROBE
        return gradient_blocks(
            data, model, clients, w, part.probe, streams, t, rows, rank, batched=batched, purpose=purpose
        )

    return probe
