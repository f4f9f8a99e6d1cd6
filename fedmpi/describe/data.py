"""A federated data set described: sizes, classes per client, heterogeneity; as a table and as a figure.

Measures are computed block by block over the clients, so that a million of them take a second and little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmpi.common.errors import UserError
from fedmpi.common.fairness import gini
from fedmpi.common.types import Ints
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import Counts, kl_divergence, label_distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Heterogeneity:
    """Measures of a partition; means are over the clients that hold samples, each counted once."""

    clients: int
    samples: int
    empty_clients: int
    size_quartiles: tuple[float, ...]  # minimum, lower quartile, median, upper quartile, maximum
    size_mean: float
    gini: float  # of the sizes: 0 when all are equal, near 1 when one client holds everything
    classes_per_client: tuple[int, float, int] = (0, 0.0, 0)  # minimum, mean, maximum
    # Mean Kullback-Leibler divergence of a client's labels from the pooled and from the uniform distribution, in nats
    kl_to_global: float = 0.0
    kl_to_uniform: float = 0.0
    # Mean of sum_c |p_k(c) - p(c)|, in [0, 2]: the earth mover's distance of Zhao et al. (2018), which is twice the
    # Wasserstein distance under the discrete metric
    label_emd: float = 0.0
    class_totals: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # pooled class counts (C,)


def measure(sizes: Ints, count_blocks: Callable[[], Iterable[Counts]] | None) -> Heterogeneity:
    """All measures of a partition; those of the sizes alone without class counts."""
    found = Heterogeneity(
        clients=len(sizes),
        samples=int(sizes.sum()),
        empty_clients=int(np.count_nonzero(sizes == 0)),
        size_quartiles=tuple(np.percentile(sizes, (0, 25, 50, 75, 100)).tolist()),
        size_mean=float(sizes.mean()),
        gini=gini(sizes),
    )
    if count_blocks is None:
        return found
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
        measures = kl_divergence(block, pooled), kl_divergence(block, uniform), label_distances(block, pooled)
        sums += [values.sum() for values in measures]
    kl_to_global, kl_to_uniform, label_emd = (sums / seen).tolist()
    return replace(
        found,
        classes_per_client=(fewest, held_sum / seen, most),
        kl_to_global=kl_to_global,
        kl_to_uniform=kl_to_uniform,
        label_emd=label_emd,
        class_totals=totals,
    )


@dataclass(frozen=True)
class Inspection:
    """A store and its measures."""

    store: ShardStore
    verified: bool = False  # Checksums were compared

    @cached_property
    def measures(self) -> Heterogeneity:
        """Return the measures of the partition."""
        return measure(self.store.sizes, self.store.class_count_blocks if self.store.description.labeled else None)

    def render(self, console: Console) -> None:
        """Print the table."""
        table = Table(show_header=False, title=Text(str(self.store.folder or "embedded")), title_justify="left")
        for name, value in self.lines():
            table.add_row(name, Text(value))  # plain text: brackets are no markup
        console.print(table)

    def lines(self) -> list[tuple[str, str]]:
        """Rows of the table, name and value."""
        manifest, found = self.store.manifest, self.measures
        options = ", ".join(f"{key}={value}" for key, value in manifest.partition_options.items())
        low, first, median, third, high = found.size_quartiles
        fewest, mean_classes, most = found.classes_per_client
        held_out = self.store.validation_offsets
        owners = "" if held_out is None else f" of {np.count_nonzero(np.diff(held_out)):,} clients"
        lines = [
            ("data set", manifest.dataset),
            *manifest.facts(),
            ("partition", f"{manifest.partition}{f' ({options})' if options else ''}, seed {manifest.seed}"),
            ("clients", f"{found.clients:,} in {len(manifest.train):,} shards; {found.empty_clients:,} hold no sample"),
            ("samples", manifest.parts + owners),
            ("left out", f"{manifest.dropped:,} by the partition, {manifest.skipped:,} could not be read"),
            (
                "sizes",
                f"min {low:g}, quartiles {first:g} | {median:g} | {third:g}, max {high:g}, mean {found.size_mean:.4g}",
            ),
            ("size imbalance", f"Gini {found.gini:.3f}"),
        ]
        if manifest.description.labeled:
            lines += [
                ("classes per client", f"min {fewest}, mean {mean_classes:.2f}, max {most} of {manifest.classes}"),
                ("class totals", f"min {found.class_totals.min():,}, max {found.class_totals.max():,}"),
                ("KL to pooled labels", f"mean {found.kl_to_global:.4f} nats"),
                ("KL to uniform labels", f"mean {found.kl_to_uniform:.4f} nats"),
                ("EMD of labels", f"mean {found.label_emd:.4f} (sum of |p_k - p|, at most 2)"),
            ]
        state = "checksums agree" if self.verified else "sizes and shapes agree (checksums: --verify)"
        size = sum(file.bytes for file in manifest.files()) / 1e6
        lines.append(("files", f"{size:,.1f} MB; {state}" if self.store.folder else "in memory"))
        return lines + [("note", note) for note in manifest.notes]

    def plot(self, path: Path) -> None:
        """Draw the client x class bubble chart and the size histogram; the name's ending chooses the format.

        Above `CLIENTS_SHOWN` clients the bubbles show as many, evenly spaced over the clients; the histogram shows all.
        """
        try:
            from matplotlib.figure import Figure  # slow to import
        except ImportError:
            raise UserError('--plot needs matplotlib. Install it with pip install "fedmpi[report]"') from None
        store, figure = self.store, Figure(figsize=_INCHES, layout="constrained")
        if path.suffix.lower().lstrip(".") not in figure.canvas.get_supported_filetypes():
            raise UserError(f"the figure {path} cannot be drawn. End its name in .png, .pdf or .svg")
        if store.description.labeled:
            bubbles, histogram = figure.subplots(1, 2, width_ratios=(5, 3))
            _draw_bubbles(bubbles, store)
        else:
            histogram = figure.subplots()
        _draw_sizes(histogram, store.sizes)
        scheme = store.manifest.partition
        figure.suptitle(f"{store.name}, {scheme}: {store.clients:,} clients, {store.samples:,} samples")
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"the figure {path} cannot be written ({error.strerror}). Choose another place") from None


def inspect_folder(path: Path | str, verify: bool = False) -> Inspection:
    """Open and measure a shard folder, or "digits"."""
    return Inspection(open_store(path, verify=verify), verify)


CLIENTS_SHOWN = 100
BINS = 40
NAMES_SHOWN = 64
"""Classes up to which every one is named on the axis."""
LINEAR_UP_TO = 50
"""Clients in the fullest bin up to which the histogram's axis is linear."""
_INCHES = (12.0, 4.8)
_COLOR = "#2a6f97"
_SMALLEST = 2.0  # square points: one sample among thousands is still seen


def _draw_bubbles(axes: Axes, store: ShardStore) -> None:
    from matplotlib.ticker import MaxNLocator

    classes = store.description.classes
    shown = np.unique(np.linspace(0, store.clients - 1, min(store.clients, CLIENTS_SHOWN)).astype(np.int64))
    counts = store.class_counts(shown)
    place, label = np.nonzero(counts)
    held = counts[place, label]
    most = int(held.max(initial=1))
    # The largest bubble is 1.6 times as wide as the distance of its neighbors.
    width, height = 0.5 * _INCHES[0] * 72 / len(shown), 0.75 * _INCHES[1] * 72 / classes
    largest = np.pi / 4 * (1.6 * min(max(width, 10.0), max(height, 5.0), 18.0)) ** 2
    look: dict[str, Any] = {"color": _COLOR, "alpha": 0.75, "linewidths": 0}
    axes.scatter(shown[place], label, s=largest * held / most + _SMALLEST, **look)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if classes <= NAMES_SHOWN:
        axes.set_yticks(range(classes), store.manifest.class_names, fontsize=min(9.0, 260 / classes))
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    note = "" if len(shown) == store.clients else f", {len(shown)} of {store.clients:,}"
    axes.set(xlabel=f"client{note}", ylabel="class", title="Samples of each class", ylim=(-1, classes))
    for examples in sorted({1, max(1, round(most / 4)), most}):
        axes.scatter([], [], s=largest * examples / most + _SMALLEST, label=f"{examples:,}", **look)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="samples", labelspacing=1.2)


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    low, high = int(sizes.min()), int(sizes.max())
    width = -(-(high - low + 1) // BINS)  # whole numbers of samples, so that no bin holds more values than another
    edges = np.arange(low, high + width + 1, width) - 0.5
    clients, _, _ = axes.hist(sizes, bins=edges.tolist(), color=_COLOR)
    if np.max(clients) > LINEAR_UP_TO:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set(xlabel="samples of a client", ylabel="clients", title="Sizes")
