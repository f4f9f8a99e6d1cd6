"""What a partition looks like before it is written: the measures of `fedmpi.inspect.report` from the labels alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_prep.partitions.common import Partition
from fedmpi.common.types import Ints
from fedmpi.inspect.report import Heterogeneity, measure

_CELLS = 1 << 22


def class_count_blocks(partition: Partition, labels: Ints, classes: int) -> Iterator[Ints]:
    """Class counts of the clients in blocks, int64 (m, C), of bounded size."""
    step = max(1, _CELLS // classes)
    for low in range(0, partition.clients, step):
        bounds = partition.offsets[low : low + step + 1]
        held = len(bounds) - 1
        owner = np.repeat(np.arange(held), np.diff(bounds))
        counts = np.bincount(owner * classes + labels[partition.rows[bounds[0] : bounds[-1]]], minlength=held * classes)
        yield counts.reshape(held, classes)


def describe(partition: Partition, labels: Ints, classes: int) -> Heterogeneity:
    """Sizes, classes per client and heterogeneity of a partition.

    Parameters
    ----------
    partition : Partition
    labels : int64 (n,)
        Labels of the training rows.
    classes : int
        C.
    """
    return measure(partition.sizes, lambda: class_count_blocks(partition, labels, classes))
