"""Modes of torch's arithmetic: repeatable for exact sums, full float32 for checks, restored after a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from fedmpi.common.calling import kept_generators

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
"""One of the two settings with which cuBLAS repeats its results; read when a process first uses cuBLAS."""


def repeat_results() -> None:
    """Make GPUs compute bit-identical results from the same numbers, in float32 without TensorFloat-32.

    Operations without such a form raise an error that names them. Call this before a GPU is first used. On CPUs it only
    sets the mode; their operations repeat their results anyway.
    """
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, but without loading torch's compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    _without_tf32()


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products as such within the context, without TensorFloat-32 (relative errors around 1e-3)."""
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


@contextmanager
def process_as_before() -> Iterator[None]:
    """Give torch's modes of a fresh process within the context. Afterwards, even after an error, the process computes
    and draws as if nothing had run."""
    errors, dtype = np.geterr(), torch.get_default_dtype()
    threads, debug_mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn
    convolutions = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    products, workspace = torch.get_float32_matmul_precision(), os.environ.get(WORKSPACE)
    try:
        with fresh_modes(), kept_generators():
            torch.set_default_dtype(torch.float32)
            yield
    finally:
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        torch.set_float32_matmul_precision(products)
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = convolutions
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.set_deterministic_debug_mode(debug_mode)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        np.seterr(**errors)


@contextmanager
def fresh_modes() -> Iterator[None]:
    """Disable autocast and inference mode, record gradients, create tensors on the CPU, within this thread's context.

    Other threads started within the context have these modes anyway.
    """
    casting = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    depth = torch.autocast_increment_nesting() - 1
    while torch.autocast_decrement_nesting():  # a nested autocast would keep casts of weights that have changed since
        pass
    for device in casting:
        torch.set_autocast_enabled(device, False)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        for device in casting:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()
