"""The picture of a partition: which client holds how much of which class (FedSTaS Figure 1), and the sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.data.shards import ShardStore

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLIENTS_SHOWN = 100
BINS = 40
NAMES_SHOWN = 64
"""Classes up to which every one is named on the axis."""
LINEAR_UP_TO = 50
"""Clients in the fullest bin up to which the histogram's axis is linear."""
_INCHES, _POINTS_PER_INCH = (12.0, 4.8), 72
_COLOUR = "#2a6f97"
_SMALLEST = 2.0  # square points: one sample among thousands is still seen


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be written, before anything else is done."""
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
    if store.description.labelled:
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
    axes.scatter(place, label, s=areas * held / most + _SMALLEST, color=_COLOUR, alpha=0.75, linewidths=0)
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
        axes.scatter([], [], s=area, color=_COLOUR, alpha=0.75, linewidths=0, label=f"{examples:,}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="samples", labelspacing=1.2)


def _bubble_area(clients: int, classes: int) -> float:
    """Area in square points of the largest bubble: 1.6 times the distance of its neighbours wide."""
    width, height = (0.5 * _INCHES[0] * _POINTS_PER_INCH / clients, 0.75 * _INCHES[1] * _POINTS_PER_INCH / classes)
    diameter = 1.6 * min(max(width, 10.0), max(height, 5.0), 18.0)
    return float(np.pi / 4 * diameter**2)


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    low, high = int(sizes.min()), int(sizes.max())
    width = -(-(high - low + 1) // BINS)  # whole numbers of samples, so that no bin holds more values than another
    edges = np.arange(low, high + width + 1, width) - 0.5
    clients, _, _ = axes.hist(sizes, bins=edges.tolist(), color=_COLOUR)
    if np.max(clients) > LINEAR_UP_TO:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.7)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="samples of a client", ylabel="clients", title="Sizes")
