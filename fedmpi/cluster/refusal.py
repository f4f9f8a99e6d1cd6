"""What rank 0 refuses on its own is refused by all ranks together, and so said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from fedmpi.cluster import Cluster
from fedmpi.common.errors import UserError

T = TypeVar("T")


def on_server(cluster: Cluster, work: Callable[[], T]) -> T | None:
    """Let rank 0 alone do something that may raise a UserError; collective.

    Parameters
    ----------
    cluster : Cluster
    work : callable
        Called on rank 0 only.

    Returns
    -------
    object or None
        What `work` returned, on rank 0; None on the others.

    Raises
    ------
    UserError
        On all ranks alike, with rank 0's words.
    """
    result, refusal = None, ""
    if cluster.is_server:
        try:
            result = work()
        except UserError as error:
            refusal = str(error)
    told = cluster.broadcast([np.frombuffer(refusal.encode(), np.uint8)] if cluster.is_server else None)
    if told[0].size:
        raise UserError(told[0].tobytes().decode())
    return result
