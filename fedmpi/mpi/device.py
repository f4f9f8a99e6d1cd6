"""Resources of a rank: CPU cores, threads and the device."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MOST_CORES = 4096
LEAST_SECONDS_OF_LOAD = 0.2
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


class Load:
    """Core seconds used by all processes and by this one since the object was made."""

    def __init__(self, mask: NDArray[np.bool_]):
        self._mask = mask
        self._busy, self._own, self._since = busy_seconds(mask), time.process_time(), time.monotonic()

    def seconds(self) -> tuple[float, float, float]:
        """Return seconds since the start (a few tenths at least), and core seconds of all processes and of this one."""
        time.sleep(max(0.0, LEAST_SECONDS_OF_LOAD - (time.monotonic() - self._since)))
        passed = time.monotonic() - self._since
        return passed, busy_seconds(self._mask) - self._busy, time.process_time() - self._own


def busy_seconds(mask: NDArray[np.bool_]) -> float:
    """Return the busy seconds of the mask's cores since the machine started, by /proc/stat; 0 without one."""
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file if line.startswith("cpu") and line[3].isdigit()]
    except OSError:
        return 0.0
    counted = (line for line in lines if int(line[0][3:]) < len(mask) and mask[int(line[0][3:])])
    # user, nice, system, (idle, waiting for disks,) interrupts, soft interrupts
    return sum(float(line[i]) for line in counted for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


def threads_beside_others(fair: int, cores: int, others: float, ranks: int) -> int:
    """Return a rank's threads if other processes keep `others` of the node's `cores` busy: its share of the rest.

    Threads that wait for one another on a shared core make a step many times slower, not only by a share.
    """
    return max(1, min(fair, int((cores - others) / ranks + 0.5)))


def choose_device(request: str, node_rank: int) -> torch.device:
    """Choose the device of a rank."""
    import torch

    if request in ("auto", "cuda"):
        visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if visible:
            return torch.device("cuda", node_rank % visible)
        if request == "cuda":
            raise UserError(
                "the device is to be 'cuda', but torch sees no CUDA device here: set the device to 'auto' or 'cpu'"
            )
        return torch.device("cpu")
    try:
        device = torch.device(request)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"the device '{request}' cannot be used ({reason}): set the device to 'auto', 'cpu' or 'cuda'"
        ) from None
    return device
