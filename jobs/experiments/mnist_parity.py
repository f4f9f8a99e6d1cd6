"""Least squares on MNIST: even digits +1, odd ones −1; a reader for [prepare]. Start it in the repository.

The objective is strongly convex and its minimum is known in closed form. The test part is the training part, so that
the recorded test loss is the objective.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets import DATASETS
from data_prep.raw import ReadOptions, Tally


def parity(
    raw: Path, *, one_class: bool = False, draw: int = 0, users: int = 100, each: int = 60, components: int = 30
) -> dict[str, NDArray[Any]]:
    """Equal clients of whitened principal components, drawn evenly from the ten digits.

    Parameters
    ----------
    raw : Path
        The official files.
    one_class : bool
        Every client holds one digit, instead of random ones.
    draw : int
        Seed of the images and of their assignment.
    users, each : int
        Clients, and images of each; `users` is a multiple of 10.
    components : int
        Principal components, of unit variance.
    """
    images = DATASETS["mnist"].read(raw, ReadOptions(), Tally())
    generator = np.random.default_rng(draw)
    labels = images.y[images.train]
    rows = [generator.choice(np.flatnonzero(labels == digit), users * each // 10, False) for digit in range(10)]
    chosen = np.concatenate(rows)
    pixels = images.read(chosen).reshape(len(chosen), -1) / 255.0
    u, _, _ = np.linalg.svd(pixels - pixels.mean(0), full_matrices=False)
    x = (u[:, :components] * np.sqrt(len(chosen))).astype(np.float32)
    y = np.where(labels[chosen] % 2, -1.0, 1.0).astype(np.float32)
    order = np.arange(len(chosen)) if one_class else generator.permutation(len(chosen))
    owner = np.repeat(np.arange(users), each)
    return {"x": x[order], "y": y[order], "user": owner, "x_test": x[order], "y_test": y[order]}


def minimum(data: dict[str, NDArray[Any]]) -> float:
    """Mean squared error of the best affine model."""
    design = np.column_stack([data["x"], np.ones(len(data["x"]))]).astype(float)
    weights, *_ = np.linalg.lstsq(design, data["y"].astype(float))
    return float(np.mean((design @ weights - data["y"]) ** 2))
