"""The user's own function that hears of every finished round and may end the run: `on_round` of `fedmpi.run`."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from fedmpi.common.errors import PartFailure
from fedmpi.common.object_names import object_name
from fedmpi.mpi import Cluster
from fedmpi.records.history import Record, json_value

OnRound = Callable[[Record], Any]


class Listener:
    """Asks rank 0's function after every round, and sends all ranks what it answered."""

    def __init__(self, cluster: Cluster, on_round: OnRound | None):
        self.cluster = cluster
        self.on_round = on_round if cluster.is_server else None
        own = [np.array([on_round is not None])] if cluster.is_server else None
        self.listens = bool(cluster.broadcast(own)[0][0])

    def ends(self, record: Record | None) -> bool:
        """Whether the run is to end after this round; collective where somebody listens."""
        if not self.listens:
            return False
        wanted, failure, cause = False, None, None
        if self.on_round is not None and record is not None:
            try:
                wanted = bool(self.on_round(dict(json_value(record))))
            except Exception as error:
                failure, cause = _failure(self.on_round, error, record["round"]), error
        answer = json.dumps([wanted, failure]).encode() if self.cluster.is_server else b""
        (received,) = self.cluster.broadcast([np.frombuffer(answer, np.uint8)] if self.cluster.is_server else None)
        wanted, failure = json.loads(received.tobytes())
        if failure is not None:
            raise PartFailure(**failure) from cause
        return bool(wanted)


def _failure(on_round: OnRound, error: Exception, t: int) -> dict[str, Any]:
    """What `PartFailure` is made of: the function, its line, and its own part of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return {
        "kind": "function on_round =",
        "name": object_name(on_round),
        "problem": f"{type(error).__name__}: {error}",
        "where": f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        "trace": "".join(traceback.format_list(frames)).rstrip(),
        "round": t,
    }
