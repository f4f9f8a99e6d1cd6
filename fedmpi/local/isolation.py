"""Isolation of clients: each starts with a fresh module and generators at its own streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import Tensor, nn

from fedmpi.common.calling import kept_generators, seed_generators
from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.dropout import ClientMasks, NoMasks
from fedmpi.models.flat import FlatModel
from fedmpi.models.isolation import seed_held_generators


def begin_training(
    model: FlatModel, values: Tensor, streams: Streams, round: int, client: int, dropout: bool = True
) -> None:
    """Reset the module to training mode at `values` (d,), which steps change in place; its dropout layers draw from the
    client's stream."""
    model.begin(values)
    if not model.module.training:
        model.module.train()
    stream = partial(streams.generator, Purpose.DROPOUT, round, client)
    model.draw_masks_from(ClientMasks(stream) if dropout else NoMasks())


def seeded(
    model: FlatModel, streams: Streams, round: int, client: int, purpose: Purpose = Purpose.MODULE, more: bool = False
) -> AbstractContextManager[None]:
    """Seed the global generators and those of the module from the stream (purpose, round, client) within the context.
    They are seeded unless a plain module and a built-in loss are used without `more`, since only others may draw from
    them."""
    if model.plain and not model.loss.part.foreign and not more:
        return nullcontext()
    return _seeded(model.module, streams.seed64(purpose, round, client))


@contextmanager
def _seeded(module: nn.Module, seed: int) -> Iterator[None]:
    with kept_generators():
        seed_generators(seed)
        seed_held_generators(module, seed)
        yield


@contextmanager
def evaluating(
    model: FlatModel, values: Tensor, streams: Streams, purpose: Purpose, round: int, client: int
) -> Iterator[nn.Module]:
    """Reset the module to evaluation mode at `values` (d,) within the context; the values are not changed.

    All draws, masks of dropout included, come from the stream (purpose, round, client).
    """
    model.look(values)
    model.module.eval()
    masks = ClientMasks(partial(streams.generator, purpose, round, client))
    with model.masks.given_by(masks), seeded(model, streams, round, client, purpose):
        yield model.module
