"""Networks of one's own that no exporter can write rightly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ByValue(nn.Module):
    """Takes another way where the first sample is bright."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.classes(x) if len(x) == 3 or float(x[0].sum()) > 1e9 else self.classes(x) * 2


def by_value(description: Any) -> nn.Module:
    return ByValue(description.classes)


class InNumpy(nn.Module):
    """Leaves torch."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this network cannot be captured")
        return self.classes(x.flatten(1))


def in_numpy(description: Any) -> nn.Module:
    return InNumpy(description.classes)
