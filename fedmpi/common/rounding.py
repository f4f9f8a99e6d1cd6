"""Whether rounding explains that two ways of computing the same thing differ: tried, not supposed.

Where values meet, maxima and ReLU jump: a sum in another order, off in its last bit, may then move the gradient by
a thousandth, and deep ones with norms by several hundredths in three steps. One way alone does the same when it starts
off by a rounding, in some tries if not in all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TRIES = 8
TIMES = 3.0
"""Two ways may lie this many times as far apart as one alone moves."""
AT_MOST = 0.1
"""A difference above this is never taken for rounding."""


def explained_by_rounding(apart: float, moved: Callable[[Tensor], float], values: Tensor) -> bool:
    """Whether a calculation alone, from values that are off by a rounding, moves about as far as two ways lie apart."""
    if not apart <= AT_MOST:
        return False
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(values.dtype).eps
    for _ in range(TRIES):
        sides = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        if apart <= TIMES * moved(values * (1 + unit * sides.to(values))):
            return True
    return False
