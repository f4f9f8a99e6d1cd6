"""Batches of one sample, where the model computes batch statistics: rejected before round 0, or left out."""

from __future__ import annotations

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.config import Config
from fedmpi.config.choices import chosen

NAMED = 5
"""Clients that a message names."""
NEEDS_TWO = "the model cannot be trained on a batch of one sample (BatchNorm, squeeze()?)"


def check_batches(config: Config, sizes: Ints, least: int) -> None:
    """Reject training batches of one sample, where the model needs more (`models.flat.FlatModel.least`)."""
    part, rule = config.local, chosen(config, "row rule").name
    if least == 1:
        return
    why, other = f"{NEEDS_TWO}, which", "replace BatchNorm by GroupNorm, squeeze() by flatten(1)"
    remedy = "Set local.drop_last = true, which leaves such batches out, or"
    if part.batch_size == 1:
        raise UserError(f"{why} local.batch_size = 1 makes. Set a larger local.batch_size, or {other}")
    needs = chosen(config, "client sampler").marks.get("needs", ())
    probes = bool({"strata", "norms"} & {*needs}) and config.participation.features != "label-histogram"
    if config.participation.probe == "sample" and (probes or config.participation.opening):
        raise UserError(f'{why} participation.probe = "sample" makes. Set it to "batch" or "full", or {other}')
    if part.drop_last:
        return
    lone = sizes == 1
    if part.batch_size != "all" and (part.steps is None or config.evaluation.fine_tune > 0):
        lone = sizes % part.batch_size == 1
        if rule != "all" and sizes.max() > part.batch_size:
            raise UserError(f'{why} samples.rule = "{rule}" may leave to a client. {remedy} {other}')
    if rule != "all":  # a client does not train in a round in which it has one sample
        return
    if lone.any():
        who = _named(np.flatnonzero(lone), sizes)
        raise UserError(
            f"{why} local.batch_size = {part.batch_size!r} leaves to {who}. {remedy} set another local.batch_size, or "
            f"{other}"
        )


def untrained(config: Config, sizes: Ints, least: int) -> str:
    """The sentence about clients that `local.drop_last` keeps from training; "" where there are none."""
    single = np.flatnonzero(sizes == 1)
    if least == 1 or not (len(single) or config.samples.rule != "all"):
        return ""
    never = f": this is so in every round for {_named(single, sizes)}" if len(single) else ""
    return f"{NEEDS_TWO}. A client does not train in a round in which it has one sample{never}"


def _named(clients: Ints, sizes: Ints) -> str:
    """The first of some clients with their numbers of samples."""
    some = ", ".join(f"client {client} ({sizes[client]} samples)" for client in clients[:NAMED].tolist())
    some = some.replace("(1 samples)", "(1 sample)")
    return some if len(clients) <= NAMED else f"{some} and {len(clients) - NAMED} more"
