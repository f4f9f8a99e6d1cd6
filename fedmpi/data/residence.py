"""How much normalised data stays in memory: a fixed amount on the host, on a GPU a share of what is free there."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

RESIDENT_BYTES = 1 << 30
DEVICE_SHARE = 0.5
"""Of a GPU's free memory; the rest is for models, activations and sums. Not measured on a GPU."""


def resident_budget(free_bytes: int | None) -> int:
    """Bytes that normalised samples may take: a share of a device's free memory, or None there, `RESIDENT_BYTES`."""
    return RESIDENT_BYTES if free_bytes is None else int(DEVICE_SHARE * free_bytes)


class Residence:
    """Says of one piece of data after another whether it stays in memory.

    Parameters
    ----------
    budget : int
        Bytes that may stay.
    free_bytes : callable, optional
        Free memory of the device now. What is free at the start beyond the budget is never taken: ranks may share a
        device, each with a budget of its own, and others compute there.
    """

    def __init__(self, budget: int, free_bytes: Callable[[], int] | None = None):
        self._left, self._free_bytes = budget, free_bytes
        self._spared = 0 if free_bytes is None else free_bytes() - budget

    @classmethod
    def on(cls, device: torch.device) -> Residence:
        """What this device affords, which is logged for a GPU."""
        if device.type != "cuda":
            return cls(resident_budget(None))

        def free_bytes() -> int:
            return int(torch.cuda.mem_get_info(device)[0])

        free = free_bytes()
        budget = resident_budget(free)
        log.info("data: up to %.1f of %.1f GB free on %s keep normalised samples", budget / 1e9, free / 1e9, device)
        return cls(budget, free_bytes)

    def takes(self, nbytes: int) -> bool:
        """Whether so many bytes, in memory already, may stay there; they are counted then."""
        if nbytes > self._left or (self._free_bytes is not None and self._free_bytes() < self._spared):
            return False
        self._left -= nbytes
        return True
