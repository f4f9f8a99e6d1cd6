"""Networks that no exporter can write correctly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ByValue(nn.Module):
    """Uses another formula if the first sample is bright, or for three samples."""

    def __init__(self, description: Any) -> None:
        super().__init__()
        self.classes = nn.Linear(64, description.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.classes(x) if len(x) == 3 or float(x[0].sum()) > 1e9 else self.classes(x) * 2


class NotTraceable(ByValue):
    """Cannot be captured."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise RuntimeError("this network cannot be captured")
        return self.classes(x.flatten(1))
