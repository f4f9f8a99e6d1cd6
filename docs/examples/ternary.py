"""Compression of updates: compression = "ternary:ternary"."""

import numpy as np
import torch

from fedmpi import compressor


@compressor(bits=1.6)
def ternary(update: torch.Tensor, generator: np.random.Generator, *, share: float = 1.0) -> torch.Tensor:
    """Send -s, 0 or s for each value, at random without bias (TernGrad, Wen et al. 2017).

    Parameters
    ----------
    share : float
        s as a share of the largest magnitude. Larger values are clipped to s.
    """
    s = share * update.abs().max().clamp(min=1e-30)
    draws = torch.from_numpy(generator.random(len(update), np.float32)).to(update.device)
    return s * update.sign() * (draws < update.abs() / s)
