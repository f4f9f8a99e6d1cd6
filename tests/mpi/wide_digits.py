"""The digits in 16 × 16 pixels on unequal clients, wide enough for a first layer whose products are made ahead."""

from __future__ import annotations

import numpy as np

import fedmpi
from fedmpi.data.opening import load_digits_split

SIZES = (90, 71, 55, 44, 37, 26, 21, 13, 8, 3)
WIDE = (
    "preset=fedavg",
    "rounds=6",
    "clients.count=6",
    "data.source=tests.mpi.wide_digits:wide_digits",
    "model.hidden=[256,12]",
    "model.activation=tanh",
    "local.engine=batched",
    "local.epochs=2",
    "local.batch_size=9",
    "local.lr=0.02",
    "cluster.placement=shared",
    "logging.tensorboard=false",
    "cluster.threads=1",
)
"""256 × 256 weights, four steps at once, last batches smaller than others, and cohorts whose clients change hands."""


def wide_digits() -> fedmpi.ClientArrays:
    x, y, test_x, test_y = load_digits_split()
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x, test_x = (np.repeat(np.repeat(one, 2, axis=2), 2, axis=3) for one in (x, test_x))
    return fedmpi.ClientArrays(x[: len(owner)], y[: len(owner)], owner, test=(test_x, test_y))
