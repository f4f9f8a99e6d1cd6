"""Augmented copies of images: random shift, rotation, shear and zoom as one affine warp, made when they are read.

Duan et al. 2019 (Astraea), Algorithm 2, `Augment`. Copy j of a client always has the same source row and the same warp,
drawn from the client's stream, so that nothing need be stored and every reading gives the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.copies.class_copies import Rebalancing, source_rows
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import ClientData, Residence, Tensors

IMAGES_AT_ONCE = 4096  # bounds the sampling grid: 8 bytes a pixel
_PARAMETERS = 6


@dataclass(frozen=True)
class WarpRanges:
    """How far a copy may be warped; each amount is uniform within its range.

    The paper names the four transformations, but not their ranges: these defaults keep letters and digits readable.

    Parameters
    ----------
    rotation, shear : float
        Largest angle in degrees, to either side.
    shift : float
        Largest displacement along each axis, as a share of the image's height or width.
    zoom : float
        Along each axis the image is sampled with a factor in [1 - zoom, 1 + zoom]; in [0, 1).
    """

    rotation: float = 15.0
    shear: float = 10.0
    shift: float = 0.1
    zoom: float = 0.1

    def __post_init__(self) -> None:
        if min(self.rotation, self.shear, self.shift, self.zoom) < 0 or self.zoom >= 1 or self.shear >= 90:
            raise ValueError(f"warp ranges are numbers >= 0, the zoom below 1, the shear below 90 degrees, not {self}")


def check_images(description: DataDescription) -> None:
    """Refuse data that cannot be warped."""
    if description.task != "image" or len(description.feature_shape) != 3:
        raise UserError(
            f"rebalance = true makes copies of images by warping them, but the data have task "
            f"{description.task!r}: set rebalance = false"
        )


def warps_of(count: int, height: int, width: int, ranges: WarpRanges, streams: Streams, client: int) -> Floats:
    """The affine maps of a client's copies."""
    drawn = streams.generator(Purpose.AUGMENT_WARP, 0, client).random((count, _PARAMETERS)) * 2 - 1
    angle, slant = np.deg2rad(drawn[:, 0] * ranges.rotation), np.deg2rad(drawn[:, 1] * ranges.shear)
    zoom = 1 + drawn[:, 2:4] * ranges.zoom
    turned = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], axis=1).reshape(-1, 2, 2)
    sheared = np.zeros((count, 2, 2))
    sheared[:, 0, 0], sheared[:, 0, 1], sheared[:, 1, 1] = 1, -np.sin(slant), np.cos(slant)
    half = np.array([width, height]) / 2
    maps = np.empty((count, 2, 3))
    maps[:, :, :2] = (turned @ sheared) * zoom[:, None, :] * half / half[:, None]
    maps[:, :, 2] = drawn[:, 4:6] * ranges.shift * 2  # a share of the side, which is 2 long
    return maps


def warp(images: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Warp every image by its own affine map, bilinearly; what lies outside repeats the border."""
    warped = torch.empty_like(images)
    for start in range(0, len(images), IMAGES_AT_ONCE):
        part = images[start : start + IMAGES_AT_ONCE].to(torch.float32)
        theta = maps[start : start + IMAGES_AT_ONCE].to(part.device, torch.float32)
        grid = functional.affine_grid(theta, list(part.shape), align_corners=False)
        sampled = functional.grid_sample(part, grid, mode="bilinear", padding_mode="border", align_corners=False)
        if not images.dtype.is_floating_point:
            sampled = sampled.round_()
        warped[start : start + IMAGES_AT_ONCE] = sampled.to(images.dtype)
    return warped


class AugmentedRows:
    """The samples of a store followed, client by client, by its augmented copies; in the stored dtype."""

    def __init__(
        self,
        store: ShardStore,
        rebalancing: Rebalancing,
        streams: Streams,
        ranges: WarpRanges | None = None,
        device: torch.device | str = "cpu",
    ):
        check_images(store.description)
        self.store = store
        self.sizes: Ints = rebalancing.sizes
        self.offsets: Ints = np.concatenate(([0], np.cumsum(self.sizes)))
        self._copies = rebalancing.copies
        self._streams = streams
        self._ranges = ranges or WarpRanges()
        self._device = torch.device(device)

    def read(self, positions: Ints) -> tuple[AnyArray, Ints]:
        """Features and labels at effective global positions (r,), in that order, copied."""
        clients = np.searchsorted(self.offsets, positions, side="right") - 1
        rows = positions - self.offsets[clients]
        copied = np.flatnonzero(rows >= self.store.sizes[clients])
        rows[copied], maps = self._originals(clients[copied], rows[copied])
        x, y = self._stored(self.store.offsets[clients] + rows)
        if len(copied):
            originals = torch.from_numpy(x[copied]).to(self._device)
            x[copied] = warp(originals, torch.from_numpy(maps)).cpu().numpy()
        return x, y

    def labels(self, client: int) -> Ints:
        """The labels of one client's samples and then of its copies, int64 (n,)."""
        own = self.store.client(client)[1].astype(np.int64)
        return np.concatenate([own, own[source_rows(own, self._copies, self._streams, client)]])

    def _originals(self, clients: Ints, rows: Ints) -> tuple[Ints, Floats]:
        """Stored row and warp of each of these copies, (r,) and (r, 2, 3)."""
        description = self.store.description
        _, height, width = description.feature_shape
        sources, maps = np.empty(len(rows), np.int64), np.empty((len(rows), 2, 3))
        for client in np.unique(clients).tolist():
            mine = clients == client
            copy = rows[mine] - self.store.sizes[client]
            all_sources = source_rows(self.store.client(client)[1], self._copies, self._streams, client)
            sources[mine] = all_sources[copy]
            maps[mine] = warps_of(len(all_sources), height, width, self._ranges, self._streams, client)[copy]
        return sources, maps

    def _stored(self, positions: Ints) -> tuple[AnyArray, Ints]:
        order = np.argsort(positions, kind="stable")  # files are read front to back
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        x, y = self.store.rows(positions[order])
        return x[inverse], y[inverse].astype(np.int64)


class AugmentedData:
    """What engines read when rebalancing is on: `ClientData` with every client's augmented copies behind its samples.

    Tensors returned may share memory with later calls: treat them as read-only.
    """

    def __init__(
        self,
        data: ClientData,
        rebalancing: Rebalancing,
        streams: Streams,
        ranges: WarpRanges | None = None,
        resident_bytes: int | None = None,
    ):
        self.data, self.store = data, data.store
        self.device = data.device
        self.description = data.description
        self._rows = AugmentedRows(data.store, rebalancing, streams, ranges, data.device)
        self.sizes = self._rows.sizes
        self.class_counts = rebalancing.class_counts
        self.overhead = rebalancing.overhead
        self._kept: dict[int, Tensors] = {}
        self._residence = Residence.on(self.device) if resident_bytes is None else Residence(resident_bytes)

    def load(self, client: int, rows: Ints | None = None) -> Tensors:
        """Samples of one client, x (r, \\*feature_shape) and y int64 (r,), by effective local rows; None for all."""
        client = int(client)
        if client not in self._kept:
            whole = np.arange(self.sizes[client]) if rows is None else rows
            loaded = self.load_positions(self._rows.offsets[client] + whole)
            if rows is None:
                self._keep(client, loaded)
            return loaded
        x, y = self._kept[client]
        if rows is None:
            return x, y
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(self.device)
        return x.index_select(0, index), y.index_select(0, index)

    def labels(self, client: int) -> Ints:
        """The labels of one client's samples and then of its copies, int64 (n,), a copy."""
        return self._rows.labels(client)

    def load_many(self, clients: Sequence[int] | Ints, rows_of: Sequence[Ints | None]) -> Tensors:
        """Samples of several clients, concatenated client after client, read and warped together."""
        positions = [
            self._rows.offsets[client] + (np.arange(self.sizes[client]) if rows is None else rows)
            for client, rows in zip(clients, rows_of, strict=True)
        ]
        return self.load_positions(np.concatenate(positions) if positions else np.empty(0, np.int64))

    def load_positions(self, positions: Ints) -> Tensors:
        """Samples at effective global positions: client k's row i lies at sizes[:k].sum() + i."""
        x, y = self._rows.read(positions)
        return self.data.normalize(x), torch.from_numpy(y).to(self.device)

    def test(self, start: int = 0, stop: int | None = None) -> Tensors:
        """Rows start ... stop - 1 of the test part, which is never augmented."""
        return self.data.test(start, stop)

    def validation(self) -> Tensors | None:
        """The validation part, never augmented, where the store has one."""
        return self.data.validation()

    def _keep(self, client: int, tensors: Tensors) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._residence.takes(size):
            self._kept[client] = tensors
