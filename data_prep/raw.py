"""A data set as read from its official files, before any partition: what every reader hands to the writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.data.schema import Understood as Understood
from fedmpi.data.schema import scales_of
from fedmpi.data.statistics import STATISTICS_ROWS, statistics


@dataclass(frozen=True)
class RawDataset:
    """One data set as read from its official files; n training rows, C classes."""

    name: str  # The data set's name on the command line, e.g. ``"mnist"``
    task: Literal["image", "text", "vector"]  # What a row of features is
    # C; labels lie in 0 ... C-1. Where targets are no classes, the values of an output: labels, numbers, or the classes
    # of each position
    classes: int
    class_names: tuple[str, ...]  # C names, in label order; may be none where targets are no classes
    # Shape of one row as stored and as models see it: (channels, height, width) for images (a grey image of 28 x 28 is
    # (1, 28, 28)), (length,) for tokens and vectors
    feature_shape: tuple[int, ...]
    dtype: Literal["uint8", "float32", "int32"]  # The smallest dtype that holds the features faithfully
    # Normalisation, one value for each channel or column, or for all, of x / 255 (uint8) or x (float32); empty for text
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # (n,): Labels of the training rows. Where targets are no classes: what partition laws may go by in place of them,
    # or zeros
    labels: Ints
    users: Ints | None  # (n,): The natural client of every training row, 0 ... U-1, where the data set names one
    user_names: tuple[str, ...] | None  # U names of the users
    # ``read(rows)`` gives the features (r, \*feature_shape) of the given training rows (int64, in any order); its
    # memory is bounded by the rows asked for
    read: Callable[[Ints], AnyArray]
    # (t, \*feature_shape): The test part; test_y (t, \*target_shape) where targets are no classes. No rows where the
    # files have no test part: `data_prep.holdout` then takes one from the training rows
    test_x: AnyArray
    test_y: AnyArray
    skipped: int  # Training and test rows of the official files that could not be read
    licence: str  # Terms of use and what to cite
    citation: str
    vocabulary: tuple[str, ...] = ()  # The words of the token ids, for text
    # (V, dim): Pretrained word vectors in the order of the vocabulary, stored once beside the shards
    vectors: npt.NDArray[np.float32] | None = None
    extras: dict[str, AnyArray] = field(default_factory=dict)  # Further arrays stored once beside the shards
    notes: tuple[str, ...] = ()  # What the user ought to know of the data, for the manifest
    superclasses: Ints | None = None  # (C,): Superclass of every class, for the partition pachinko
    # (n,): Numbers known of the training rows beside their features, by name, for the partition attribute
    attributes: dict[str, Floats] = field(default_factory=dict)
    feature_names: tuple[str, ...] = ()  # Names of the numbers of a vector; none where they have none
    # (n,): Labels as the clients' training samples have them, where they differ from `labels`, the true ones
    given_labels: Ints | None = None
    # ``refit(rows)`` is this data set with the normalisation or vocabulary that these training rows alone give; None
    # where neither depends on the rows
    refit: Callable[[Ints], RawDataset] | None = None
    targets: str = "classification"  # What is to be learned (`fedmpi.data.schema.TARGETS`)
    # Of one row's target: (L,) of tokens, (C,) of labels, () or any other of numbers
    target_shape: tuple[int, ...] = ()
    # ``read_targets(rows)`` gives the targets (r, \*target_shape) of the given training rows, as `read` does the
    # features: whole numbers of tokens (-1 at positions that count nowhere), 0 and 1 or numbers between them of labels,
    # floats of a regression. None where they are the labels
    read_targets: Callable[[Ints], AnyArray] | None = None
    understood: Understood = Understood()  # What the reader took the files for
    groups: Ints | None = None  # (n,): Group of every training row, 0 ... G-1, where `ReadOptions.split` names a column

    @property
    def has_classes(self) -> bool:
        """Whether each row's target is one class."""
        return self.targets == "classification"

    @property
    def labelled(self) -> bool:
        """Whether partition laws may go by the labels."""
        return self.has_classes or bool(np.any(self.labels))

    @property
    def label_classes(self) -> int:
        """Classes of the labels, which are C where each row's target is one."""
        return self.classes if self.has_classes else int(self.labels.max(initial=0)) + 1

    def targets_of(self, rows: Ints) -> AnyArray:
        """The targets of training rows (r, \\*target_shape)."""
        return self.labels[rows] if self.read_targets is None else np.asarray(self.read_targets(rows))


def measured(
    raw: RawDataset, among: Ints | None = None, at_most: int = STATISTICS_ROWS, together: bool = False
) -> RawDataset:
    """The data set with the mean and standard deviation of its training rows.

    They are those of each channel of images, of each column of float vectors (d,) and series (T, C), and of all bytes
    of uint8 vectors, which share one scale.
    """
    again = replace(raw, refit=lambda kept: measured(raw, kept, at_most, together))
    if among is None and not len(raw.test_y):
        return again
    rows = np.arange(len(raw.labels)) if among is None else among
    image = len(raw.feature_shape) == 3
    columns = not (image or together or raw.dtype == "uint8")
    channels = scales_of(raw.feature_shape) if image or columns else 1
    mean, std = statistics(raw.read, rows, channels, 255.0 if raw.dtype == "uint8" else 1.0, at_most, columns)
    return replace(again, mean=mean, std=std)
