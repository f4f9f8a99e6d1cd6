"""Augmented copies of images: random shift, rotation, shear and zoom as one affine warp, made when they are read.

Duan et al. 2019 (Astraea), Algorithm 2, `Augment`. Copy j of a client always has the same source row and the same warp,
drawn from the client's stream, so that nothing need be stored and every reading gives the same image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.copies.class_copies import Rebalancing, source_rows
from fedmpi.data.schema import DataDescription
from fedmpi.data.shards import ShardStore

IMAGES_AT_ONCE = 4096  # bounds the sampling grid: 8 bytes a pixel
_PARAMETERS = 6


@dataclass(frozen=True)
class WarpRanges:
    """Ranges of the warps of a copy; each amount is uniform within its range.

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
    """Reject data that cannot be warped."""
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
    """Warp every image by its own affine map, bilinearly. Points outside the image repeat its border."""
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


class AugmentedStore(ShardStore):
    """A store whose clients have their augmented copies after their samples; in the stored dtype.

    The test and the validation part have no copies.
    """

    def __init__(
        self,
        store: ShardStore,
        rebalancing: Rebalancing,
        streams: Streams,
        ranges: WarpRanges | None = None,
        device: torch.device | str = "cpu",
    ):
        check_images(store.description)
        self.__dict__ |= store.__dict__
        self.original = store
        self.sizes: Ints = rebalancing.sizes
        self.offsets = offsets_of(self.sizes)
        self._copies = rebalancing.copies
        self._streams = streams
        self._ranges = ranges or WarpRanges()
        self._device = torch.device(device)

    def client(self, client: int, rows: Ints | None = None) -> tuple[AnyArray, Ints]:
        """Features and labels of one client, all or those of some rows, copied."""
        return self.rows(self.offsets[client] + (np.arange(self.sizes[client]) if rows is None else rows))

    def rows(self, positions: Ints) -> tuple[AnyArray, Ints]:
        """Features and labels, copied, at global positions (r,): client k's row i is at sizes[:k].sum() + i."""
        clients = np.searchsorted(self.offsets, positions, side="right") - 1
        rows = positions - self.offsets[clients]
        copied = np.flatnonzero(rows >= self.original.sizes[clients])
        rows[copied], maps = self._originals(clients[copied], rows[copied])
        x, y = self.original.rows(self.original.offsets[clients] + rows)
        if len(copied):
            originals = torch.from_numpy(x[copied]).to(self._device)
            x[copied] = warp(originals, torch.from_numpy(maps)).cpu().numpy()
        return x, y

    def labels(self, client: int) -> Ints:
        """The labels of one client's samples and then of its copies, int64 (n,)."""
        own = self.original.labels(client).astype(np.int64)
        return np.concatenate([own, own[source_rows(own, self._copies, self._streams, client)]])

    def _originals(self, clients: Ints, rows: Ints) -> tuple[Ints, Floats]:
        """Stored row and warp of each of these copies, (r,) and (r, 2, 3)."""
        _, height, width = self.description.feature_shape
        sources, maps = np.empty(len(rows), np.int64), np.empty((len(rows), 2, 3))
        for client in np.unique(clients).tolist():
            mine = clients == client
            copy = rows[mine] - self.original.sizes[client]
            all_sources = source_rows(self.original.labels(client), self._copies, self._streams, client)
            sources[mine] = all_sources[copy]
            maps[mine] = warps_of(len(all_sources), height, width, self._ranges, self._streams, client)[copy]
        return sources, maps
