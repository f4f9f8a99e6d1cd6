"""The way between a device and host memory: through page-locked memory, which a GPU reaches at the bus's full speed."""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Copies vectors between a device and ordinary host memory, such as the slot of a sum that MPI reads.

    A GPU copies to and from page-locked memory only; the driver would do so in small pieces through its own. Here it is
    one vector, taken at the first copy. On a GPU not measured.

    Parameters
    ----------
    count : int
        Length of the vectors.
    dtype : torch.dtype
    device : torch.device
        The other end.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device):
        self.count, self.dtype, self.device = count, dtype, device
        self._on_gpu = device.type == "cuda"
        self._held: Tensor | None = None

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` (count,) on the device into `target` in host memory, whole when this returns."""
        held = self._locked()
        held.copy_(source, non_blocking=self._on_gpu)
        self._wait()
        target.copy_(held)

    def to_device(self, source: Tensor) -> Tensor:
        """A copy of `source` (count,) in host memory on the device; kernels queued after this see it whole."""
        self._wait()  # for a copy from the same memory that may still be on its way
        held = self._locked().copy_(source)
        return torch.empty_like(held, device=self.device).copy_(held, non_blocking=self._on_gpu)

    def _locked(self) -> Tensor:
        if self._held is None:
            self._held = torch.empty(self.count, dtype=self.dtype, pin_memory=self._on_gpu)
        return self._held

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
