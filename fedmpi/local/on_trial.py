"""Clients trained on trial: what their updates would be like, none of which is sent, summed or kept."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from fedmpi.common.errors import ClientFailure
from fedmpi.common.types import Floats, Ints
from fedmpi.local.failures import check_update, named_client
from fedmpi.local.sequential import SequentialEngine
from fedmpi.local.work import ClientTask, LocalRule


def update_norms(engine: SequentialEngine, clients: Ints, start: Tensor, rule: LocalRule, round: int) -> Floats:
    """‖w_k − w‖ of clients (k,) that work from w = `start` (d,) on all their rows, float64 (k,).

    The batches and the dropout masks are those of the round: a client that takes part makes this very update, before it
    is compressed, clipped or lied about. NaN for clients without samples, and for those who diverge where these are
    left out of rounds.

    Raises
    ------
    ClientFailure
        As `SequentialEngine.train`.
    """
    norms, w, hooks = np.full(len(clients), np.nan), torch.empty_like(start), engine.hooks
    with hooks.rehearsing() if hooks is not None else nullcontext():
        for place in np.flatnonzero(engine.source.sizes[clients] > 0).tolist():
            task = ClientTask(int(clients[place]), None, 1.0)
            try:
                engine.advance(w.copy_(start), task, rule, round, hooks=engine.hooks_of(task))
                with named_client(task.client, engine.rank):
                    check_update(w.sub_(start), rule.lr)
                norms[place] = float(torch.linalg.vector_norm(w, dtype=torch.float64))
            except ClientFailure as failure:
                engine.on_divergence.leave_out(failure, round)
    return norms
