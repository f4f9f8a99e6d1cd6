"""What a part costs with many clients: processor seconds and memory, first on fewer clients, so that it always ends."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from fedmpi.testing.check import demand

CLIENTS = 100_000
SECONDS = 10.0
"""Processor seconds of one round with CLIENTS clients that are too many: a hundred times what built-in parts need."""
BYTES = 1 << 30


LITTLE = (0.01, 1 << 20)
"""Seconds and bytes below which nothing is said about how they grow."""


def cost(prepare: Callable[[int], Any], use: Callable[[Any], object], things: str = "clients") -> str:
    """Use a part on 1,000, 10,000 and 100,000 clients, or things of another name; stops where ten times more would cost
    too much.
    """
    before, spent = LITTLE, LITTLE
    for clients in (CLIENTS // 100, CLIENTS // 10, CLIENTS):
        before, spent = spent, _measured(use, prepare(clients))
        seen = f"{spent[0]:.3g} s and {spent[1] / 2**20:.3g} MiB with {clients:,} {things}"
        for now, then, little, limit in zip(spent, before, LITTLE, (SECONDS, BYTES), strict=True):
            growth = max(10.0, now / max(then, little)) if clients > CLIENTS // 100 else 10.0
            expected = now * (growth if clients < CLIENTS else 1.0)
            demand(
                expected <= limit, f"a round takes {seen}, ten times more {things} {growth:.3g} times that: use arrays"
            )
    return f"{spent[0]:.2g} s, {spent[1] / 2**20:.2g} MiB a round with {CLIENTS:,} {things}"


def _measured(use: Callable[[Any], object], world: Any) -> tuple[float, int]:
    """Processor seconds, and the peak of the memory that was taken."""
    tracemalloc.start()
    started = time.process_time()
    try:
        use(world)
        return time.process_time() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
