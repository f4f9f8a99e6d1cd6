"""The picture of a partition: which client holds how much of which class (FedSTaS Figure 1), and the sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpi.data.shards import ShardStore
from fedmpi.errors import UserError

CLIENTS_SHOWN = 100
_BUBBLE_POINTS = 90.0  # area in square points of the largest bubble


def draw(store: ShardStore, path: Path) -> None:
    """Write the picture in the format that the file name's ending asks for.

    Above `CLIENTS_SHOWN` clients the bubbles show as many, evenly spaced over the clients; the histogram shows all.

    Raises
    ------
    UserError
        matplotlib is not installed, the ending is unknown to it, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError('--plot needs matplotlib: install it with pip install "fedmpi[report]"') from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bubbles, histogram = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = np.unique(np.linspace(0, store.clients - 1, min(store.clients, CLIENTS_SHOWN)).astype(np.int64))
    counts = store.class_counts(shown)
    client, label = np.nonzero(counts)
    held = counts[client, label]
    bubbles.scatter(shown[client], label, s=_BUBBLE_POINTS * held / held.max(), alpha=0.7, linewidths=0)
    note = "" if len(shown) == store.clients else f" ({len(shown)} of {store.clients:,} shown)"
    bubbles.set(xlabel=f"client{note}", ylabel="class", title=f"Samples of each class (largest bubble: {held.max():,})")
    histogram.hist(store.sizes, bins=min(50, 1 + int(np.ptp(store.sizes))), log=True)
    histogram.set(xlabel="samples of a client", ylabel="clients", title="Sizes")
    law = store.manifest.partition
    figure.suptitle(f"{store.name}, {law}, {store.clients:,} clients, {store.samples:,} samples")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise UserError(f"the picture {path} cannot be drawn ({error}): end its name in .png, .pdf or .svg") from None
    except OSError as error:
        raise UserError(f"the picture {path} cannot be written ({error.strerror}): choose another place") from None
