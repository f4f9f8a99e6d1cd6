"""A client's update leaves its engine: checked, shown to whoever looks at it, added to the sum."""

from __future__ import annotations

from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.local.failures import check_update
from fedmpi.local.hooks import ClientHooks
from fedmpi.local.work import ClientTask, LocalRule, Observer


def deliver(
    task: ClientTask,
    update: Tensor,
    rule: LocalRule,
    observe: Observer | None,
    total: Accumulator,
    hooks: ClientHooks | None = None,
    steps: int = 0,
) -> None:
    """Add coefficient · Δ, or what the observer returns in Δ's place, to `total`; the client's hooks see Δ as it was.

    Parameters
    ----------
    task : ClientTask
    update : Tensor (d,)
        Δ; may be overwritten.
    rule : LocalRule
    observe : callable or None
    total : Accumulator
    hooks : ClientHooks, optional
        Of an algorithm with hooks.
    steps : int
        Local steps that made Δ.

    Raises
    ------
    Divergence
        Δ (d,) is not finite.
    """
    check_update(update, rule.lr)
    if hooks is not None and observe is not None:  # which may change Δ in place
        hooks.finish(update.clone(), steps, rule)
    replaced = observe(task.client, update) if observe is not None else None
    total.add(update if replaced is None else replaced, task.coefficient, task.client)
    if hooks is not None and observe is None:  # which may use Δ as it likes, now that it is summed
        hooks.finish(update, steps, rule)
