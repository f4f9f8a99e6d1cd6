"""A federated data set described: sizes, classes per client, heterogeneity; as a table and as a picture.

Measures are computed block by block over the clients, so that a million of them take a second and little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmpi.common.errors import UserError
from fedmpi.common.fairness import gini
from fedmpi.common.types import Ints
from fedmpi.data.opening import open_store
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import Counts, divergences, label_distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
            table.add_row(name, Text(value))  # plain text: brackets are no markup
        console.print(table)

    def lines(self) -> list[tuple[str, str]]:
        """Rows of the table, name and value."""
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
        if manifest.description.labeled:
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
        """Draw the client x class bubble chart and the size histogram."""
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

    blocks = store.class_count_blocks if store.description.labeled else None
    return Inspection(store, measure(store.sizes, blocks), verified)


def inspect_folder(path: Path | str, verify: bool = False) -> Inspection:
    """Open and measure a shard folder, or "digits"."""
    return inspect_store(open_store(path, verify=verify), verify)


CLIENTS_SHOWN = 100
BINS = 40
NAMES_SHOWN = 64
"""Classes up to which every one is named on the axis."""
LINEAR_UP_TO = 50
"""Clients in the fullest bin up to which the histogram's axis is linear."""
_INCHES, _POINTS_PER_INCH = (12.0, 4.8), 72
_COLOR = "#2a6f97"
_SMALLEST = 2.0  # square points: one sample among thousands is still seen


def check_picture(path: Path) -> None:
    """Reject a figure that cannot be written, before any other work."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UserError('--plot needs matplotlib: install it with pip install "fedmpi[report]"') from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise UserError(f"the picture {path} cannot be drawn: end its name in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise UserError(f"the picture {path} cannot be written: the folder {path.parent} does not exist; make it first")


def write_plot(store: ShardStore, path: Path) -> None:
    """Write the picture in the format that the file name's ending asks for.

    Above `CLIENTS_SHOWN` clients the bubbles show as many, evenly spaced over the clients; the histogram shows all.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    if store.description.labeled:
        bubbles, histogram = figure.subplots(1, 2, width_ratios=(5, 3))
        _draw_bubbles(bubbles, store)
    else:
        histogram = figure.subplots()
    _draw_sizes(histogram, store.sizes)
    law = store.manifest.partition
    figure.suptitle(f"{store.name}, {law}: {store.clients:,} clients, {store.samples:,} samples")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"the picture {path} cannot be written ({error.strerror}): choose another place") from None


def _draw_bubbles(axes: Axes, store: ShardStore) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    classes = store.description.classes
    shown = np.unique(np.linspace(0, store.clients - 1, min(store.clients, CLIENTS_SHOWN)).astype(np.int64))
    counts = store.class_counts(shown)
    place, label = np.nonzero(counts)
    held = counts[place, label]
    most = int(held.max(initial=1))
    areas = _bubble_area(len(shown), classes)
    axes.scatter(place, label, s=areas * held / most + _SMALLEST, color=_COLOR, alpha=0.75, linewidths=0)
    axes.set_xlim(-1, len(shown))
    axes.set_ylim(-1, classes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    if len(shown) < store.clients:
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda at, _: f"{shown[int(at)]:,}" if 0 <= at < len(shown) else "")
        )
    if classes <= NAMES_SHOWN:
        axes.set_yticks(range(classes), store.manifest.class_names, fontsize=min(9.0, 260 / classes))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    note = "" if len(shown) == store.clients else f", {len(shown)} of {store.clients:,}"
    axes.set(xlabel=f"client{note}", ylabel="class", title="Samples of each class")
    for examples in sorted({1, max(1, round(most / 4)), most}):
        area = areas * examples / most + _SMALLEST
        axes.scatter([], [], s=area, color=_COLOR, alpha=0.75, linewidths=0, label=f"{examples:,}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="samples", labelspacing=1.2)


def _bubble_area(clients: int, classes: int) -> float:
    """Area in square points of the largest bubble: 1.6 times the distance of its neighbors wide."""
    width, height = (0.5 * _INCHES[0] * _POINTS_PER_INCH / clients, 0.75 * _INCHES[1] * _POINTS_PER_INCH / classes)
    diameter = 1.6 * min(max(width, 10.0), max(height, 5.0), 18.0)
    return float(np.pi / 4 * diameter**2)


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    low, high = int(sizes.min()), int(sizes.max())
    width = -(-(high - low + 1) // BINS)  # whole numbers of samples, so that no bin holds more values than another
    edges = np.arange(low, high + width + 1, width) - 0.5
    clients, _, _ = axes.hist(sizes, bins=edges.tolist(), color=_COLOR)
    if np.max(clients) > LINEAR_UP_TO:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="samples of a client", ylabel="clients", title="Sizes")
