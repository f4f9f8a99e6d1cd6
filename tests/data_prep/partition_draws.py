"""Helpers of the partition tests: a draw from a seed, and the class counts of its clients."""

from __future__ import annotations

import numpy as np

from data_prep.partitions import Partition, partition
from fedmpi.common.streams import Purpose, Streams


def draw(
    name: str,
    labels: np.ndarray,
    classes: int,
    clients: int | None,
    seed: int = 0,
    class_names: tuple[str, ...] = (),
    **options: object,
) -> Partition:
    """Users hold three rows each; superclasses are pairs of classes; any attribute of row r is (r * 7919) mod 1009."""
    rows = np.arange(len(labels))
    users = rows * 7919 % max(1, len(labels) // 3)
    generator = Streams(seed).generator(Purpose.PARTITION)
    pairs, numbers = np.arange(classes) // 2, (rows * 7919 % 1009).astype(np.float64)
    return partition(name, labels, classes, clients, generator, users, class_names, pairs, lambda _: numbers, **options)


def counts_of(made: Partition, labels: np.ndarray, classes: int) -> np.ndarray:
    owner = np.repeat(np.arange(made.clients), made.sizes)
    return np.bincount(owner * classes + labels[made.rows], minlength=made.clients * classes).reshape(-1, classes)
