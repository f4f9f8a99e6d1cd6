"""Reports of failing clients, with the client's name and a remedy; smaller passes when memory runs out."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedmpi.common.errors import ClientFailure, ComponentFailure, Divergence, UserError
from fedmpi.common.imports import innermost

log = logging.getLogger("fedmpi")

_round: int | None = None
"""Current round of this process; None before the first one."""
_in_round = ""
LARGEST_LOSS = 2.0**40
"""Loss above which nothing is learned any more; the loss sums sent with the update stay below 2**50."""


def enter_round(round: int | None) -> None:
    """Set the round that messages about failures name."""
    global _round, _in_round
    _round, _in_round = round, "" if round is None else f" in round {round}"


@contextmanager
def named_client(client: int, rank: int) -> Iterator[None]:
    """Turn an exception into a ClientFailure that names client, rank and round. A UserError passes unchanged, a
    ComponentFailure gains the client's name."""
    try:
        yield
    except (ClientFailure, UserError, KeyboardInterrupt):
        raise
    except ComponentFailure as failure:
        raise failure.during(client=client) from failure.__cause__
    except BaseException as cause:  # a sys.exit() in a model must not end the run as if it were done
        round = None if isinstance(cause, Divergence) else _round
        where = innermost(traceback.extract_tb(cause.__traceback__))
        raise ClientFailure(client, rank, cause, where, round) from cause


class OnDivergence:
    """Handling of a client whose training diverged (`local.on_divergence`)."""

    def __init__(self, drops: bool = False):
        self.drops = drops
        self._warned = False

    def leave_out(self, failure: ClientFailure, round: int) -> None:
        """Raise a failure again if it is no divergence or must end the run; otherwise warn at the first one."""
        if not self.drops or not isinstance(failure.__cause__, Divergence):
            raise failure
        if not self._warned:
            self._warned = True
            log.warning("round %d continues without a client that diverged: %s (logged once per rank)", round, failure)


def check_loss(loss_sum: float, lr: float) -> None:
    """Reject a loss that is not a number or is at least `LARGEST_LOSS`."""
    if not abs(loss_sum) < LARGEST_LOSS:
        raise Divergence(
            f"the loss is {loss_sum:g}{_in_round}: training diverged at lr = {lr:g}; lower local.lr "
            "or server.optimizer.lr"
        )


def check_update(delta: Tensor, lr: float) -> None:
    """Reject an update (d,) with values that are infinite, not a number, or too large to be squared."""
    if not math.isfinite(float(delta.dot(delta))):
        raise Divergence(f"the update is not finite{_in_round}: training diverged at lr = {lr:g}; lower local.lr")


def check_model(model: Tensor, round: int, lr: float) -> None:
    """Reject a global model (d,) with values that are infinite or not a number; all ranks raise the same error."""
    if not math.isfinite(float(model.sum(dtype=torch.float64))):
        raise Divergence(
            f"the global model is not finite after round {round}: training diverged at lr = {lr:g}; lower local.lr or "
            "server.optimizer.lr"
        )


def halved(count: int, what: str) -> int:
    """Return half as many samples, at least one, log it, and release torch's cached memory to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    fewer = max(1, count // 2)
    log.warning("out of memory on the device with %d %s at once; continuing with %d", count, what, fewer)
    return fewer
