"""Inputs of the steps of a chunk of clients: batches in each client's own order, sample weights, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.types import Ints
from fedmpi.local.batched.stack import BoundNet, client_by_client


@dataclass(frozen=True)
class Timetable:
    """Steps and batch sizes of the clients of a chunk, which are sorted by steps, longest first."""

    batches: list[list[Ints | None]]  # local samples of each step of every client, None = all of them
    counts: Ints  # (T, K): number of samples in the step, 0 when the client has finished

    @classmethod
    def of(cls, batches: list[list[Ints | None]], sizes: Sequence[int]) -> Timetable:
        """Build a timetable from the schedules of the clients, longest first."""
        counts = np.zeros((len(batches[0]), len(batches)), np.int64)
        for client, (schedule, size) in enumerate(zip(batches, sizes, strict=True)):
            counts[: len(schedule), client] = [size if rows is None else len(rows) for rows in schedule]
        return cls(batches, counts)

    @property
    def steps(self) -> int:
        return len(self.counts)

    def active(self, step: int) -> int:
        """Return k: the first k clients take the step."""
        return self._active[step]

    def rows(self, step: int) -> int:
        """Return b, the number of samples in the largest batch of the step."""
        return self._most[step]

    @cached_property
    def _active(self) -> list[int]:
        return [int(active) for active in np.count_nonzero(self.counts, axis=1)]

    @cached_property
    def _most(self) -> list[int]:
        return [int(rows) for rows in self.counts.max(axis=1)]

    def local_rows(self, client: int) -> list[Ints]:
        """Return the local samples of each of the client's steps, int64 (b,)."""
        schedule, counts = self.batches[client], self.counts[:, client]
        return [np.arange(count) if rows is None else rows for rows, count in zip(schedule, counts, strict=False)]


class Weights:
    """Weights 1 / (samples of the client's batch) of every sample of every step, 0 for padding."""

    def __init__(self, timetable: Timetable, dtype: torch.dtype, device: torch.device):
        counts = timetable.counts
        columns = np.arange(int(counts.max()))
        self._ragged = [bool((row[row > 0] != row.max()).any()) for row in counts]
        counted = (columns < counts[:, :, None]).astype(np.float64)
        weights = counted / np.maximum(counts, 1)[:, :, None]
        self._counted = torch.from_numpy(counted).unsqueeze(3).to(device=device, dtype=dtype)
        self._weights = torch.from_numpy(weights).unsqueeze(3).to(device=device, dtype=dtype)

    def of(self, step: int, clients: int, rows: int) -> tuple[Tensor | float, Tensor | None]:
        """Return weights (k, b, 1) or the one weight of all samples, and a mask of the real samples (None = all)."""
        if not self._ragged[step]:
            return 1.0 / rows, None
        return self._weights[step, :clients, :rows], self._counted[step, :clients, :rows]


class Feed:
    """Filler of the buffers of a bound network with the batches of a step.

    Parameters
    ----------
    timetable : Timetable
    features : list of Tensor (n_j, …)
        Inputs of the steps, one tensor per client.
    labels : list of int64 Tensor (n_j,)
    products : Tensor (Σ n_j, outputs), optional
        x·v of every sample, for a first layer whose weights are stored in two parts (`KeptApart`).
    samples : bool
        True if the first layer reads a step's samples; otherwise it needs their `order` only.
    """

    def __init__(
        self,
        timetable: Timetable,
        features: list[Tensor],
        labels: list[Tensor],
        products: Tensor | None = None,
        samples: bool = True,
    ):
        self.timetable, self._products = timetable, products
        joined = not client_by_client(features[0])
        self._all_labels = torch.cat(labels)
        self._joined = torch.cat(features) if joined and samples else None
        self._features = features
        self._rows = [timetable.local_rows(client) for client in range(len(labels))]
        self._positions = self._join(self._rows, np.cumsum([0, *map(len, labels[:-1])])).to(self._all_labels.device)
        each = samples and not joined
        self._local = [[torch.from_numpy(rows) for rows in client] for client in self._rows] if each else None

    def _join(self, local: list[list[Ints]], firsts: Ints) -> Tensor:
        """Return positions (T, K, B) in the joined samples; padding repeats the client's first sample."""
        counts = self.timetable.counts
        index = np.broadcast_to(firsts[:, None], (*counts.shape, int(counts.max()))).astype(np.int64)
        for client, first in enumerate(firsts.tolist()):
            for step, rows in enumerate(local[client]):
                np.add(rows, first, out=index[step, client, : len(rows)])
        return torch.from_numpy(index)

    def order(self) -> list[Tensor]:
        """Return the samples of each client's steps, concatenated, B per step: int64 (T_j · B,).

        The client's first sample fills up smaller batches.
        """
        found, counts = [], self.timetable.counts
        most = int(counts.max())
        for batches in self._rows:
            filled = np.zeros((len(batches), most), np.int64)
            for row, rows in zip(filled, batches, strict=True):
                row[: len(rows)] = rows
            found.append(torch.from_numpy(filled).view(-1).to(self._all_labels.device))
        return found

    def fill(self, net: BoundNet, step: int) -> None:
        """Fill in the samples and labels of a step."""
        positions = self._positions[step, : net.clients, : net.rows].reshape(-1)
        torch.index_select(self._all_labels, 0, positions, out=net.flat_labels)
        if self._products is not None and net.first_output is not None:
            torch.index_select(self._products, 0, positions, out=net.first_output)
        if self._joined is not None:
            net.read_all(self._joined, positions)
        elif self._local is not None:
            for client in range(net.clients):
                net.read(client, self._features[client], self._local[client][step])


class MaskFeed:
    """Filler of the masks of a bound network; each client draws from its own stream."""

    def __init__(self, generators: Sequence[np.random.Generator] | None, timetable: Timetable):
        self._generators = generators
        self._timetable = timetable

    def fill(self, net: BoundNet, step: int) -> None:
        """Fill in the masks of a step; a client's stream serves the layers in order, as in the module itself."""
        counts = self._timetable.counts[step, : net.clients].tolist()
        for dropout in net.dropouts:
            if self._generators is None:
                dropout.keep_all()
                continue
            for client, count in enumerate(counts):
                dropout.draw(client, count, self._generators[client])
