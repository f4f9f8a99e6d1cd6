"""How a device computes: the same bits every time where sums are to be exact, and in full float32 while trying things.

All of it is about GPUs, on which it was not run; a processor with one thread needs none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
"""One of the two settings with which cuBLAS repeats its results; read when a process first uses cuBLAS."""


def repeat_results() -> None:
    """Have GPUs compute the same bits from the same numbers every time, in float32 without TensorFloat-32.

    Operations that have no such form raise an error that names them. To be called before a GPU is first used. On
    processors only the mode is set, whose operations repeat their results anyway.
    """
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, but without loading torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    _without_tf32()


@contextmanager
def full_precision() -> Iterator[None]:
    """Within: float32 products are computed as such, not in TensorFloat-32, whose relative errors are around 1e-3."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _without_tf32()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _without_tf32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
