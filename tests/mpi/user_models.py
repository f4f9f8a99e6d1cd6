"""Custom components, named in configurations as "tests.mpi.user_models:…"."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedmpi import server_optimizer
from fedmpi.data.schema import DataDescription


def dropout_mlp(description: DataDescription, width: int = 32) -> nn.Module:
    """A perceptron with plain torch dropout, smooth: a rounding changes its steps by no more than that."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(description.feature_shape), width),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(width, description.classes),
    )


@server_optimizer
class ByRank:
    """Steps otherwise on rank 2: its ranks' models drift apart."""

    def step(self, w: Tensor, update: Tensor) -> None:
        from mpi4py import MPI

        w.add_(update, alpha=1.0 + (MPI.COMM_WORLD.rank == 2))
