"""The batches of one client: which local rows every step sees. All engines share this one definition.

Epochs: each is a fresh permutation cut into batches of B, the last one short or left out. Steps: each draws min(B, n)
distinct rows anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.common.types import Ints
from fedmpi.config.choices import chosen

if TYPE_CHECKING:
    from fedmpi.config import Config
    from fedmpi.local.work import LocalRule

STEPS_DRAWN_TOGETHER = 32
NAMED = 5
"""Clients that a message names."""
NEEDS_TWO = "the model cannot be trained on a batch of one sample (BatchNorm?)"


def batch_rows(rule: LocalRule, n: int) -> int:
    """Rows of a full batch of a client with n samples: min(B, n)."""
    return n if rule.batch_size is None else min(rule.batch_size, n)


def step_count(rule: LocalRule, n: int) -> int:
    """Steps that a client with n samples takes; nothing is drawn."""
    if n == 0:
        return 0
    if rule.steps is not None:
        return rule.steps
    assert rule.epochs is not None
    size = batch_rows(rule, n)
    return rule.epochs * (n // size if rule.drop_last else -(-n // size))


def check_batches(config: Config, sizes: Ints, least: int) -> None:
    """Reject training batches of one sample, where the model needs more (`models.flat.FlatModel.least`).

    Raises
    ------
    UserError
        Naming the clients that have such a batch, or the keys that make them.
    """
    part, rule = config.local, chosen(config, "row rule").name
    if least == 1:
        return
    why, other = f"{NEEDS_TWO}, which", "replace BatchNorm by GroupNorm"
    remedy = "Set local.drop_last = true, which leaves such batches out, or"
    if part.batch_size == 1:
        raise UserError(f"{why} local.batch_size = 1 makes. Set a larger local.batch_size, or {other}")
    needs = chosen(config, "client sampler").marks.get("needs", ())
    probes = bool({"strata", "norms"} & {*needs}) and config.participation.features != "label-histogram"
    if config.participation.probe == "sample" and (probes or config.participation.opening):
        raise UserError(f'{why} participation.probe = "sample" makes. Set it to "batch" or "full", or {other}')
    if part.drop_last:
        return
    if rule != "all":
        raise UserError(f'{why} samples.rule = "{rule}" may leave to a client. {remedy} {other}')
    lone = sizes == 1
    if part.batch_size != "all" and (part.steps is None or config.evaluation.fine_tune > 0):
        lone = sizes % part.batch_size == 1
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


def shrinking_sum(steps: int, shrinking: float) -> float:
    """Σ_{j<τ} (1 − s)^j, which is τ where s = 0; infinite where floats end.

    Parameters
    ----------
    steps : int
        τ.
    shrinking : float
        s.
    """
    if shrinking == 0:
        return float(steps)
    try:
        shrunk = -math.expm1(steps * math.log1p(-shrinking)) if shrinking < 0.5 else 1 - (1 - shrinking) ** steps
    except OverflowError:
        return math.inf
    return shrunk / shrinking


def effective_steps(steps: int, shrinking: float) -> float:
    """‖a‖₁ of SGD with a proximal term: Σ_{j<τ} |1 − ημ|^j, which is τ without one (Wang et al. 2020).

    Parameters
    ----------
    steps : int
        τ.
    shrinking : float
        ημ; above 1 every step overshoots the start, and the weights of the gradients alternate in sign.
    """
    return shrinking_sum(steps, shrinking if shrinking <= 1 else 2 - shrinking)


def needs_order(rule: LocalRule, n: int) -> bool:
    """Whether the batches depend on the random stream: not when every batch is the whole local set."""
    return batch_rows(rule, n) < n


def passes(rule: LocalRule, n: int, generator: np.random.Generator | None) -> Iterator[Ints | None]:
    """The rows in the order they are visited, a pass at a time; cut into batches of `batch_rows`, a pass is used up.

    Parameters
    ----------
    rule : LocalRule
        Gives epochs or steps and B.
    n : int
        Samples of the client.
    generator : Generator or None
        The client's stream (BATCH_ORDER, round, client); may be None unless `needs_order`.

    Yields
    ------
    int64 (r,) or None
        One epoch, or several steps; None = all n rows as they lie, one batch.
    """
    if n == 0:
        return
    if not needs_order(rule, n):
        for _ in range(step_count(rule, n)):
            yield None
        return
    if generator is None:
        raise ValueError("batches smaller than the local set need a generator")
    size = batch_rows(rule, n)
    if rule.epochs is not None:
        for _ in range(rule.epochs):
            yield generator.permutation(n)[: n - n % size if rule.drop_last else n]
        return
    assert rule.steps is not None
    for first in range(0, rule.steps, STEPS_DRAWN_TOGETHER):
        count = min(STEPS_DRAWN_TOGETHER, rule.steps - first)
        yield np.concatenate([generator.choice(n, size, replace=False, shuffle=False) for _ in range(count)])


def schedule(rule: LocalRule, n: int, generator: np.random.Generator | None) -> list[Ints | None]:
    """All batches of a client.

    Parameters
    ----------
    rule, n, generator
        As for `passes`.

    Returns
    -------
    list of int64 (b,) or None
        Local rows of every step, None = all rows.
    """
    size = batch_rows(rule, n)
    batches: list[Ints | None] = []
    for order in passes(rule, n, generator):
        if order is None:
            batches.append(None)
        else:
            batches.extend(order[first : first + size] for first in range(0, len(order), size))
    return batches
