"""Data source of the engines: samples of clients as torch tensors, normalized, on the device of the work.

On a CPU, a client that was read completely stays in memory, normalized, within a budget, so that later rounds only take
views. Samples that a model receives as they are stored are not copied: the tensors share the memory of the mapped file,
whose pages the ranks of a node share, or of the user's arrays. A GPU receives all samples once, as they are stored, if
they fit into `DEVICE_SHARE` of its free memory, and else those of a call, through pinned memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Protocol, TypeVar

import numpy as np
import torch

from fedmpi.common.arithmetic import side_stream, to_device
from fedmpi.common.errors import UserError
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.schema import REPREPARE, DataDescription
from fedmpi.data.shards import ShardStore

Tensors = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")
R = TypeVar("R")

RESIDENT_BYTES = 1 << 30
DEVICE_SHARE = 0.5
"""Largest share of a GPU's free memory for samples; models, activations and sums need the rest. Not measured."""
UPLOADED_ROWS = 1 << 16
"""Samples read at once for a GPU."""
_OBJECT_BYTES = 1024  # a pair of tensors in the dictionary, whatever they hold

with warnings.catch_warnings(action="ignore"):  # torch warns once of tensors over arrays that cannot be written to
    torch.from_numpy(np.frombuffer(bytes(1), np.uint8))


class Normalizer:
    """Stored features to model input: (x / 255 - mean) / std for uint8, (x - mean) / std for float32, int32
    unchanged.
    """

    def __init__(self, description: DataDescription, device: torch.device):
        self.device = device
        words = description.dtype == "int32"
        self.output = torch.int32 if words else torch.float32
        self._plain = np.dtype(np.int32 if words else np.float32)
        self.scale: torch.Tensor | None = None
        self.shift: torch.Tensor | None = None
        if words or (description.dtype == "float32" and not description.mean):
            return
        mean = np.asarray(description.mean or 0.0, np.float64)
        std = np.asarray(description.std or 1.0, np.float64)
        unit = 255.0 if description.dtype == "uint8" else 1.0
        image = len(description.feature_shape) == 3
        shape = (-1, 1, 1) if image else (-1,)  # broadcasts over the pixels, or over the steps of a series
        self.scale = torch.tensor(1.0 / (unit * std), dtype=torch.float32, device=device).reshape(shape)
        self.shift = torch.tensor(-mean / std, dtype=torch.float32, device=device).reshape(shape)

    def __call__(self, x: AnyArray | torch.Tensor) -> torch.Tensor:
        """Features (r, \\*feature_shape) as a model receives them, read-only; on a CPU copied only if necessary."""
        if isinstance(x, torch.Tensor):
            out = x.to(self.output, copy=self.scale is not None)  # stored values that are on the device
        elif self.device.type != "cpu":
            return self(to_device(x, self.device))
        elif self.scale is None and x.dtype == self._plain and x.flags.c_contiguous and x.flags.aligned:
            return torch.from_numpy(x)
        else:
            out = torch.empty(x.shape, dtype=self.output)
            np.copyto(out.numpy(), x)  # reads the mapped file and widens in one pass
        return out if self.scale is None or self.shift is None else out.mul_(self.scale).add_(self.shift)


class DataSource(Protocol):
    """Interface of the clients' samples, ready for the model: normalized tensors on the device."""

    @property
    def sizes(self) -> Ints:
        """Return the number of samples of each client, int64 (N,)."""

    @property
    def description(self) -> DataDescription:
        """Return the shape and type of a sample."""

    def load(self, client: int, rows: Ints | None = None) -> Tensors:
        """Return some local samples of a client (None = all): x (r, …) float32 or int32, y int64 (r,). Read-only."""

    def load_positions(self, positions: Ints) -> Tensors:
        """Return the samples at global positions: sample i of client k is at sizes[:k].sum() + i."""


def loaded_ahead(load: Callable[[T], R], wanted: Iterable[T], device: torch.device) -> Iterator[R]:
    """Yield the samples loaded for each of `wanted`, in order.

    On a GPU, a second stream copies the next samples from other pinned memory during the work with the present ones.
    Earlier ones are no longer used, so that samples take up memory twice.
    """
    if device.type == "cpu":
        yield from map(load, wanted)
        return
    loaded: list[R] = []
    for one in wanted:
        with side_stream(device):  # after the last copy and the work with the samples before it
            loaded.append(load(one))
        if len(loaded) > 1:
            yield loaded.pop(0)
    with side_stream(device):
        pass  # the last copy is done before the work that follows
    yield from loaded


class ClientData:
    """Samples of the clients of a store, ready for a model.

    Tensors returned may share memory with later calls: treat them as read-only.
    """

    def __init__(
        self,
        store: ShardStore,
        device: torch.device | str = "cpu",
        resident_bytes: int = RESIDENT_BYTES,
        standardize: bool = True,
    ):
        self.store = store
        self.device = torch.device(device)
        self.description = store.description if standardize else replace(store.description, mean=(), std=())
        self.sizes: Ints = store.sizes
        self.normalize = Normalizer(self.description, self.device)
        self._numbers: type[np.generic] = np.int64 if self.description.counted else np.float32
        self._kept: dict[int, Tensors] = {}
        self._left = resident_bytes

    def load(self, client: int, rows: Ints | None = None) -> Tensors:
        """Samples of one client, all of them or those of some local rows."""
        client = int(client)
        if self._on_device is not None:
            first, end = self.store.offsets[client], self.store.offsets[client + 1]
            if rows is not None:
                return self.load_positions(first + rows)
            return self.normalize(self._on_device[0][first:end]), self._on_device[1][first:end]
        kept = self._kept.get(client)
        if kept is None:
            x, y = self.store.client(client, rows)
            found = self._tensors(x, y)
            if rows is None and self._stays(found, x):
                self._kept[client] = found
            return found
        if rows is None:
            return kept
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return kept[0].index_select(0, index), kept[1].index_select(0, index)

    @cached_property
    def _on_device(self) -> Tensors | None:
        """All samples as they are stored, and their targets, on the GPU; None without one or if they do not fit."""
        device, samples = self.device, self.store.samples
        if device.type == "cpu" or not samples:
            return None
        x, y = self.store.rows(np.zeros(1, np.int64))
        y = y.astype(self._numbers)
        free, _ = torch.cuda.mem_get_info(device)
        if samples * (x.nbytes + y.nbytes) > DEVICE_SHARE * free:
            return None
        features = torch.empty((samples, *x.shape[1:]), dtype=torch.from_numpy(x).dtype, device=device)
        targets = torch.empty((samples, *y.shape[1:]), dtype=torch.from_numpy(y).dtype, device=device)
        for first in range(0, samples, UPLOADED_ROWS):
            x, y = self.store.rows(np.arange(first, min(first + UPLOADED_ROWS, samples)))
            features[first : first + len(x)] = to_device(x, device)
            targets[first : first + len(x)] = to_device(y.astype(self._numbers), device)
        return features, targets

    def _stays(self, found: Tensors, x: AnyArray) -> bool:
        """Check whether a client's tensors may stay in the host's memory."""
        if self.device.type != "cpu":
            return False
        # features that share the memory of the store
        lent = found[0].data_ptr() == x.ctypes.data and not x.flags.writeable
        nbytes = _OBJECT_BYTES + sum(tensor.nbytes for tensor in found[lent:])
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def labels(self, client: int) -> Ints:
        """The targets of one client, a copy: int64 (n,) of classes, otherwise as `load` gives them."""
        return self.store.labels(client).astype(self._numbers)

    def load_positions(self, positions: Ints) -> Tensors:
        """Return the samples at global positions: row i of client k is at sizes[:k].sum() + i."""
        if self._on_device is None:
            return self._tensors(*self.store.rows(positions))
        x, y = self._on_device
        index = to_device(positions, self.device)
        return self.normalize(x.index_select(0, index)), y.index_select(0, index)

    def load_held_out(self, positions: Ints) -> Tensors:
        """Return the samples at positions of the validation part."""
        part = self.store.validation()
        assert part is not None
        return self._tensors(part[0][positions], part[1][positions])

    def test(self) -> Tensors:
        """Return the test part, normalized."""
        return self._finite("test", self._tensors(*self.store.test()))

    def validation(self) -> Tensors | None:
        """Return the validation part, normalized, if the store has one."""
        part = self.store.validation()
        return None if part is None else self._finite("validation", self._tensors(*part))

    def _finite(self, part: str, tensors: Tensors) -> Tensors:
        """The tensors of an evaluated part, which must be finite numbers; others would spoil its scores silently."""
        if tensors[0].is_floating_point() and not bool(tensors[0].isfinite().all()):
            raise UserError(
                f"the {part} part of {self.store.folder or self.store.name} holds features that are not finite: "
                f"{REPREPARE}"
            )
        return tensors

    def _tensors(self, x: AnyArray, y: AnyArray) -> Tensors:
        numbers = y.astype(self._numbers)
        targets = torch.from_numpy(numbers) if self.device.type == "cpu" else to_device(numbers, self.device)
        return self.normalize(x), targets
