"""Coefficients as the planner and the workers make them together; all draws of a design."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

from fedmpi import Cohort, components
from fedmpi.aggregation.weights import Weighing
from fedmpi.clients.availability import ClientAvailability
from fedmpi.clients.designs import proportional_inclusion, systematic
from fedmpi.clients.sampler import View
from fedmpi.clients.turnout import CohortDraw
from fedmpi.common.registry import resolve
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import load_config
from fedmpi.core.plan import Planner

KINDS = [part.name for part in components("weights")]


def weighing(kind: str, **options: Any) -> Weighing:
    """The built-in weights of this name, with those of the options that they have."""
    part = resolve("weights", kind)
    return Weighing(part, {name: value for name, value in options.items() if name in part.fields})


def coefficients(
    kind: str,
    cohort: Cohort,
    sizes: np.ndarray,
    used: np.ndarray | None = None,
    wanted: int | None = None,
    **options: Any,
) -> np.ndarray:
    """The coefficient of every participant that uses `used` of its samples, all by default; 0 where it uses none."""
    chosen = weighing(kind, **options)
    used = sizes[cohort.clients] if used is None else used
    found = chosen.of(replace(cohort, wanted=wanted), sizes, 0)
    return found * used if chosen.per_sample else found * ((used > 0) | chosen.averages_models)


def planner(*settings: str, sizes: Ints, labels: Ints | None = None) -> Planner:
    """A planner of clients of one class each."""
    config = load_config(None, settings)
    counts = None if labels is None else lambda: np.eye(10, dtype=np.int64)[labels]
    streams = Streams(config.seed)
    return Planner(config, sizes, streams, CohortDraw(config, sizes, counts, streams, values=1000))


@cache
def availability(law: str, streams: Streams) -> ClientAvailability:
    """Return a model given as "bernoulli clients.availability.probability=0.3"."""
    return ClientAvailability(load_config(None, f"clients.sampler=all clients.availability={law}".split()), streams)


def there(law: str, streams: Streams, round: int, clients: int, labels: Ints | None = None) -> Ints:
    """Return the clients that such a model makes available in a round."""
    counts = None if labels is None else lambda: np.eye(labels.max() + 1, dtype=np.int64)[labels]
    view = View(round, clients, np.ones(clients, np.int64), clients, streams, counts=counts)
    present = availability(law, streams).present(view)
    return np.arange(present) if isinstance(present, int) else present


def every_draw(norms: np.ndarray, count: int) -> Iterator[tuple[float, np.ndarray]]:
    """All (probability, positions) of a systematic draw by norm: every order of clients and interval of the start."""
    inclusion = proportional_inclusion(norms, count)
    orders = list(permutations(range(len(norms))))
    for order in orders:
        edges = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(inclusion[list(order)]) % 1.0]))
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            yield (high - low) / len(orders), systematic(inclusion, np.array(order), (low + high) / 2)
