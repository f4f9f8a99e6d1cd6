"""What a federated data set looks like: sizes, classes per client, heterogeneity; as a table and as a picture.

Measures are computed block by block over the clients, so that a million of them take a second and little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmpi.common.fairness import gini
from fedmpi.common.types import Ints
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import Counts, divergences, label_distances


@dataclass(frozen=True)
class Heterogeneity:
    """Measures of a partition; means are over the clients that hold samples, each counted once.

    Parameters
    ----------
    clients, samples, empty_clients : int
        N, n, clients without a sample.
    size_quartiles : 5 floats
        Minimum, lower quartile, median, upper quartile, maximum of the sizes.
    size_mean : float
    gini : float
        Gini coefficient of the sizes: 0 when all are equal, near 1 when one client holds everything.
    classes_per_client : 3 floats
        Minimum, mean, maximum number of classes that a client holds.
    kl_to_global, kl_to_uniform : float
        Mean Kullback-Leibler divergence of a client's labels from the pooled and from the uniform law, in nats.
    label_emd : float
        Mean of sum_c |p_k(c) - p(c)|, in [0, 2]: the earth mover's distance of Zhao et al. (2018), which is twice the
        Wasserstein distance under the discrete metric.
    class_totals : int64 (C,)
        Pooled class counts.
    """

    clients: int
    samples: int
    empty_clients: int
    size_quartiles: tuple[float, float, float, float, float]
    size_mean: float
    gini: float
    classes_per_client: tuple[int, float, int]
    kl_to_global: float
    kl_to_uniform: float
    label_emd: float
    class_totals: Ints


def measure(sizes: Ints, count_blocks: Callable[[], Iterable[Counts]] | None) -> Heterogeneity:
    """All measures of a partition."""
    if count_blocks is None:
        nothing = np.zeros(0, np.int64)
        return Heterogeneity(*_of_sizes(sizes), (0, 0.0, 0), 0.0, 0.0, 0.0, nothing)
    totals = np.asarray(sum(block.sum(axis=0, dtype=np.int64) for block in count_blocks()), np.int64)
    pooled, uniform = totals / totals.sum(), np.full(len(totals), 1 / len(totals))
    sums = np.zeros(3)
    held_sum, fewest, most, seen = 0, len(totals), 0, 0
    for block in count_blocks():
        held = np.count_nonzero(block, axis=1)
        if not held.all():
            block, held = block[held > 0], held[held > 0]
        seen, held_sum = seen + len(block), held_sum + int(held.sum())
        fewest, most = min(fewest, int(held.min(initial=fewest))), max(most, int(held.max(initial=most)))
        measures = divergences(block, pooled), divergences(block, uniform), label_distances(block, pooled)
        sums += [values.sum() for values in measures]
    kl_to_global, kl_to_uniform, label_emd = (sums / seen).tolist()
    return Heterogeneity(
        *_of_sizes(sizes),
        classes_per_client=(fewest, held_sum / seen, most),
        kl_to_global=kl_to_global,
        kl_to_uniform=kl_to_uniform,
        label_emd=label_emd,
        class_totals=totals,
    )


def _of_sizes(sizes: Ints) -> tuple[int, int, int, tuple[float, float, float, float, float], float, float]:
    """The first fields of `Heterogeneity`, which follow from the sizes."""
    low, first, median, third, high = (float(value) for value in np.percentile(sizes, (0, 25, 50, 75, 100)))
    quartiles = low, first, median, third, high
    empty = int(np.count_nonzero(sizes == 0))
    return len(sizes), int(sizes.sum()), empty, quartiles, float(sizes.mean()), gini(sizes)


@dataclass(frozen=True)
class Inspection:
    """A store and its measures."""

    store: ShardStore
    measures: Heterogeneity
    verified: bool  # Checksums were compared

    def render(self, console: Console) -> None:
        """Print the table."""
        table = Table(show_header=False, title=Text(str(self.store.folder or "embedded")), title_justify="left")
        for name, value in self.lines():
            table.add_row(name, Text(value))  # as it stands: brackets are no markup
        console.print(table)

    def lines(self) -> list[tuple[str, str]]:
        """What the table says, name and value."""
        manifest, found = self.store.manifest, self.measures
        options = ", ".join(f"{key}={value}" for key, value in manifest.partition_options.items())
        low, first, median, third, high = found.size_quartiles
        fewest, mean_classes, most = found.classes_per_client
        lines = [
            ("data set", manifest.dataset),
            *manifest.facts(),
            ("partition", f"{manifest.partition}{f' ({options})' if options else ''}, seed {manifest.seed}"),
            ("clients", f"{found.clients:,} in {len(manifest.train):,} shards; {found.empty_clients:,} hold no sample"),
            ("samples", manifest.parts + self._owners()),
            ("left out", f"{manifest.dropped:,} by the partition, {manifest.skipped:,} could not be read"),
            (
                "sizes",
                f"min {low:g}, quartiles {first:g} | {median:g} | {third:g}, max {high:g}, mean {found.size_mean:.4g}",
            ),
            ("size imbalance", f"Gini {found.gini:.3f}"),
        ]
        if manifest.description.labelled:
            lines += [
                ("classes per client", f"min {fewest}, mean {mean_classes:.2f}, max {most} of {manifest.classes}"),
                ("class totals", f"min {found.class_totals.min():,}, max {found.class_totals.max():,}"),
                ("KL to pooled labels", f"mean {found.kl_to_global:.4f} nats"),
                ("KL to uniform labels", f"mean {found.kl_to_uniform:.4f} nats"),
                ("EMD of labels", f"mean {found.label_emd:.4f} (sum of |p_k - p|, at most 2)"),
            ]
        lines += [("files", self._files())]
        return lines + [("note", note) for note in manifest.notes]

    def plot(self, path: Path | str) -> None:
        """Draw the client x class bubble chart and the size histogram; see `fedmpi.inspect.plot`."""
        from fedmpi.inspect.plot import write_plot  # imports matplotlib

        write_plot(self.store, Path(path))

    def _owners(self) -> str:
        offsets = self.store.validation_offsets
        return "" if offsets is None else f" of {np.count_nonzero(np.diff(offsets)):,} clients"

    def _files(self) -> str:
        manifest = self.store.manifest
        total = sum(file.bytes for file in manifest.files())
        state = "checksums agree" if self.verified else "sizes and shapes agree (checksums: --verify)"
        return f"{total / 1e6:,.1f} MB; {state}" if self.store.folder else "in memory"


def inspect_store(store: ShardStore, verified: bool = False) -> Inspection:
    """Measure an open store."""

    blocks = store.class_count_blocks if store.description.labelled else None
    return Inspection(store, measure(store.sizes, blocks), verified)


def inspect_folder(path: Path | str, verify: bool = False, digits_options: dict[str, Any] | None = None) -> Inspection:
    """Open and measure a shard folder, or "digits"."""
    return inspect_store(open_store(path, digits_options, verify), verify)
