"""How a failing client is reported: by name, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fedmpi.common.activity import activity
from fedmpi.common.errors import ClientFailure, PartFailure, UserError

LARGEST_LOSS = 2.0**40
"""Above it nothing is learned any more; the sums of losses that travel with the update keep to 2**50."""


@contextmanager
def named_client(client: int, rank: int) -> Iterator[None]:
    """Turn an exception into a ClientFailure that names the client and the rank; a UserError passes as it is, a
    PartFailure with the client named."""
    activity.work_on(client)
    try:
        yield
    except (ClientFailure, UserError):
        raise
    except PartFailure as failure:
        raise failure.during(client=client) from failure.__cause__
    except Exception as cause:
        raise ClientFailure(client, rank, cause) from cause


def check_loss(loss_sum: float, lr: float) -> None:
    """Refuse a loss that is not a number, or `LARGEST_LOSS` or more.

    Raises
    ------
    FloatingPointError
        With the advice to lower the learning rate: a diverged client would ruin the global model without a word.
    """
    if not abs(loss_sum) < LARGEST_LOSS:
        raise FloatingPointError(
            f"the loss is {loss_sum:g}: training diverged at lr = {lr:g}; lower local.lr or aggregation.lr"
        )


def check_update(delta: Tensor, lr: float) -> None:
    """Refuse an update (d,) with values that are infinite, not a number, or too large to be squared.

    Raises
    ------
    FloatingPointError
        As `check_loss`.
    """
    if not math.isfinite(float(delta.dot(delta))):
        raise FloatingPointError(f"the update is not finite: training diverged at lr = {lr:g}; lower local.lr")
