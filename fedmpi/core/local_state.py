"""What ranks keep for the local work from round to round: an algorithm's vectors, and the residuals of compression.

Vectors of the server are the same on every rank. Those of clients, and residuals, lie with the ranks that train them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.common.types import Ints
from fedmpi.core.homes import Homes
from fedmpi.core.layout import Layout
from fedmpi.local.hooks import Hooks
from fedmpi.local.pipeline import UpdateObserver
from fedmpi.mpi import Cluster
from fedmpi.records.client_records import load_records, save_records
from fedmpi.updates.compression import RESIDUALS


class LocalState:
    """The state of a run's local work."""

    def __init__(
        self, cluster: Cluster, layout: Layout, clients: int, hooks: Hooks | None, observer: UpdateObserver | None
    ):
        self.cluster, self.layout, self.hooks = cluster, layout, hooks
        self.transport = observer.transport if observer is not None else None
        travels = self.keeps and layout.shared
        self.homes = Homes(cluster, hooks.state, clients) if hooks is not None and travels else None

    @property
    def keeps(self) -> bool:
        """Whether the algorithm keeps vectors of clients."""
        return self.hooks is not None and bool(self.hooks.client_state)

    @property
    def lies_with_ranks(self) -> bool:
        """Whether what is kept for clients lies with the ranks that train them, and dies with them."""
        return self.keeps or (self.transport is not None and self.transport.residuals is not None)

    @property
    def names(self) -> list[str]:
        """Of the tensors that every rank receives from a checkpoint."""
        return [*RESIDUALS, *([] if self.hooks is None else self.hooks.tensor_names)]

    @property
    def server_vectors(self) -> list[Tensor]:
        """The vectors that must be the same on every rank."""
        return [] if self.hooks is None else self.hooks.vectors()

    @property
    def numbers(self) -> Mapping[str, float] | None:
        """What the algorithm has summed in this round beside vectors; None without one."""
        return None if self.hooks is None else self.hooks.totals

    def begin(self, round: int, model: Tensor, further: Mapping[str, Accumulator]) -> None:
        """Start a round from the model (d,); what the algorithm sums goes to `further`."""
        if self.hooks is not None:
            self.hooks.begin(round, model, further)

    def bring(self, clients: Ints, workers: Callable[[], Ints]) -> None:
        """Move the vectors of clients (m,) to the workers (m,) that train them now, where they travel; collective."""
        if self.homes is not None:
            self.homes.bring(clients, self.layout.ranks(workers()))

    def gathered(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the vectors of clients; collective, whole on rank 0."""
        server = {} if self.hooks is None else self.hooks.server_tensors()
        return server | ({} if self.transport is None else self.transport.gather_state(self.cluster))

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over this rank's part of what `names` names."""
        if self.hooks is not None:
            self.hooks.load_server(tensors)
        if self.transport is not None:
            self.transport.load(tensors, range(*self.layout.owned))

    def save_clients(self, path: Path | None) -> dict[str, str]:
        """Write the vectors kept for clients to a file beside a checkpoint, whose header is to hold the result.

        Collective; rank 0 gives the path, or None where nothing is to be written.
        """
        if self.hooks is None or not self.keeps:
            return {}
        digest = save_records(self.cluster, self.hooks.state, path)
        return {"clients": digest} if digest else {}

    def load_clients(self, path: Path | None, folder: Path | None) -> None:
        """Take over the vectors kept for this rank's clients from rank 0's file, None where there is none.

        Collective; rank 0 also gives the run's `folder`, where vectors go for which there is no memory.
        """
        if self.hooks is None or not self.keeps:
            return
        name = os.fsencode(folder.resolve()) if folder is not None else b""
        (received,) = self.cluster.broadcast([np.frombuffer(name, np.uint8)] if self.cluster.is_server else None)
        state = self.hooks.state
        state.folder = Path(os.fsdecode(received.tobytes())) if received.size else None
        clients = load_records(self.cluster, state, path, range(*self.layout.owned))
        if self.homes is not None:
            self.homes.settle(clients, self.layout.ranks(self.layout.owners(clients)))

    def close(self) -> None:
        """Free the file of the clients' vectors."""
        if self.hooks is not None:
            self.hooks.close()
