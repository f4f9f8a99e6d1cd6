"""Client-specific shifts of features and label noise by custom components, applied after the partition.

A feature shift is a function (clients, generator, *, options) that returns a function (x, client, generator) of one
sample x of a client. Label noise is a function (labels, owners, classes, generator, *, options). Both keep all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from data_prep.partitions import Partition
from data_prep.raw import RawDataset
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Ints

SHIFT, LABEL_NOISE = "feature shift", "label noise"
"""Kinds of these components."""
_SHIFT_STREAM, _ROW_STREAM, _LABEL_STREAM = 2, 3, 4  # the partition draws from stream 0, the validation part from 1


def shifted(
    raw: RawDataset, partition: Partition, part: Component, options: Mapping[str, Any], seed: int
) -> RawDataset:
    """Return the data set whose clients' features are shifted.

    The noise of a row comes from its own random stream, so features do not depend on the rows read with it. Measured
    normalization uses the shifted features. The test part is not shifted.
    """
    if raw.task == "text":
        raise UserError(f"--feature-shift {part.name} changes numbers, and {raw.name} is text. Leave it out")
    streams = Streams(seed)
    with calling(part):
        of_sample = part.make(options)(partition.clients, streams.generator(Purpose.PARTITION, _SHIFT_STREAM))
    if not callable(of_sample):
        raise refuse_result(part, f"returned a {type(of_sample).__name__}. Return a function (x, client, generator)")
    owners, position = np.full(len(raw.y), -1, np.int64), np.zeros(len(raw.y), np.int64)
    position[raw.train] = np.arange(len(raw.train))  # a row's number among those for training keys its stream
    owners[raw.train] = partition.owners(len(raw.train))

    def read(rows: Ints) -> AnyArray:
        x = np.array(raw.read(rows))
        with calling(part):
            for place, row in enumerate(rows.tolist()):
                if owners[row] >= 0:
                    generator = streams.generator(Purpose.PARTITION, _ROW_STREAM, int(position[row]))
                    found = checked_sample(part, of_sample(x[place], int(owners[row]), generator), x[place])
                    x[place] = np.clip(np.rint(found), 0, 255) if raw.dtype == "uint8" else found
        return x

    note = f"features shifted client by client: {part.name}; the test part is not"
    return replace(raw, read=read, notes=(*raw.notes, note))


def with_label_noise(
    raw: RawDataset, partition: Partition, part: Component, options: Mapping[str, Any], seed: int
) -> RawDataset:
    """Return the data set whose clients have noisy labels; validation and test part keep the true ones."""
    if not raw.has_classes:
        raise UserError(
            f"--label-noise {part.name} changes classes, and targets of {raw.name} are {raw.targets}. Leave it out"
        )
    generator, owners = Streams(seed).generator(Purpose.PARTITION, _LABEL_STREAM), partition.owners(len(raw.train))
    with calling(part):
        given = part.make(options)(raw.y[raw.train], owners, raw.classes, generator)
    given_y = raw.y.copy()
    given_y[raw.train] = checked_labels(part, given, len(raw.train), raw.classes)
    return replace(raw, given_y=given_y)


def checked_sample(part: Component, given: Any, like: AnyArray) -> AnyArray:
    """Check that a feature shift returned numbers of the same shape; raise `ComponentFailure` otherwise."""
    found = np.asarray(given)
    if found.shape != like.shape or found.dtype.kind not in "uif" or not np.isfinite(found).all():
        raise refuse_result(
            part, f"returned {found.dtype} {found.shape} for a sample {like.shape}. Return as many finite numbers"
        )
    return found


def checked_labels(part: Component, given: Any, rows: int, classes: int) -> Ints:
    """Check that label noise returned int64 (n,) in 0 ... C - 1; raise `ComponentFailure` otherwise."""
    found = np.asarray(given)
    if found.shape != (rows,) or not np.issubdtype(found.dtype, np.integer):
        raise refuse_result(part, f"returned {found.dtype} {found.shape}. Return the label of each of the {rows} rows")
    if not 0 <= found.min(initial=0) <= found.max(initial=0) < classes:
        raise refuse_result(
            part, f"returned labels from {found.min()} to {found.max()}, and there are {classes} classes"
        )
    return found.astype(np.int64)
