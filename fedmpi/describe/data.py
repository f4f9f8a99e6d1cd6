"""A federated data set described: sizes, classes per client, heterogeneity; as a table and as a figure.

Classes are counted block by block over the clients, so that a million of them take a second and little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmpi.common.errors import UserError
from fedmpi.common.fairness import gini
from fedmpi.common.files import write_named
from fedmpi.common.types import AnyArray, Ints
from fedmpi.data.shards import ShardStore
from fedmpi.data.statistics import Counts, kl_divergence, label_distances

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def label_measures(count_blocks: Callable[[], Iterable[Counts]]) -> dict[str, AnyArray]:
    """Return the pooled class counts (C,), and of each client that holds samples its number of classes, the
    Kullback-Leibler divergences of its labels from the pooled and from the uniform distribution in nats, and
    sum_c |p_k(c) - p(c)| in [0, 2].

    The last one is the earth mover's distance of Zhao et al. (2018), twice the Wasserstein distance under the discrete
    metric.
    """
    totals = np.asarray(sum(block.sum(axis=0, dtype=np.int64) for block in count_blocks()), np.int64)
    pooled, uniform = totals / totals.sum(), np.full(len(totals), 1 / len(totals))
    found = []
    for block in count_blocks():
        held = block[block.any(axis=1)]
        apart = kl_divergence(held, pooled), kl_divergence(held, uniform), label_distances(held, pooled)
        found.append(np.stack([np.count_nonzero(held, axis=1), *apart]))
    names = ("classes", "kl_to_pooled", "kl_to_uniform", "distance")
    return {"totals": totals, **dict(zip(names, np.concatenate(found, axis=1), strict=True))}


def store_facts(store: ShardStore, verified: bool = False) -> list[tuple[str, str]]:
    """Return the rows of the table of a data set, name and value; means are over clients, each counted once."""
    manifest, sizes, held_out = store.manifest, store.sizes, store.validation_offsets
    shards = len(manifest.train)
    options = ", ".join(f"{key}={value}" for key, value in manifest.partition_options.items())
    owners = "" if held_out is None else f" of {np.count_nonzero(np.diff(held_out)):,} clients"
    low, first, median, third, high = np.percentile(sizes, (0, 25, 50, 75, 100))
    lines = [
        ("data set", manifest.dataset),
        *manifest.facts(),
        ("partition", f"{manifest.partition}{f' ({options})' if options else ''}, seed {manifest.seed}"),
        ("clients", f"{len(sizes):,} in {shards:,} shard{'s' * (shards > 1)}; {(sizes == 0).sum():,} without samples"),
        ("samples", manifest.parts + owners),
        ("left out", f"{manifest.dropped:,} by the partition, {manifest.skipped:,} could not be read"),
        ("sizes", f"min {low:g}, quartiles {first:g} | {median:g} | {third:g}, max {high:g}, mean {sizes.mean():.4g}"),
        ("size imbalance", f"Gini {gini(sizes):.3f}"),
    ]
    if manifest.description.labeled:
        found = label_measures(store.class_count_blocks)
        held, totals = found["classes"], found["totals"]
        lines += [
            ("classes per client", f"min {held.min():g}, mean {held.mean():.2f}, max {held.max():g} of {len(totals)}"),
            ("class totals", f"min {totals.min():,}, max {totals.max():,}"),
            ("KL to pooled labels", f"mean {found['kl_to_pooled'].mean():.4f} nats"),
            ("KL to uniform labels", f"mean {found['kl_to_uniform'].mean():.4f} nats"),
            ("EMD of labels", f"mean {found['distance'].mean():.4f} (sum of |p_k - p|, at most 2)"),
        ]
    state = "checksums agree" if verified else "sizes and shapes agree (checksums: --verify)"
    size = sum(file.bytes for file in manifest.files()) / 1e6
    lines.append(("files", f"{size:,.1f} MB; {state}" if store.folder else "in memory"))
    return lines + [("note", note) for note in manifest.notes]


def show_store(store: ShardStore, console: Console, verified: bool = False) -> None:
    """Print the table of a data set."""
    table = Table(show_header=False, title=Text(str(store.folder or "embedded")), title_justify="left")
    for name, value in store_facts(store, verified):
        table.add_row(name, Text(value))  # plain text: brackets are no markup
    console.print(table)


def plot_store(store: ShardStore, path: Path) -> None:
    """Draw the client x class bubble chart and the size histogram; the name's ending chooses the format.

    Above `CLIENTS_SHOWN` clients the bubbles show as many, evenly spaced over the clients; the histogram shows all.
    """
    try:
        from matplotlib.figure import Figure  # slow to import
    except ImportError:
        raise UserError('--plot needs matplotlib. Install it with pip install "fedmpi[report]"') from None
    figure, form, content = Figure(figsize=_INCHES, layout="constrained"), path.suffix.lower().lstrip("."), BytesIO()
    if form not in figure.canvas.get_supported_filetypes():
        raise UserError(f"the figure {path} cannot be drawn. End its name in .png, .pdf or .svg")
    if store.description.labeled:
        bubbles, histogram = figure.subplots(1, 2, width_ratios=(5, 3))
        _draw_bubbles(bubbles, store)
    else:
        histogram = figure.subplots()
    _draw_sizes(histogram, store.sizes)
    scheme = store.manifest.partition
    figure.suptitle(f"{store.name}, {scheme}: {store.clients:,} clients, {store.samples:,} samples")
    figure.savefig(content, format=form, dpi=150)
    write_named(path, content.getvalue())


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
