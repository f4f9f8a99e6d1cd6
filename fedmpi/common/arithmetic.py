"""How torch computes: repeatable where sums are exact, in full float32 in checks, as before when a run has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from fedmpi.common.calling import kept_settings
from fedmpi.common.generators import kept_generators

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


@contextmanager
def process_as_before() -> Iterator[None]:
    """Within: torch's modes are those of a fresh process. Afterwards the process computes and draws as if nothing had
    run within, whether that ended well or not."""
    threads, debug_mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cudnn = torch.backends.cudnn
    convolutions = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32
    products, workspace = torch.get_float32_matmul_precision(), os.environ.get(WORKSPACE)
    try:
        with fresh_modes(), kept_generators(), kept_settings():
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


@contextmanager
def fresh_modes() -> Iterator[None]:
    """Within: this thread computes without autocast or inference mode, records gradients, and makes tensors on the CPU.

    Other threads that are started within have these modes anyway.
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
