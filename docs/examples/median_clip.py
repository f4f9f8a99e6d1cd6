"""An aggregator that measures whole updates: server.aggregator = "median_clip:MedianClip"."""

import torch

from fedmpi import aggregator


@aggregator
class MedianClip:
    """Weighted sum of the updates, each scaled down to the median norm."""

    def measure(self, updates: torch.Tensor) -> torch.Tensor:
        return updates.double().square().sum(1)  # one number per update

    def combine(self, updates: torch.Tensor, coefficients: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
        norms = measured.sqrt().clamp(min=1e-12)
        factors = (norms.median() / norms).clamp(max=1.0)
        return (coefficients.double() * factors) @ updates.double()
