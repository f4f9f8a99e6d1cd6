"""What a run may change while it lasts, and puts back when it ends: torch's threads, arithmetic and generators."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedmpi.common.arithmetic import WORKSPACE
from fedmpi.common.calling import kept_settings
from fedmpi.common.generators import kept_generators


@contextmanager
def process_as_before() -> Iterator[None]:
    """Afterwards the process computes and draws as if nothing had run within, whether that ended well or not."""
    threads, debug_mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn
    convolutions = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    products, workspace = torch.get_float32_matmul_precision(), os.environ.get(WORKSPACE)
    try:
        with kept_generators(), kept_settings():
            yield
    finally:
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        torch.set_float32_matmul_precision(products)
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = convolutions
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(debug_mode)
        torch.set_num_threads(threads)
