"""TensorFlow Federated's CIFAR-100 of 500 clients: python -m data_prep fed_cifar100:read --raw DIR.

S. Reddi et al., Adaptive federated optimization, 2021. DIR holds fed_cifar100_train.h5 and fed_cifar100_test.h5.
"""

from pathlib import Path

import numpy as np

from data_prep.formats.leaf import tff_clients
from data_prep.raw import RawDataset, rows_of


def read(raw: Path) -> RawDataset:
    """Fine labels; TFF's clients, a pachinko allocation (W. Li and A. McCallum 2006), are the natural ones."""
    parts = []
    for part in ("train", "test"):
        clients = list(tff_clients(raw / f"fed_cifar100_{part}.h5", ("image", "label")))
        x = np.concatenate([arrays["image"] for _, arrays in clients]).transpose(0, 3, 1, 2)
        y = np.concatenate([arrays["label"] for _, arrays in clients]).astype(np.int64)
        parts.append((x, y, np.repeat([name for name, _ in clients], [len(one["label"]) for _, one in clients])))
    x, y, clients = zip(*parts, strict=True)
    names, users = np.unique(np.concatenate(clients), return_inverse=True)
    rows = np.arange(len(users))
    return RawDataset(
        name="fed-cifar100",
        task="image",
        classes=100,
        class_names=tuple(map(str, range(100))),
        feature_shape=(3, 32, 32),
        dtype="uint8",
        read=rows_of(*x),
        y=np.concatenate(y),
        train=rows[: len(y[0])],
        test=rows[len(y[0]) :],
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        users=users,
        user_names=tuple(names.tolist()),
        licence="no formal license; cite the technical report",
        citation="A. Krizhevsky, Learning multiple layers of features from tiny images, 2009",
    )
