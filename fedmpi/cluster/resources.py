"""What of the machine belongs to a rank: processor cores and the device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.common.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

MOST_CORES = 4096


def core_mask() -> np.ndarray:
    """The cores that this process may run on, bool (4096,)."""
    mask = np.zeros(MOST_CORES, bool)
    mask[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = True
    return mask


def cores_allowed() -> int:
    """Cores that this process may keep busy at once: its affinity, limited by the quota of its control group."""
    import joblib  # type: ignore[import-untyped]

    return int(joblib.cpu_count())


def fair_threads(masks: np.ndarray, node_rank: int, allowed: int, environ: Mapping[str, str]) -> int:
    """Threads for one of the ranks of a node.

    A core that several ranks may use is divided among them, so that ranks bound to cores of their own keep them whole.
    An explicit OMP_NUM_THREADS wins; SLURM_CPUS_PER_TASK is an upper limit.

    Parameters
    ----------
    masks : bool (ranks on the node, cores)
        The cores of each rank.
    node_rank : int
        The rank in question.
    allowed : int
        `cores_allowed()` of that rank; below the number of its cores it is a quota, shared by the node's ranks.
    environ : mapping
        Environment variables.
    """
    explicit = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if explicit.isdigit() and int(explicit) > 0:
        return int(explicit)
    own = masks[node_rank]
    share = float((1 / masks.sum(axis=0)[own]).sum())
    if allowed < own.sum():
        share = min(share, allowed / len(masks))
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit():
        share = min(share, int(per_task))
    return max(1, int(share + 1e-9))


def choose_device(request: str, node_rank: int) -> torch.device:
    """The device of a rank.

    Parameters
    ----------
    request : str
        "auto" (a CUDA device if there is one, else the processor), "cpu", "cuda" (one of the visible devices, dealt out
        to the ranks of a node in turn) or any name that torch knows, such as "cuda:1".
    node_rank : int
        The rank's place on its node.

    Raises
    ------
    UserError
        If the request is no device of this machine.
    """
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
