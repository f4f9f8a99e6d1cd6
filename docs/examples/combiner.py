"""Another way to make one update of many: aggregation.rule = "combiner:signs"."""

import torch

from fedmpi import combiner


@combiner
def signs(updates: torch.Tensor, coefficients: torch.Tensor, *, length: float = 1e-3) -> torch.Tensor:
    """Every coordinate moves by the same length, the way that most of the weight moves it (signSGD with majority vote).

    Parameters
    ----------
    length : float
        Of the step along each coordinate.
    """
    return length * torch.sign(coefficients @ torch.sign(updates))
