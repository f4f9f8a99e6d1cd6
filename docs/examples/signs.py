"""A robust aggregation rule: server.aggregator = "signs:signs"."""

import torch

from fedmpi import aggregator


@aggregator
def signs(updates: torch.Tensor, coefficients: torch.Tensor, *, length: float = 1e-3) -> torch.Tensor:
    """Move every coordinate by one length, in the direction of the weighted majority (signSGD).

    Parameters
    ----------
    length : float
        Step length per coordinate.
    """
    return length * torch.sign(coefficients @ torch.sign(updates))
