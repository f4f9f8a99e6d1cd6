"""Client-specific shifts of features and label noise, applied after the partition.

A feature shift is a function (clients, generator, *, options) that returns a function (x, client, generator) of one
sample x of a client. Label noise is a function (labels, owners, classes, generator, *, options). Both keep all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from PIL import Image

from data_prep.partitions import Partition
from data_prep.raw import RawDataset, measured
from fedmpi.common.calling import calling, refuse_result
from fedmpi.common.errors import UserError
from fedmpi.common.registry import Component, register
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints

SHIFT, LABEL_NOISE = "feature shift", "label noise"
"""Kinds of these components."""
_SHIFT_STREAM, _ROW_STREAM, _LABEL_STREAM = 2, 3, 4  # the partition draws from stream 0, the validation part from 1
_WHITE = 255.0
OfSample = Callable[[AnyArray, int, np.random.Generator], AnyArray]


@dataclass(frozen=True)
class Shift:
    """A feature shift ready for use, with the number that it has for each client."""

    of_sample: OfSample  # (x, client, generator) -> the client's version of the sample
    levels: Floats  # (N,): Stored beside the shards as the array "feature_shift"
    description: str  # Meaning of the levels, for the manifest

    def __call__(self, x: AnyArray, client: int, generator: np.random.Generator) -> AnyArray:
        """Shift one sample of a client."""
        return self.of_sample(x, client, generator)


@register(SHIFT, "rotation")
def rotation(clients: int, generator: np.random.Generator, *, angles: str = "0,90,180,270") -> Shift:
    """Rotate every client's images by one angle; each angle has equally many clients, at random.

    A. Ghosh, J. Chung, D. Yin, K. Ramchandran, An efficient framework for clustered federated learning (NeurIPS 2020),
    section 6, "rotated MNIST". Quarter turns of square images are exact; any other angle is interpolated bilinearly
    about the centre, with zeros from outside.

    Parameters
    ----------
    angles : str
        Degrees, counter-clockwise, separated by commas.
    """
    try:
        degrees = np.array([float(angle) for angle in angles.split(",")])
    except ValueError:
        raise UserError(
            f"--angles {angles!r} are no numbers: give degrees with commas between, as 0,90,180,270"
        ) from None
    if not np.isfinite(degrees).all():
        raise UserError(f"--angles {angles} are impossible: give finite degrees")
    turned = degrees[generator.permutation(clients) % len(degrees)]
    return Shift(lambda x, client, _: _turned(x, float(turned[client])), turned, "degrees counter-clockwise")


def _turned(x: AnyArray, angle: float) -> AnyArray:
    if x.ndim != 3:
        raise UserError(
            f"--feature-shift rotation turns images, and these samples are {x.shape}: choose noise, or leave it out"
        )
    quarters, beyond = divmod(angle, 90.0)
    if not beyond and (x.shape[1] == x.shape[2] or quarters % 2 == 0):
        return np.rot90(x, int(quarters) % 4, axes=(1, 2))
    planes = [Image.fromarray(plane.astype(np.float32)).rotate(angle, Image.Resampling.BILINEAR) for plane in x]
    return np.stack([np.asarray(plane) for plane in planes])


@register(SHIFT, "noise")
def noise(
    clients: int,
    generator: np.random.Generator,
    *,
    level: float = 0.1,
    scale: Literal["deviation", "variance"] = "deviation",
) -> Shift:
    """Add normal noise to every number of a sample, of level (k + 1) / N for client k from 0 to N - 1.

    Q. Li, Y. Diao, Q. Chen, B. He, Federated learning on non-IID data silos (ICDE 2022), section IV-B, noise-based
    feature imbalance. Paper and README (Xtra-Computing/NIID-Bench) call the level a variance. Their code multiplies
    standard normal numbers by it, which makes it a standard deviation, and uses 0 to the level in steps of level / (N -
    1). For byte images the level refers to the scale x / 255; they are rounded to bytes again.

    Parameters
    ----------
    level : float
        Level of the last client: standard deviation, or variance.
    scale : {"deviation", "variance"}
        Meaning of the level.
    """
    if not 0 < level < np.inf:
        raise UserError(f"--level {level} is impossible: give a standard deviation or variance above 0")
    levels = level * np.arange(1, clients + 1) / clients
    if scale == "variance":
        levels = np.sqrt(levels)

    def noisy(x: AnyArray, client: int, generator: np.random.Generator) -> AnyArray:
        white = _WHITE if x.dtype == np.uint8 else 1.0
        return np.asarray(x + white * levels[client] * generator.standard_normal(x.shape))

    return Shift(noisy, levels, f"standard deviations; --level {level:g} is the last client's {scale}")


def _noisy_rows(
    owners: Ints, generator: np.random.Generator, noisy: float, low: float, high: float
) -> tuple[Ints, Floats]:
    """Draw the rows that get another label, and return the rate of every client."""
    if not (0 <= low <= high <= 1 and 0 <= noisy <= 1):
        raise UserError(
            f"--noisy {noisy:g}, --low {low:g} and --high {high:g} are impossible: they are shares from 0 to 1, low at "
            "most high"
        )
    clients = int(owners.max(initial=-1)) + 1
    rates = np.where(generator.random(clients) < noisy, generator.uniform(low, high, clients), 0.0)
    chances = np.where(owners >= 0, rates[owners], 0.0)
    return np.flatnonzero(generator.random(len(owners)) < chances), rates


@register(LABEL_NOISE, "uniform")
def uniform(
    labels: Ints,
    owners: Ints,
    classes: int,
    generator: np.random.Generator,
    *,
    noisy: float = 1.0,
    low: float = 0.5,
    high: float = 1.0,
) -> tuple[Ints, Floats]:
    """Replace labels of noisy clients, each with the client's rate, by a class drawn uniformly from all C.

    J. Xu, Z. Chen, T. Q. S. Quek, K. F. E. Chong, FedCorr (CVPR 2022), section 4.1: a client is noisy with probability
    `noisy`, and its rate is then uniform between `low` and `high` (the paper's lower bound, and 1). The drawn class may
    be the true one.

    Parameters
    ----------
    noisy : float
        Probability that a client is noisy.
    low : float
        Lowest rate of a noisy client.
    high : float
        Highest rate of a noisy client.
    """
    rows, rates = _noisy_rows(owners, generator, noisy, low, high)
    changed = labels.copy()
    changed[rows] = generator.integers(0, classes, len(rows))
    return changed, rates


@register(LABEL_NOISE, "pair")
def pair(
    labels: Ints,
    owners: Ints,
    classes: int,
    generator: np.random.Generator,
    *,
    noisy: float = 1.0,
    low: float = 0.5,
    high: float = 1.0,
) -> tuple[Ints, Floats]:
    """Replace labels of noisy clients, each with the client's rate, by the next class (the last becomes the first).

    Pair flipping as in B. Han et al., Co-teaching (NeurIPS 2018), with client rates as for `uniform`.

    Parameters
    ----------
    noisy : float
        Probability that a client is noisy.
    low : float
        Lowest rate of a noisy client.
    high : float
        Highest rate of a noisy client.
    """
    rows, rates = _noisy_rows(owners, generator, noisy, low, high)
    changed = labels.copy()
    changed[rows] = (labels[rows] + 1) % classes
    return changed, rates


def shifted(
    raw: RawDataset, partition: Partition, part: Component, options: Mapping[str, Any], seed: int
) -> RawDataset:
    """Return the data set whose clients' features are shifted.

    The noise of a row comes from its own random stream, so features do not depend on the rows read with it. Measured
    normalization uses the shifted features. The test part is not shifted.
    """
    if raw.task == "text":
        raise UserError(f"--feature-shift {part.name} changes numbers, and {raw.name} is text: leave it out")
    streams = Streams(seed)
    with calling(part):
        of_sample = part.make(options)(partition.clients, streams.generator(Purpose.PARTITION, _SHIFT_STREAM))
    if not callable(of_sample):
        raise refuse_result(part, f"returned a {type(of_sample).__name__}: return a function (x, client, generator)")
    owners = partition.owners(len(raw.labels))
    byte = raw.dtype == "uint8"

    def read(rows: Ints) -> AnyArray:
        x = np.array(raw.read(rows))
        with calling(part):
            for place, row in enumerate(rows.tolist()):
                if owners[row] >= 0:
                    generator = streams.generator(Purpose.PARTITION, _ROW_STREAM, row)
                    found = checked_sample(part, of_sample(x[place], int(owners[row]), generator), x[place])
                    x[place] = np.clip(np.rint(found), 0, _WHITE) if byte else found
        return x

    levels = getattr(of_sample, "levels", None)
    kept = {} if levels is None else {"feature_shift": np.asarray(levels, np.float64)}
    levels_note = f" (feature_shift of extras.h5: {of_sample.description})" if isinstance(of_sample, Shift) else ""
    note = f"features shifted client by client: {part.name}{levels_note}; the test part is not"
    changed = replace(raw, read=read, extras={**raw.extras, **kept}, notes=(*raw.notes, note))
    one_scale = len(raw.feature_shape) != 3 and len(raw.mean) == 1
    return measured(changed, together=one_scale) if raw.refit is not None else changed


def with_label_noise(
    raw: RawDataset, partition: Partition, part: Component, options: Mapping[str, Any], seed: int
) -> RawDataset:
    """Return the data set whose clients have noisy labels; validation and test part keep the true ones."""
    if not raw.has_classes:
        raise UserError(
            f"--label-noise {part.name} changes classes, and targets of {raw.name} are {raw.targets}: leave it out"
        )
    generator = Streams(seed).generator(Purpose.PARTITION, _LABEL_STREAM)
    owners = partition.owners(len(raw.labels))
    with calling(part):
        given = part.make(options)(raw.labels.copy(), owners, raw.classes, generator)
    labels, rates = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    labels = checked_labels(part, labels, len(raw.labels), raw.classes)
    if rates is not None:
        found, clients = np.asarray(rates), partition.clients
        if found.ndim != 1 or found.dtype.kind not in "uif" or len(found) > clients or not np.isfinite(found).all():
            raise refuse_result(
                part,
                f"returned {found.dtype} {found.shape} beside the labels: return the rate of each of the {clients} "
                "clients",
            )
        rates = np.pad(found.astype(np.float64), (0, clients - len(found)))  # the last clients may have no rows
    extras = raw.extras if rates is None else {**raw.extras, "label_noise": rates}
    return replace(raw, given_labels=labels, extras=extras)


def checked_sample(part: Component, given: Any, like: AnyArray) -> AnyArray:
    """Check that a feature shift returned numbers of the same shape; raise `ComponentFailure` otherwise."""
    found = np.asarray(given)
    if found.shape != like.shape or found.dtype.kind not in "uif" or not np.isfinite(found).all():
        raise refuse_result(
            part, f"returned {found.dtype} {found.shape} for a sample {like.shape}: return as many finite numbers"
        )
    return found


def checked_labels(part: Component, given: Any, rows: int, classes: int) -> Ints:
    """Check that label noise returned int64 (n,) in 0 ... C - 1; raise `ComponentFailure` otherwise."""
    found = np.asarray(given)
    if found.shape != (rows,) or not np.issubdtype(found.dtype, np.integer):
        raise refuse_result(part, f"returned {found.dtype} {found.shape}: return the label of each of the {rows} rows")
    if not 0 <= found.min(initial=0) <= found.max(initial=0) < classes:
        raise refuse_result(
            part, f"returned labels from {found.min()} to {found.max()}, and there are {classes} classes"
        )
    return found.astype(np.int64)
