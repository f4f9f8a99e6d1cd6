"""MNIST dealt out as in FedSTaS's published code, as arrays for `python -m data_prep arrays --partition user`:

    python jobs/experiments/fedstas_partition.py shards/mnist-iid --alpha 0.01 --seed 0 --out fedstas-0.npz
    python -m data_prep arrays --raw fedstas-0.npz --partition user --out shards/mnist-fedstas-0

Every client's class mix is a Dirichlet draw, and its 600 training and 600 test images are drawn with replacement from
the classes in these shares. So no client is filled up with what is left over, class totals are uneven, and the test set
follows the training mixes. The first argument is a folder of prepared MNIST shards, whatever their partition.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedmpi.common.streams import Purpose, Streams
from fedmpi.data.opening import open_store

CLIENTS, SAMPLES, CLASSES = 100, 600, 10


def drawn(labels: np.ndarray, mixes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Rows (clients · samples,) drawn with replacement, client after client, in the shares of the mixes."""
    by_class = [np.flatnonzero(labels == label) for label in range(CLASSES)]
    rows = []
    for mix in mixes:
        for label, count in enumerate(generator.multinomial(SAMPLES, mix)):
            rows.append(generator.choice(by_class[label], count))
    return np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a folder of MNIST shards")
    parser.add_argument("--alpha", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    store = open_store(asked.shards)
    x, y = store.rows(np.arange(store.samples))
    x_test, y_test = store.test()
    generator = Streams(asked.seed).generator(Purpose.PARTITION)
    mixes = generator.dirichlet(np.full(CLASSES, asked.alpha), CLIENTS)
    train, test = drawn(y, mixes, generator), drawn(y_test, mixes, generator)
    users = np.repeat(np.arange(CLIENTS), SAMPLES)
    np.savez(asked.out, x=x[train, 0], y=y[train], user=users, x_test=x_test[test, 0], y_test=y_test[test])


if __name__ == "__main__":
    main()
