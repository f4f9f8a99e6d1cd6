"""In which order the columns of images lie, so that what a convolution unfolds are long runs of memory.

A convolution of stride s reads every s-th column of its input for neighbouring outputs. Where the columns of one
remainder to s lie side by side, what one value of the patches holds for a whole row of outputs is one run of
width · b values, copied at once (module `image`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ColumnOrder:
    """Rows of images in so many parts: the columns of remainder 0, then those of remainder 1, …"""

    width: int = 1  # Of an image; a multiple of `parts`
    parts: int = 1

    def in_order(self, values: Tensor) -> Tensor:
        """Values (…, units) in the image's own order as (…, units / width, width / parts, parts)."""
        return torch.unflatten(values, -1, (-1, self.width // self.parts, self.parts))

    def as_they_lie(self, columns: Tensor) -> Tensor:
        """Columns (k, units, b) that lie in this order, viewed as `in_order` views rows (k, b, units)."""
        lying = torch.unflatten(columns, 1, (-1, self.parts, self.width // self.parts))
        return lying.permute(0, 4, 1, 3, 2)

    def places(self) -> Tensor:
        """For each column of an image where it lies in its row: int64 (width,)."""
        columns = torch.arange(self.width)
        return columns % self.parts * (self.width // self.parts) + columns // self.parts


AS_GIVEN = ColumnOrder()
