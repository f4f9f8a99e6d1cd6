"""Modes of torch's arithmetic: float32 or TensorFloat-32, repeatable for exact sums, restored after a run.

Also copies of arrays to a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import numpy as np
import torch

from fedmpi.common.calling import kept_generators
from fedmpi.common.types import AnyArray

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
"""One of the two settings with which cuBLAS repeats its results; torch reads it at a process's first product."""


def set_arithmetic(exact: bool = False, tf32: bool = False) -> None:
    """Set the arithmetic of a run, before its first product.

    On GPUs float32 products are computed in float32, or with `tf32` in TensorFloat-32. With `exact`, GPUs compute
    bit-identical results from the same numbers; operations without such a form raise an error that names them.
    """
    os.environ.setdefault(WORKSPACE, FIXED_WORKSPACE)  # a later exact run of the process needs it, too
    _allow_tf32(tf32)
    if exact:
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms, but without torch's compiler
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def to_device(x: AnyArray, device: torch.device) -> torch.Tensor:
    """Copy an array to a GPU without waiting: torch reuses pinned memory only after the copy."""
    stored = torch.from_numpy(np.require(x, requirements=["C", "A", "W"]))
    return (stored.pin_memory() if device.type == "cuda" else stored).to(device, non_blocking=True)


def add_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, alpha: float = 1.0) -> None:
    """Compute target[rows] += alpha · values in place, repeated rows in a fixed order.

    On a GPU `index_add_` adds them in any order, while `index_put_` sorts the rows first.
    """
    if target.device.type == "cpu":
        target.index_add_(0, rows, values, alpha=alpha)
    else:
        target.index_put_((rows,), values * alpha, accumulate=True)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the context's work on a second stream of a GPU: after the work so far and that of earlier contexts, and
    during later work."""
    if device.type != "cuda":
        yield
        return
    main, side = torch.cuda.current_stream(device), second_stream(device)
    main.wait_stream(side)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the same further stream of a GPU in every call; torch's own ones belong to the process's first device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute float32 products as such within the context, without TensorFloat-32 (relative errors around 1e-3)."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    _allow_tf32(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _allow_tf32(allowed: bool) -> None:
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


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
