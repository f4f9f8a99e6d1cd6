"""A custom aggregator with two methods, written from the documentation: the mean, weighted by distance."""

from __future__ import annotations

import torch

from fedmpi import aggregator


@aggregator
class spread:
    """Updates count the less the longer they are."""

    def __init__(self, *, power: float = 1.0):
        self.power = power

    def measure(self, updates: torch.Tensor) -> torch.Tensor:
        return (updates.double() ** 2).sum(1)

    def combine(self, updates: torch.Tensor, coefficients: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
        weights = coefficients.double() / measured ** (self.power / 2)
        return (weights @ updates.double() / weights.sum()).float()
