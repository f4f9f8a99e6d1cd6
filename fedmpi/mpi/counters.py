"""What MPI really moved, counted on each rank, by kind of exchange."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass


@dataclass
class BytesMoved:
    """Bytes that this rank handed to MPI or took from it since the start; headers of a few words are not counted."""

    broadcast: int = 0  # Payload of the broadcasts (sent by rank 0, received by the others)
    gather: int = 0  # Payload of the gathers (received by rank 0 from the others, sent by the others)
    allreduce: int = 0  # Length of the buffers given to Allreduce, between ranks or between the leaders of the nodes
    window: int = 0  # Bytes of the other ranks' slots that this rank read in the node-local shared memory
    relay: int = 0  # Bytes sent to another member of a group
    exchange: int = 0  # Bytes that this rank sent to others in exchanges of all with all

    @property
    def total(self) -> int:
        """All kinds together, in bytes."""
        return sum(self.as_tuple())

    def __add__(self, other: BytesMoved) -> BytesMoved:
        return BytesMoved(*(one + more for one, more in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def facts(self) -> dict[str, dict[str, int]]:
        """The summary's entry `mpi_bytes`: every kind, and all together."""
        return {"mpi_bytes": {**asdict(self), "total": self.total}}

    def as_tuple(self) -> tuple[int, ...]:
        """The counters in the order of the attributes."""
        return astuple(self)
