"""Sums of client updates and of metrics: float32, or 64-bit fixed point whose bits do not depend on the order.

Updates are accumulated one by one into a flat buffer that the cluster then sums over the ranks. Metrics ride in the
same buffer: in a float32 one as 12-bit limbs, whose sums over up to 4096 ranks are exact.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

FIXED_BITS = 40
METRIC_BITS = 20
LIMB_BITS = 12
LIMBS = 6
MOST_RANKS = 2 ** (24 - LIMB_BITS)
CHUNK = 2**16


class Accumulator(Protocol):
    """A running sum Σ coefficient · vector over the clients of one rank."""

    def add(self, vector: torch.Tensor, coefficient: float) -> None:
        """Add coefficient · vector; `vector` is float32 (d,) and is left as it is."""

    def finish(self) -> None:
        """Make the buffer given at construction hold the sum."""


class FloatSum:
    """A plain float32 sum.

    Parameters
    ----------
    buffer : float32 (d,)
        Receives the sum, usually the rank's slot of the reduction; set to zero here.
    device : torch.device or str
        Where the vectors live. On the CPU the sum is kept in `buffer` itself, elsewhere `finish` copies it there.

    Attributes
    ----------
    tensor : Tensor float32 (d,)
        The sum so far.
    """

    def __init__(self, buffer: NDArray[np.float32], device: torch.device | str = "cpu"):
        buffer.fill(0)
        self._host = torch.from_numpy(buffer)
        self.tensor = self._host if torch.device(device).type == "cpu" else torch.zeros_like(self._host, device=device)

    def add(self, vector: torch.Tensor, coefficient: float) -> None:
        self.tensor.add_(vector, alpha=coefficient)

    def finish(self) -> None:
        if self.tensor is not self._host:
            self._host.copy_(self.tensor)


class FixedPointSum:
    """An order-independent sum: every contribution is rounded to a multiple of 2**-bits and added as an integer.

    Integer addition is associative, so any order of clients and any number of ranks gives the same bits.

    Parameters
    ----------
    buffer : int64 (d,)
        Holds the sum, usually the rank's slot of the reduction; set to zero here.
    bits : int
        Fractional bits; values up to 2**(63 - bits) in magnitude can be summed.
    ranks : int
        How many such sums are added up afterwards; each may use this share of the range.
    """

    def __init__(self, buffer: NDArray[np.int64], bits: int = FIXED_BITS, ranks: int = 1):
        buffer.fill(0)
        self.buffer = buffer
        self._sum = torch.from_numpy(buffer)
        self._scale = 2.0**bits
        self._bound, self._limit = 0.0, 2.0**63 / ranks
        size = min(CHUNK, buffer.size)
        self._float, self._int = torch.empty(size, dtype=torch.float64), torch.empty(size, dtype=torch.int64)

    def add(self, vector: torch.Tensor, coefficient: float) -> None:
        """Add coefficient · vector.

        Raises
        ------
        FloatingPointError
            If the product holds an infinity or a NaN.
        OverflowError
            If the sum of the largest magnitudes so far leaves the range.
        """
        factor = coefficient * self._scale
        largest = float(torch.linalg.vector_norm(vector, torch.inf)) if vector.numel() else 0.0
        if not np.isfinite(largest * factor):
            raise FloatingPointError("the update is not finite: training diverged; lower local.lr")
        self._bound += abs(largest * factor) + 0.5
        if self._bound >= self._limit:
            raise OverflowError(
                f"the exact sum exceeds its range of ±{self._limit / self._scale:.3g}: the updates are too large for "
                "aggregation.exact = true; lower local.lr or switch it off"
            )
        for start in range(0, vector.numel(), CHUNK):
            stop = min(start + CHUNK, vector.numel())
            product, rounded = self._float[: stop - start], self._int[: stop - start]
            product.copy_(vector[start:stop]).mul_(factor).round_()
            self._sum[start:stop] += rounded.copy_(product)

    def finish(self) -> None:
        """Nothing to do: the sum is kept in the buffer."""


def to_update(
    buffer: NDArray[np.int64], bits: int = FIXED_BITS, divisor: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A fixed-point sum as the float32 update.

    Parameters
    ----------
    buffer : int64 (d,)
        The reduced sum.
    bits : int
        Fractional bits it was made with.
    divisor : float
        Σ c_k of a normalised kind of weights, or 1.
    out : Tensor float32 (d,), optional
        Receives the update.

    Returns
    -------
    Tensor float32 (d,)
    """
    out = torch.empty(buffer.size) if out is None else out
    fixed = torch.from_numpy(buffer)
    for start in range(0, buffer.size, CHUNK):
        part = slice(start, start + CHUNK)
        out[part] = fixed[part].to(torch.float64).mul_(1 / (2.0**bits)).div_(divisor)
    return out


def quantise(values: NDArray[np.float64], bits: int = METRIC_BITS) -> NDArray[np.int64]:
    """Values as multiples of 2**-bits, int64; exact for counts below 2**(63 - bits).

    Raises
    ------
    OverflowError
        If a value is not finite or beyond ±2**(62 - bits).
    """
    scaled = np.asarray(values, np.float64) * 2.0**bits
    if not np.all(np.abs(scaled) < 2.0**62):
        raise OverflowError(f"a metric is not finite or beyond ±2**{62 - bits}: {values}")
    return np.rint(scaled).astype(np.int64)


def restore(fixed: NDArray[np.int64], bits: int = METRIC_BITS) -> NDArray[np.float64]:
    """The inverse of `quantise`, float64."""
    return fixed / 2.0**bits


def encode_metrics(values: NDArray[np.float64], bits: int = METRIC_BITS) -> NDArray[np.float32]:
    """Metrics as float32 limbs that may be summed over up to 4096 ranks without rounding.

    A value becomes a 64-bit multiple of 2**-bits, cut into five unsigned limbs of 12 bits and a signed top limb.

    Parameters
    ----------
    values : float64 (k,)
        Counts or sums.
    bits : int
        Fractional bits kept; the total over the ranks must stay within ±2**(63 - bits).

    Returns
    -------
    float32 (6 k,)
        The limbs of the first value, lowest first, then those of the second …

    Raises
    ------
    OverflowError
        If a value is not finite or beyond ±2**(62 - bits).
    """
    shifted = quantise(values, bits)[:, None] >> (LIMB_BITS * np.arange(LIMBS))
    shifted[:, :-1] &= 2**LIMB_BITS - 1
    return shifted.astype(np.float32).ravel()


def decode_metrics(limbs: NDArray[np.float32], bits: int = METRIC_BITS) -> NDArray[np.float64]:
    """The sums of metrics from the summed limbs of `encode_metrics`, float64 (k,)."""
    fixed = limbs.reshape(-1, LIMBS).astype(np.int64) << (LIMB_BITS * np.arange(LIMBS))
    return restore(fixed.sum(axis=1), bits)
