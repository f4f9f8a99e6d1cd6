"""Several copies of a model (`model.copies`). Each client trains and uses one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.models.inputs import logits_of


class Copies(nn.ModuleList):
    """Copies of a model with different initial values.

    `active` is the copy that a pass uses; without one, the outputs are the means of the outputs of all copies.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__(modules)
        self.active: int | None = None

    def forward(self, *samples: Any, **named: Any) -> Tensor:
        if self.active is not None:
            return logits_of(self[self.active](*samples, **named))  # type: ignore[no-any-return]
        return torch.stack([logits_of(module(*samples, **named)) for module in self]).mean(0)


def copy_of_value(name: str) -> int:
    """Return the copy to which a parameter or buffer belongs, by its name."""
    return int(name.partition(".")[0])
