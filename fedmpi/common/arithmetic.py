"""How torch computes: the same bits every time where sums are to be exact, in full float32 while trying things, in its
own modes during a run, and as before when the run has ended; and whether rounding explains a difference.

Where values meet, maxima and ReLU jump: a sum in another order, off in its last bit, may then move the gradient by a
thousandth, and deep ones with norms by several hundredths in three steps. One way alone does the same when it starts
off by a rounding, in some tries if not in all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from fedmpi.common.calling import kept_settings
from fedmpi.common.generators import kept_generators

TRIES = 8
TIMES = 3.0
"""Two ways may lie this many times as far apart as one alone moves."""
AT_MOST = 0.1
"""A difference above this is never taken for rounding."""


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"
"""One of the two settings with which cuBLAS repeats its results; read when a process first uses cuBLAS."""


def explained_by_rounding(apart: float, moved: Callable[[Tensor], float], values: Tensor) -> bool:
    """Whether a calculation alone, from values that are off by a rounding, moves about as far as two ways lie apart."""
    if not apart <= AT_MOST:
        return False
    generator = torch.Generator().manual_seed(0)
    unit = torch.finfo(values.dtype).eps
    for _ in range(TRIES):
        sides = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        if apart <= TIMES * moved(values * (1 + unit * sides.to(values))):
            return True
    return False


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
