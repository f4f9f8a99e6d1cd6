"""Inputs of the steps of a chunk of clients: batches in each client's own order, sample weights, masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.types import Ints
from fedmpi.local.batched.stack import BoundNet, client_by_client


class Timetable:
    """Steps and batch sizes of the clients of a chunk, which are sorted by steps, longest first.

    `batches` are the local samples of each step of every client, None = all of them; `sizes` the clients' samples.
    """

    def __init__(self, batches: list[list[Ints | None]], sizes: Sequence[int]):
        self.steps = len(batches[0])
        self.batches = [
            [np.arange(size) if rows is None else rows for rows in own]
            for own, size in zip(batches, sizes, strict=True)
        ]
        self.counts = np.zeros((self.steps, len(batches)), np.int64)  # (T, K): samples in the step, 0 when finished
        for client, own in enumerate(self.batches):
            self.counts[: len(own), client] = list(map(len, own))
        self.active: list[int] = np.count_nonzero(self.counts, axis=1).tolist()  # the first so many clients take a step
        self.steps_of_clients: list[int] = np.count_nonzero(self.counts, axis=0).tolist()
        self.most: list[int] = self.counts.max(axis=1).tolist()  # samples in the largest batch of a step

    def filled(self, firsts: Sequence[int]) -> Tensor:
        """Return the samples of all steps, counted from each client's first, which fills up smaller batches.

        int64 (T, K, B).
        """
        index = np.empty((*self.counts.shape, max(self.most)), np.int64)
        index[:] = np.asarray(firsts)[:, None]
        for client, own in enumerate(self.batches):
            for step, rows in enumerate(own):
                index[step, client, : len(rows)] += rows
        return torch.from_numpy(index)

    def orders(self, device: torch.device) -> list[Tensor]:
        """Return each client's own samples of all its steps, as `filled`: int64 (T_j · B,)."""
        order = self.filled([0] * len(self.batches)).to(device)
        return [own[: len(steps)].reshape(-1) for own, steps in zip(order.unbind(1), self.batches, strict=True)]


class Feed:
    """Filler of the buffers of a bound network with the batches, weights and masks of a step.

    `features` and `labels` have one tensor per client. `products` are those of `KeptApart`; `samples` is False if the
    first layer does not read a step's samples. `generators` are the streams of the clients' masks; None disables
    dropout.
    """

    def __init__(
        self,
        timetable: Timetable,
        features: list[Tensor],
        labels: list[Tensor],
        dtype: torch.dtype,
        products: Tensor | None = None,
        samples: bool = True,
        generators: Sequence[np.random.Generator] | None = None,
    ):
        self.timetable, self._products, self._generators = timetable, products, generators
        joined, counts = not client_by_client(features[0]), timetable.counts
        self._all_labels = torch.cat(labels)
        self._joined = torch.cat(features) if joined and samples else None
        self._features = features if samples and not joined else None
        device = self._all_labels.device
        self._positions = timetable.filled(np.cumsum([0, *map(len, labels[:-1])]).tolist()).to(device)
        counted = (np.arange(max(timetable.most)) < counts[:, :, None]).astype(np.float64)
        weights = counted / np.maximum(counts, 1)[:, :, None]
        self._ragged = [bool((row[row > 0] != row.max()).any()) for row in counts]
        self._counted = torch.from_numpy(counted).unsqueeze(3).to(device=device, dtype=dtype)
        self._weights = torch.from_numpy(weights).unsqueeze(3).to(device=device, dtype=dtype)

    def weights(self, net: BoundNet, step: int) -> tuple[Tensor | float, Tensor | None]:
        """Return weights (k, b, 1) or the one weight of all samples, and a mask of the real samples (None = all).

        A sample weighs 1 / (samples of the client's batch), padding 0.
        """
        if not self._ragged[step]:
            return 1.0 / net.rows, None
        return self._weights[step, : net.clients, : net.rows], self._counted[step, : net.clients, : net.rows]

    def fill(self, net: BoundNet, step: int) -> None:
        """Fill in the samples, labels and masks of a step; a client's stream serves the layers in order."""
        positions = self._positions[step, : net.clients, : net.rows].reshape(-1)
        torch.index_select(self._all_labels, 0, positions, out=net.flat_labels)
        if self._products is not None and net.first_output is not None:
            torch.index_select(self._products, 0, positions, out=net.first_output)
        if self._joined is not None:
            net.read_all(self._joined, positions)
        elif self._features is not None:
            for client in range(net.clients):
                rows = self.timetable.batches[client][step]
                net.read(client, self._features[client], torch.from_numpy(rows))
        counts = self.timetable.counts[step, : net.clients].tolist()
        for dropout in net.dropouts:
            if self._generators is None:
                dropout.keep_all()
                continue
            for client, count in enumerate(counts):
                dropout.draw(client, count, self._generators[client])
