"""An image set dealt out as in FedSTaS's published code; a reader for [prepare] and `fedmpi prepare`:

    fedmpi prepare jobs.experiments.fedstas_data:mixes --raw raw/mnist --partition user --alpha 0.01 --out shards/mixes

Every client's class mix is a Dirichlet draw, and its training and test images are drawn with replacement from the
classes in these shares. So no client is filled up with what is left over, class totals are uneven, and the test set
follows the training mixes. Start it in the repository, where Python finds this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.datasets import DATASETS
from data_prep.raw import ReadOptions, Tally
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import Floats, Ints


def mixes(
    raw: Path,
    *,
    source: str = "mnist",
    alpha: float = 0.01,
    users: int = 100,
    each: int = 600,
    draw: int = 0,
    official_test: bool = False,
) -> dict[str, NDArray[Any]]:
    """Clients of equal size whose class mixes are Dirichlet draws, images drawn with replacement.

    Parameters
    ----------
    raw : Path
        The official files of `source`.
    source : str
        A set of images that data_prep reads.
    alpha : float
        Of the Dirichlet law.
    users : int
        Clients.
    each : int
        Training images of each client, and as many test images.
    draw : int
        Seed of mixes and images.
    official_test : bool
        The test images of `source` as they are, instead of draws in the clients' mixes.
    """
    images = DATASETS[source].read(raw, ReadOptions(), Tally())
    generator = Streams(draw).generator(Purpose.PARTITION)
    shares = generator.dirichlet(np.full(images.classes, alpha), users)
    train = images.train[drawn(images.y[images.train], shares, each, generator)]
    test = images.test if official_test else images.test[drawn(images.y[images.test], shares, each, generator)]
    shown = (lambda x: x[:, 0]) if images.feature_shape[0] == 1 else (lambda x: x)
    return {
        "x": shown(images.read(train)),
        "y": images.y[train],
        "user": np.repeat(np.arange(users), each),
        "x_test": shown(images.read(test)),
        "y_test": images.y[test],
    }


def drawn(labels: Ints, shares: Floats, each: int, generator: np.random.Generator) -> Ints:
    """Rows (clients · each,) drawn with replacement, client after client, in the shares (clients, C) of the classes."""
    by_class = [np.flatnonzero(labels == label) for label in range(shares.shape[1])]
    rows = []
    for share in shares:
        for label, count in enumerate(generator.multinomial(each, share)):
            rows.append(generator.choice(by_class[label], count))
    return np.concatenate(rows)
