"""What `fedmpi inspect RUN` shows: how well a finished run's model tells each class, and which ones it mixes up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedmpi.records.confusion import Confusion, read_confusion

MOST_SHOWN = 40
"""Classes that are listed; of more those with the lowest F1."""
MIXED = 5
"""Pairs of classes that are named, most often mixed up first."""


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, and not one of shards."""
    return (folder / "config.toml").is_file()


def show_classes(folder: Path, console: Console) -> None:
    """Print precision, recall and F1 of each class on the test part, and the classes that are mixed up most."""
    found = read_confusion(folder)
    scores = found.classes()
    shown = sorted(scores, key=lambda one: one["f1"])[:MOST_SHOWN] if len(scores) > MOST_SHOWN else scores
    title = f"{folder}: the final model on {int(found.counts.sum()):,} test samples"
    if len(shown) < len(scores):
        title += f"; the {len(shown)} of {len(scores)} classes with the lowest F1"
    table = Table(title=Text(title), title_justify="left")
    for name in ("class", "samples", "predicted", "precision", "recall", "F1"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for one in shown:
        shares = (f"{one[name]:.4f}" for name in ("precision", "recall", "f1"))
        table.add_row(Text(one["class"]), f"{one['samples']:,}", f"{one['predicted']:,}", *shares)
    console.print(table)
    for line in mixed_up(found):
        console.print(Text(line))


def mixed_up(found: Confusion, most: int = MIXED) -> Sequence[str]:
    """The pairs of a true and another predicted class with the most samples, in words."""
    wrong = found.counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [divmod(int(place), len(found.names)) for place in order]
    return [
        f"{found.names[true]} taken for {found.names[guess]}: {wrong[true, guess]:,} of {found.counts[true].sum():,}"
        for true, guess in pairs
        if wrong[true, guess]
    ]
