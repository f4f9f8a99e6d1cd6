"""What MPI really moved, counted on each rank, by kind of exchange."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass


@dataclass
class BytesMoved:
    """Bytes that this rank handed to MPI or took from it since the start; headers of a few words are not counted.

    Attributes
    ----------
    broadcast : int
        Payload of the broadcasts (sent by rank 0, received by the others).
    gather : int
        Payload of the gathers (received by rank 0 from the others, sent by the others).
    allreduce : int
        Length of the buffers given to Allreduce, between ranks or between the leaders of the nodes.
    window : int
        Bytes of the other ranks' slots that this rank read in the node-local shared memory.
    relay : int
        Bytes sent to another member of a group.
    exchange : int
        Bytes that this rank sent to others in exchanges of all with all.
    """

    broadcast: int = 0
    gather: int = 0
    allreduce: int = 0
    window: int = 0
    relay: int = 0
    exchange: int = 0

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
