"""What rank 0 refuses on its own is refused by all ranks together, and so said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fedmpi.common.errors import RunFailure, UserError
from fedmpi.mpi import Cluster

T = TypeVar("T")


def on_server(cluster: Cluster, work: Callable[[], T]) -> T | None:
    """Let rank 0 alone do something that may raise a UserError; collective."""
    result, refusal, kind = None, "", UserError
    if cluster.is_server:
        try:
            result = work()
        except UserError as error:
            refusal, kind = str(error), RunFailure if isinstance(error, RunFailure) else UserError
    words = [np.frombuffer(refusal.encode(errors="backslashreplace"), np.uint8), np.array([kind is RunFailure])]
    received = cluster.broadcast(words if cluster.is_server else None)
    if received[0].size:
        raise (RunFailure if received[1][0] else UserError)(received[0].tobytes().decode())
    return result
