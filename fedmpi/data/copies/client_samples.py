"""The clients' samples as a run reads them: as stored, or with the copies of scarce classes that rebalancing adds.

Duan et al. 2019 (Astraea), Algorithm 2. Copies are made while reading ("virtual") or have been written into the shards
by `python -m data_prep.augment` ("stored"); the counts are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedmpi.common.errors import UserError
from fedmpi.common.streams import Streams
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.server_tables import RebalanceTable
from fedmpi.data.copies.class_copies import ORIGINAL_COUNTS, Rebalancing, copies_per_sample, rebalance
from fedmpi.data.copies.warps import AugmentedStore, WarpRanges, check_images
from fedmpi.data.schema import REPREPARE, DataDescription
from fedmpi.data.shards import ShardStore
from fedmpi.data.source import ClientData
from fedmpi.data.statistics import kl_divergence, summarize


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
            f"{config.data.source.name} contains augmented copies and would be augmented twice: set rebalance.mode = "
            '"stored"'
        )
    else:
        rebalancing = rebalance(store.class_counts(), part.alpha, part.copies, streams)
        ranges = WarpRanges(part.rotation, part.shear, part.shift, part.zoom)
        augmented = AugmentedStore(store, rebalancing, streams, ranges, device)
        data = ClientData(augmented, device, standardize=normalize)
    weighed = rebalancing.original_sizes if part.weights == "original" else None
    return ClientSamples(data, originals, rebalancing, weighed)


def stored_rebalancing(part: RebalanceTable, store: ShardStore) -> Rebalancing:
    """The augmentation that the store's shards were written with."""
    if ORIGINAL_COUNTS not in store.extras:
        raise UserError(
            'rebalance.mode = "stored" trains on copies written by `python -m data_prep.augment SHARDS --out OTHER`, '
            'but data.source holds none: augment it and set data.source = "OTHER", or set rebalance.mode = "virtual"'
        )
    written = store.manifest.partition_options
    for key, wanted in (("alpha", part.alpha), ("copies", part.copies)):
        if written.get(f"augment_{key}") != wanted:
            raise UserError(
                f"data.source was augmented with {key} = {written.get(f'augment_{key}')}, but rebalance.{key} = "
                f"{wanted}: set the same, or augment again"
            )
    original = store.extras[ORIGINAL_COUNTS]
    counts = store.class_counts()
    alike = original.shape == counts.shape and original.dtype.kind in "iu"
    if not alike or (original > counts).any() or (original < 0).any():
        raise UserError(f"{store.folder} does not say how many of its samples are copies: it is damaged; {REPREPARE}")
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
