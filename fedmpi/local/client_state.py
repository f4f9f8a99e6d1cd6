"""Vectors kept for clients between rounds: on the GPU and in memory up to limits, above them in a file of this rank.

Only clients that have been selected have vectors: a population of 10⁶ with 10⁴ selected clients costs 10⁴ records.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints

DEVICE_SHARE = 0.125
"""Share of a GPU's total memory for the state of clients; samples and clients trained at once take up to 75 %."""
log = logging.getLogger("fedmpi")


class ClientState:
    """Kept vectors of one rank's clients.

    A record (all vectors of a client) stays where it was first written: on a GPU up to `DEVICE_SHARE`, in host memory
    up to the limit (pinned for a GPU), else in a temporary file without a name, which vanishes with the process. A
    client without a record has the values of `initial` (vectors, d), by default zeros.
    """

    def __init__(
        self,
        names: Sequence[str],
        values: int,
        dtype: torch.dtype,
        memory: float,
        device: torch.device | str = "cpu",
        initial: Tensor | None = None,
    ):
        self.names, self.values, self.device = tuple(names), values, torch.device(device)
        self.dtype: np.dtype[np.generic] = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self.record_bytes = len(self.names) * values * self.dtype.itemsize
        limits = {torch.device("cpu"): memory}
        if self.names and self.device.type != "cpu":
            limits = {self.device: DEVICE_SHARE * torch.cuda.mem_get_info(self.device)[1], **limits}
        self._rooms = {place: int(limit // max(self.record_bytes, 1)) for place, limit in limits.items()}
        self.room = sum(self._rooms.values())
        self.folder: Path | None = None
        self._initial = torch.zeros(1, dtype=dtype, device=device) if initial is None else initial
        self._kept: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._file: BufferedRandom | None = None

    def __len__(self) -> int:
        return len(self._kept) + len(self._places)

    def __contains__(self, client: int) -> bool:
        return client in self._kept or client in self._places

    @property
    def clients(self) -> Ints:
        """Return the clients that have a record, sorted."""
        return np.sort(np.fromiter((*self._kept, *self._places), np.int64, len(self)))

    def record(self, client: int) -> AnyArray:
        """Return a client's record in host memory; see `tensor`."""
        return np.asarray(self.tensor(client).cpu())

    def tensor(self, client: int) -> Tensor:
        """Return a client's record (vectors, d) on the device, new if it has none; not a copy if it is kept there."""
        if client in self._kept:
            return self._kept[client].to(self.device, non_blocking=True)
        empty = np.empty((len(self.names), self.values), self.dtype)
        if client not in self._places:
            return self._initial.expand(len(self.names), self.values).clone()
        with self._at(self._places[client]) as file:
            if file.readinto(empty.data.cast("B")) < self.record_bytes:
                raise OSError("the file ends too early")
        return torch.from_numpy(empty).to(self.device)

    def put(self, client: int, record: AnyArray | Tensor) -> None:
        """Store a record (vectors, d); if it already is where it will be kept, the record itself and not a copy."""
        given = torch.as_tensor(record)
        place = next((place for place, left in self._rooms.items() if left), None)
        if place is not None and client not in self:
            self._rooms[place] -= 1
            pinned = self.device.type == "cuda" and place.type == "cpu"
            self._kept[client] = torch.empty_like(given, device=place, pin_memory=pinned)
        if client in self._kept:
            kept = self._kept[client]
            if kept.device == given.device and not kept.is_pinned():
                self._kept[client] = given.contiguous()
            else:
                kept.copy_(given, non_blocking=True)  # later copies wait for it in the same stream
            return
        if client not in self._places:  # without free places, those from 0 on are all taken
            self._places[client] = self._free.pop() if self._free else len(self._places)
        with self._at(self._places[client]) as file:
            file.write(given.cpu().contiguous().numpy().data.cast("B"))

    def drop(self, client: int) -> None:
        """Delete a client's record."""
        if client in self._kept:
            self._rooms[self._kept.pop(client).device] += 1
        elif client in self._places:
            self._free.append(self._places.pop(client))

    def clear(self) -> None:
        """Delete all records."""
        for client in self.clients.tolist():
            self.drop(client)
        self.close()

    def pieces(self, records: int) -> Iterator[tuple[Ints, AnyArray]]:
        """Yield all records in client order, at most so many at a time: clients (c,) and records (c, vectors, d)."""
        clients = self.clients
        for first in range(0, len(clients), max(records, 1)):
            some = clients[first : first + max(records, 1)]
            yield some, torch.stack([self.tensor(client) for client in some.tolist()]).cpu().numpy()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def _at(self, place: int) -> Iterator[BufferedRandom]:
        """Open the file at a record's place; report a file that cannot be written or read in one sentence."""
        folder = self.folder if self.folder is not None and self.folder.is_dir() else Path(tempfile.gettempdir())
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
                log.info("client state beyond %d records goes to a temporary file in %s", self.room, folder)
            self._file.seek(place * self.record_bytes)
            yield self._file
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"the clients' state above cluster.state_memory could not be kept in {folder} "
                f"({error.strerror or error}). Make room there, or raise cluster.state_memory"
            ) from error
