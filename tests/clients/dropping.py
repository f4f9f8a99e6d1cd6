"""A user's module with dropout."""

from __future__ import annotations

import math
from typing import Any

from torch import nn


def net(description: Any) -> nn.Module:
    """A hidden layer and half of it dropped."""
    width = math.prod(description.feature_shape)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, description.classes)
    )
