"""Where clients' vectors are kept: on the rank that trained the client last, from which they follow it to the next one.

Who trains whom is a pure function of the plan, so every rank knows all homes and all moves without asking.
"""

from __future__ import annotations

import numpy as np

from fedmpi.common.types import Ints
from fedmpi.local.client_state import ClientState
from fedmpi.mpi import Cluster

MOVED_BYTES = 64 << 20
"""Of records that travel at once, over all ranks."""


class Homes:
    """The rank that keeps each client's record."""

    def __init__(self, cluster: Cluster, state: ClientState, clients: int):
        self.cluster, self.state = cluster, state
        self._rank = np.full(clients, -1, np.int32)
        self.moved = 0

    def settle(self, clients: Ints, ranks: Ints) -> None:
        """Note on which ranks the records of these clients lie."""
        self._rank[clients] = ranks

    def bring(self, clients: Ints, ranks: Ints) -> None:
        """Move the records of these clients to the ranks that train them now; collective, with the same arguments.

        A rank below zero trains nobody: the record stays where it is.
        """
        clients, ranks = clients[ranks >= 0], ranks[ranks >= 0]
        homes = self._rank[clients]
        moving = np.flatnonzero((homes >= 0) & (homes != ranks))
        at_once = max(1, MOVED_BYTES // self.state.record_bytes)
        for first in range(0, len(moving), at_once):
            some = moving[first : first + at_once]
            self._move(clients[some], homes[some].astype(np.int64), ranks[some])
        self._rank[clients] = ranks
        self.moved += len(moving)

    def _move(self, clients: Ints, homes: Ints, ranks: Ints) -> None:
        """Send records from their homes to other ranks: rank by rank, in client order."""
        order = np.lexsort((clients, ranks))
        clients, homes, ranks = clients[order], homes[order], ranks[order]
        going, coming = np.flatnonzero(homes == self.cluster.rank), np.flatnonzero(ranks == self.cluster.rank)
        coming = coming[np.argsort(homes[coming], kind="stable")]
        values = self.state.record_bytes // np.dtype(np.float32).itemsize
        outgoing, incoming = np.empty((len(going), values), np.float32), np.empty((len(coming), values), np.float32)
        for row, client in zip(outgoing, clients[going].tolist(), strict=True):
            row[:] = self.state.record(client).reshape(-1).view(np.float32)
            self.state.drop(client)
        counts = [np.bincount(who, minlength=self.cluster.size) * values for who in (ranks[going], homes[coming])]
        self.cluster.exchange(outgoing.reshape(-1), counts[0], incoming.reshape(-1), counts[1])
        for row, client in zip(incoming, clients[coming].tolist(), strict=True):
            self.state.put(client, row.view(self.state.dtype).reshape(-1, self.state.values).copy())
