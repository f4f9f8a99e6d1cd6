"""Rebalancing by augmentation (Duan et al. 2019, Astraea, Algorithm 2): copies of scarce classes' images.

Three steps: how many copies every sample gets, how each copy is warped (one random affine map: shift, rotation, shear
and zoom), and the clients' samples as a run reads them. Copy j of a client always has the same source row and the same
warp, drawn from the client's stream. Copies are made while reading ("virtual") or have been written into the shards by
`python -m data_prep augment` ("stored"); the counts are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedmpi.common.apportionment import offsets_of
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.config import Config
from fedmpi.config.tables import RebalanceTable
from fedmpi.data.schema import REPREPARE, DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import ClientData
from fedmpi.data.statistics import kl_divergence, summarize

ORIGINAL_COUNTS = "original_class_counts"
"""Array beside augmented shards: int (N, C), the clients' class counts without the copies."""


def copies_per_sample(totals: Ints, alpha: float, reading: str = "ratio") -> Floats:
    """Return the expected augmented copies of one sample of each class, (C,) (Algorithm 2, lines 2-5 and 11).

    Only classes with 0 < C_y < C̄ have copies. C̄ is the mean over all C classes, the missing ones too, as line 2 has it.
    The paper's text hands `Augment` the number (C̄/C_y)^α and adds what it generates to the original data: reading
    "ratio", under which even α = 0 doubles the scarce classes and α = 1 takes class y from C_y to C_y + C̄, beyond the
    mean. Under "ratio-minus-one" the original is one of the (C̄/C_y)^α images: α = 0 adds nothing and α = 1 takes the
    class to C̄ exactly, which fits the paper's advice to choose α in [0, 1] so that the imbalance is mitigated.
    """
    totals = np.asarray(totals, np.float64)
    scarce = (totals > 0) & (totals < totals.mean())
    ratio = np.where(scarce, totals.mean() / np.where(scarce, totals, 1.0), 1.0) ** alpha
    return np.where(scarce, ratio - (reading == "ratio-minus-one"), 0.0)


@dataclass(frozen=True)
class Rebalancing:
    """The augmentation of a whole population."""

    copies: Floats  # (C,): Expected copies of one sample of every class
    class_counts: Ints  # (N, C): Samples of every client and class, copies included
    original_counts: Ints  # (N, C): The same without the copies

    @cached_property
    def sizes(self) -> Ints:
        """n_k with the copies, int64 (N,)."""
        sizes: Ints = self.class_counts.sum(axis=1)
        return sizes

    @cached_property
    def original_sizes(self) -> Ints:
        """n_k without the copies, int64 (N,): rows n_k and above of a client are copies."""
        sizes: Ints = self.original_counts.sum(axis=1)
        return sizes

    @property
    def added(self) -> Ints:
        """Copies of every client, int64 (N,)."""
        return self.sizes - self.original_sizes

    @property
    def overhead(self) -> float:
        """Copies as a share of the original samples: the storage overhead of the paper's Fig 9 when they are stored."""
        return float(self.added.sum() / self.original_sizes.sum())


def rebalance(class_counts: Ints, alpha: float, reading: str, streams: Streams) -> Rebalancing:
    """Augment every client's classes that are scarce in the whole population (Algorithm 2).

    `class_counts` (N, C) is what every client sends to the server at the start (step 1 of the paper's workflow). The
    copies of each sample are the whole part of `copies_per_sample`, plus one with the probability of its fractional
    part, drawn sample by sample from the stream (AUGMENT_COPIES, 0, client), as in `copies_of`.
    """
    copies = copies_per_sample(class_counts.sum(axis=0), alpha, reading)
    augmented, classes = class_counts.copy(), len(copies)
    for client in np.flatnonzero(class_counts @ copies):
        labels = np.repeat(np.arange(classes), class_counts[client])
        numbers = copies_of(labels, copies, streams, int(client))
        augmented[client] += np.bincount(labels, numbers, classes).astype(np.int64)
    return Rebalancing(copies, augmented, class_counts)


def copies_of(labels: NDArray[np.integer], copies: Floats, streams: Streams, client: int) -> Ints:
    """Numbers of copies of each sample of one client; the draws are those of its samples class by class."""
    numbers: Ints = np.floor(copies).astype(np.int64)[labels]
    by_class = np.argsort(labels, kind="stable")
    drawn = by_class[(copies % 1 > 0)[labels[by_class]]]
    if len(drawn):
        uniforms = streams.generator(Purpose.AUGMENT_COPIES, 0, client).random(len(drawn))
        numbers[drawn] += uniforms < copies[labels[drawn]] % 1
    return numbers


def source_rows(labels: NDArray[np.integer], copies: Floats, streams: Streams, client: int) -> Ints:
    """The stored row that each augmented row of one client is a copy of."""
    return np.repeat(np.arange(len(labels)), copies_of(labels, copies, streams, client))


IMAGES_AT_ONCE = 4096  # bounds the sampling grid: 8 bytes a pixel
_PARAMETERS = 6


def check_images(description: DataDescription) -> None:
    """Reject data that cannot be warped."""
    if description.task != "image" or len(description.feature_shape) != 3:
        raise UserError(
            f"rebalance = true makes copies of images by warping them, but the data have task "
            f"{description.task!r}. Set rebalance = false"
        )


def warps_of(count: int, height: int, width: int, ranges: RebalanceTable, streams: Streams, client: int) -> Floats:
    """The affine maps of a client's copies; each amount is uniform within its range.

    The paper names the four transformations, but not their ranges: the defaults keep letters and digits readable.
    """
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
        ranges: RebalanceTable,
        device: torch.device | str = "cpu",
    ):
        check_images(store.description)
        self.__dict__ |= store.__dict__
        self.original = store
        self.sizes: Ints = rebalancing.sizes
        self.offsets = offsets_of(self.sizes)
        self._copies = rebalancing.copies
        self._streams = streams
        self._ranges = ranges
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


@dataclass(frozen=True)
class ClientSamples:
    """Samples that the engines read, and the effect of rebalancing on them."""

    data: ClientData
    originals: ClientData  # The same without copies that are made while reading
    rebalancing: Rebalancing | None = None  # None when rebalancing is off
    # (N,): The n_k of the aggregation weights if they leave the copies out: the first n_k rows of a client count
    weight_sizes: Ints | None = None

    @property
    def sizes(self) -> Ints:
        """Samples of every client, copies included, int64 (N,)."""
        return self.data.sizes

    @property
    def description(self) -> DataDescription:
        """Description of a sample for a model."""
        return self.data.description

    def class_counts(self, clients: Ints | None = None) -> Ints:
        """Samples of every class held by the clients (all of them when None), copies included; int64 (m, C)."""
        if self.rebalancing is None:
            return self.data.store.class_counts(clients)
        return self.rebalancing.class_counts[slice(None) if clients is None else clients]


def client_samples(config: Config, store: ShardStore, streams: Streams, device: torch.device) -> ClientSamples:
    """The clients' samples, with the copies of scarce classes after each client's own when rebalancing is on."""
    part, normalize = config.rebalance, config.data.normalize
    originals = data = ClientData(store, device, standardize=normalize)
    if part is None:
        return ClientSamples(data, originals)
    check_images(store.description)
    if part.mode == "stored":
        rebalancing = stored_rebalancing(part, store)
    elif ORIGINAL_COUNTS in store.extras:
        raise UserError(
            f"{config.data.source.name} contains augmented copies and would be augmented twice. Set rebalance.mode = "
            '"stored"'
        )
    else:
        rebalancing = rebalance(store.class_counts(), part.alpha, part.copies, streams)
        augmented = AugmentedStore(store, rebalancing, streams, part, device)
        data = ClientData(augmented, device, standardize=normalize)
    weighed = rebalancing.original_sizes if part.weights == "original" else None
    return ClientSamples(data, originals, rebalancing, weighed)


def stored_rebalancing(part: RebalanceTable, store: ShardStore) -> Rebalancing:
    """The augmentation that the store's shards were written with."""
    if ORIGINAL_COUNTS not in store.extras:
        raise UserError(
            'rebalance.mode = "stored" trains on copies written by `python -m data_prep augment SHARDS --out OTHER`, '
            'but data.source holds none. Augment it and set data.source = "OTHER", or set rebalance.mode = "virtual"'
        )
    written = store.manifest.partition_options
    for key, wanted in (("alpha", part.alpha), ("copies", part.copies)):
        if written.get(f"augment_{key}") != wanted:
            raise UserError(
                f"data.source was augmented with {key} = {written.get(f'augment_{key}')}, but rebalance.{key} = "
                f"{wanted}. Set the same, or augment again"
            )
    original = store.extras[ORIGINAL_COUNTS]
    counts = store.class_counts()
    alike = original.shape == counts.shape and original.dtype.kind in "iu"
    if not alike or (original > counts).any() or (original < 0).any():
        raise UserError(
            f"{store.folder} does not say how many of its samples are copies, so it is damaged. "
            f"{REPREPARE.capitalize()}"
        )
    original = original.astype(np.int64)
    copies = copies_per_sample(original.sum(axis=0), part.alpha, part.copies)
    return Rebalancing(copies, counts, original)


def rebalancing_facts(config: Config, store: ShardStore, rebalancing: Rebalancing | None) -> dict[str, Any]:
    """Effect of augmentation on the whole population, for the first record and the summary (Figs 7 and 9).

    `bytes` is the size of the copies in shards (features in their stored type, a label of 8 bytes). Virtual copies are
    never stored, so `stored_bytes` is then 0.
    """
    if rebalancing is None:
        return {}
    assert config.rebalance is not None
    mode, description, added = config.rebalance.mode, store.description, int(rebalancing.added.sum())
    row_bytes = math.prod(description.feature_shape) * np.dtype(description.dtype).itemsize + 8
    before, after = rebalancing.original_counts, rebalancing.class_counts
    return {
        "mode": mode,
        "copies": added,
        "overhead": rebalancing.overhead,
        "bytes": added * row_bytes,
        "stored_bytes": added * row_bytes if mode == "stored" else 0,
        "copies_per_sample": rebalancing.copies.tolist(),
        "class_totals_before": before.sum(axis=0).tolist(),
        "class_totals": after.sum(axis=0).tolist(),
        "kl_global_before": float(kl_divergence(before.sum(axis=0))),
        "kl_global": float(kl_divergence(after.sum(axis=0))),
        **summarize(kl_divergence(before), "kl_client_before"),
        **summarize(kl_divergence(after), "kl_client"),
    }
