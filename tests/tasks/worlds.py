"""Small data of every kind of task, in memory, and the runs that tests make of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedmpi

CLIENTS, LENGTH, LABELS = 6, 12, 4
WORDS = ("the sea and the wind", "a ship with no sail", "over the long low hill", "and all the lamps are out")


def tokens(ragged: bool = True) -> fedmpi.ClientArrays:
    """Next character in synthetic verses; with `ragged`, only some positions of most samples count."""
    generator = np.random.default_rng(5)
    text = " ".join(WORDS[place] for place in generator.integers(0, len(WORDS), 700))
    letters = sorted(set(text))
    codes = np.array([letters.index(letter) for letter in text])
    rows = len(codes) // (LENGTH + 1)
    lines = codes[: rows * (LENGTH + 1)].reshape(rows, LENGTH + 1)
    x, y = lines[:, :-1], lines[:, 1:].copy()
    if ragged:
        y[np.arange(LENGTH) >= generator.integers(0, LENGTH + 1, rows)[:, None]] = -1
    held = rows // 5
    owner = np.sort(generator.integers(0, CLIENTS, rows - held))
    return fedmpi.ClientArrays(
        x[held:], y[held:], owner, test=(x[:held], y[:held]), task="text", classes=len(letters), clients=CLIENTS
    )


def labels() -> fedmpi.ClientArrays:
    """Any of four labels of vectors; booleans."""
    generator = np.random.default_rng(6)
    x = generator.standard_normal((260, 7)).astype(np.float32)
    y = x @ generator.standard_normal((7, LABELS)) + 0.3 * generator.standard_normal((260, LABELS)) > 0.4
    owner = np.sort(generator.integers(0, CLIENTS, 200))
    return fedmpi.ClientArrays(x[60:], y[60:], owner, test=(x[:60], y[:60]), clients=CLIENTS)


def numbers(many: bool = False) -> fedmpi.ClientArrays:
    """A number of vectors, or three."""
    generator = np.random.default_rng(7)
    x = generator.standard_normal((260, 5)).astype(np.float32)
    y = x @ generator.standard_normal((5, 3)) + 0.1 * generator.standard_normal((260, 3)) + 2
    y = y if many else y[:, 0]
    owner = np.sort(generator.integers(0, CLIENTS, 200))
    return fedmpi.ClientArrays(x[60:], y[60:], owner, test=(x[:60], y[:60]), clients=CLIENTS)


def three_numbers() -> fedmpi.ClientArrays:
    """See `numbers`."""
    return numbers(many=True)


BASE: dict[str, Any] = {
    "rounds": 2,
    "clients.sampler": "all",
    "local.epochs": 1,
    "local.batch_size": 8,
    "local.lr": 0.05,
    "cluster.threads": 1,
    "evaluation.every": 2,
}
WORLDS: dict[str, dict[str, Any]] = {
    "tokens": {
        "data.source": "tests.tasks.worlds:tokens",
        "task.kind": "tokens",
        "model.name": "char-lstm",
        "model.units": 12,
        "local.lr": 0.5,
    },
    "multilabel": {
        "data.source": "tests.tasks.worlds:labels",
        "task.kind": "multilabel",
        "model.name": "mlp",
        "model.hidden": [9],
    },
    "regression": {
        "data.source": "tests.tasks.worlds:numbers",
        "task.kind": "regression",
        "model.name": "mlp",
        "model.hidden": [9],
    },
    "regression of three": {
        "data.source": "tests.tasks.worlds:three_numbers",
        "task.kind": "regression",
        "model.name": "mlp",
        "model.hidden": [9],
    },
}
