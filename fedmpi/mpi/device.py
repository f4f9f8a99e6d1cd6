"""Resources of a rank: CPU cores, threads and the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    import torch

MOST_CORES = 4096
MOST_THREADS = "FEDMPI_MOST_THREADS"
"""Environment variable with a sweep's thread limit for the ranks of simultaneous runs."""


def core_mask() -> NDArray[np.bool_]:
    """Return the cores that this process may run on, bool (4096,)."""
    mask = np.zeros(MOST_CORES, bool)
    mask[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = True
    return mask


def cores_allowed() -> int:
    """Return the cores that this process may use at once: its affinity, limited by the quota of its control group."""
    import joblib  # type: ignore[import-untyped]

    return int(joblib.cpu_count())


def fair_threads(masks: NDArray[np.bool_], node_rank: int, allowed: int, environ: Mapping[str, str]) -> int:
    """Return the number of threads for one of the ranks of a node.

    A core that several ranks may use is divided among them; ranks bound to separate cores keep them whole. An explicit
    OMP_NUM_THREADS wins; SLURM_CPUS_PER_TASK and FEDMPI_MOST_THREADS are upper limits.
    """
    if explicit := explicit_threads(environ):
        return explicit
    own = masks[node_rank]
    share = float((1 / masks.sum(axis=0)[own]).sum())
    if allowed < own.sum():
        share = min(share, allowed / len(masks))
    for limit in (environ.get("SLURM_CPUS_PER_TASK", ""), environ.get(MOST_THREADS, "")):
        if limit.isdigit():
            share = min(share, int(limit))
    return max(1, int(share + 1e-9))


def explicit_threads(environ: Mapping[str, str]) -> int:
    """Return OMP_NUM_THREADS, or 0 if it is not set to a number."""
    explicit = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(explicit) if explicit.isdigit() else 0


def choose_device(request: str, node_rank: int) -> torch.device:
    """Choose the device of a rank."""
    import torch

    if request in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", node_rank % torch.cuda.device_count())
    try:
        device = torch.device("cpu" if request == "auto" else request)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"the device '{request}' cannot be used ({reason}). Set the device to 'auto', or to 'cpu'"
        ) from None
    return device
