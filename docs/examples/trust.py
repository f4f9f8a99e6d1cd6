"""Aggregator with state: server.aggregator = "trust:Trust"."""

import torch

from fedmpi import aggregator


@aggregator
class Trust:
    """Mean of the updates, with less weight for clients whose past updates were far from the mean."""

    state = ("distance",)  # one number per client, initially zero, kept in checkpoints

    def measure(self, updates: torch.Tensor) -> torch.Tensor:
        return (updates.double() - updates.double().mean(0)).square().sum(1)

    def combine(self, updates, coefficients, measured, *, clients) -> torch.Tensor:
        trust = 1 / (1 + torch.from_numpy(self.distance[clients]))
        return (trust / trust.sum()) @ updates.double()

    def after(self, clients, measured) -> None:
        self.distance[clients] = (self.distance[clients] + measured.numpy()) / 2
