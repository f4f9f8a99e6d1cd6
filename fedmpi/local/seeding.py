"""Random numbers that a model draws by itself: its generators and the global ones are seeded by client and round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from fedmpi.common.generators import kept_generators, restart, seed_generators, torch_seeded
from fedmpi.common.streams import Purpose, Streams
from fedmpi.models.dropout import ClientMasks
from fedmpi.models.flat import FlatModel


def seeded(model: FlatModel, streams: Streams, round: int, client: int, draws: bool) -> AbstractContextManager[None]:
    """Within: the global generators and those that the model holds are seeded from the stream (MODULE, round, client).

    What the model counts and keeps from call to call begins anew.
    """
    return _at(model, streams.seed64(Purpose.MODULE, round, client), draws)


@contextmanager
def evaluating(
    model: FlatModel, streams: Streams, purpose: Purpose, round: int, client: int, draws: bool
) -> Iterator[None]:
    """Within: whatever the model draws in evaluation mode, masks of dropout too, comes from a stream.

    What it counts and keeps from call to call has its first values, whatever this rank has trained.
    """
    masks = ClientMasks(partial(streams.generator, purpose, round, client))
    with model.masks.given_by(masks), _at(model, streams.seed64(purpose, round, client), draws):
        yield


def _at(model: FlatModel, seed: int, draws: bool) -> AbstractContextManager[None]:
    """Within: the model begins anew (`FlatModel.restart`), with its generators and the global ones at this seed."""
    model.restart()
    if not model.generators:
        return _all_seeded(seed) if draws else torch_seeded(seed, model.device)
    return _held_seeded(model, seed, draws)


@contextmanager
def _all_seeded(seed: int) -> Iterator[None]:
    with kept_generators():
        seed_generators(seed)
        yield


@contextmanager
def _held_seeded(model: FlatModel, seed: int, draws: bool) -> Iterator[None]:
    """As `_at`; a module may hold one of the global generators, so that all of these are put back."""
    with kept_generators():
        for generator in model.generators:
            restart(generator, seed)
        with _all_seeded(seed) if draws else torch_seeded(seed, model.device):
            yield
