"""What to do where a device runs out of memory: less at once."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger("fedmpi")


def ran_out(error: BaseException) -> bool:
    """Whether this is, or was caused by, a device without memory for what was asked of it."""
    return isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError)


def halved(count: int, what: str) -> int:
    """Half as many at once, at least one, and said so; what torch keeps for later use is given back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    fewer = max(1, count // 2)
    log.warning("out of memory on the device with %d %s at once: goes on with %d", count, what, fewer)
    return fewer
