"""A client's update leaves its engine: checked, shown to whoever looks at it, added to the sum."""

from __future__ import annotations

from torch import Tensor

from fedmpi.aggregation.exact import Accumulator
from fedmpi.local.failures import check_update
from fedmpi.local.work import LocalRule, Observer, Task


def deliver(task: Task, update: Tensor, rule: LocalRule, observe: Observer | None, total: Accumulator) -> None:
    """Add coefficient · Δ, or what the observer returns in Δ's place, to `total`.

    Raises
    ------
    FloatingPointError
        Δ (d,) is not finite.
    """
    check_update(update, rule.lr)
    replaced = observe(task.client, update) if observe is not None else None
    total.add(update if replaced is None else replaced, task.coefficient, task.client)
