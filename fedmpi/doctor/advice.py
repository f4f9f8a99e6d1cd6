"""Advice on the facts that all ranks have collected: problems, with which no run starts, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Findings = dict[str, Any]
"""Facts of a rank by name."""
LITTLE_SHARED_MEMORY = 1 << 30
LITTLE_SPACE = 2 << 30
BUSY = 0.5
"""Load of a node besides its ranks, as a share of its cores, that slows a run down."""
MOST_RANKS = 4096
IDENTICAL = ("fedmpi", "python", "torch", "numpy")
"""Versions that must be identical on all ranks."""
SIMILAR = ("h5py", "hdf5", "mpi4py", "mpi", "system", "torch_cuda", "cores_of_node", "threads", "folder_kind")


@dataclass(frozen=True)
class Advice:
    """One problem or warning."""

    level: Literal["problem", "warning"]  # a run is impossible, or only slower or less than it could be
    text: str  # what is wrong, where, and what to do

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


def advise(ranks: Sequence[Findings]) -> list[Advice]:
    """Return all advice on a job, problems first."""
    warnings = [*_slow_job(ranks), *_differing(ranks, SIMILAR, "A run is as slow as its slowest rank")]
    for host in dict.fromkeys(found["host"] for found in ranks):
        warnings += _slow_node(host, [found for found in ranks if found["host"] == host], len(ranks))
    problems = [*_impossible(ranks), *_differing(ranks, IDENTICAL, "Use the same environment on all nodes")]
    return [Advice("problem", text) for text in problems] + [Advice("warning", text) for text in warnings]


def _impossible(ranks: Sequence[Findings]) -> Iterator[str]:
    if ranks[0]["mpi_trouble"]:
        yield ranks[0]["mpi_trouble"]
    if len(ranks) > MOST_RANKS:
        yield f"{len(ranks)} ranks, but a run has at most {MOST_RANKS}. Start fewer"
    for name in ("torch", "numpy", "h5py"):
        if broken := _where(ranks, lambda found: found[name].startswith("cannot be loaded")):  # noqa: B023
            yield f"{name} {ranks[broken[0]][name]} on {_ranks(ranks, broken)}. Install it again"
    without = _where(ranks, lambda found: not found["gpus"])
    if 0 < len(without) < len(ranks):
        yield f'{_ranks(ranks, without)} see no GPU. Set cluster.device = "cpu", or start all ranks on nodes with GPUs'
    if blind := _where(ranks, lambda found: found.get("sees_folder") is False):
        yield f"{_ranks(ranks, blind)} do not see rank 0's files in {ranks[0]['folder']}. Start in a shared folder"


def _differing(ranks: Sequence[Findings], names: Sequence[str], action: str) -> Iterator[str]:
    for name in names:
        values = [str(found.get(name)) for found in ranks]
        usual = Counter(values).most_common(1)[0][0]
        if others := [rank for rank, value in enumerate(values) if value != usual]:
            yield f"{name} is {usual}, but {values[others[0]]} on {_ranks(ranks, others)}. {action}"


def _slow_job(ranks: Sequence[Findings]) -> Iterator[str]:
    first, wheels, folder = ranks[0], ranks[0]["mpi_wheels"], ranks[0]["folder"]
    if first["mpi"] == "none" and not first["mpi_trouble"]:
        yield "no MPI is installed, so a run is one process. Install one with pip install 'fedmpi[mpi]'"
    if len(wheels) > 1:
        yield f"{' and '.join(wheels)} are both installed, and launcher and library may not match. Keep one of them"
    tasks = first["variables"].get("SLURM_NTASKS", "1")
    if first["launched_by"] == "nothing" and tasks.isdigit() and int(tasks) > 1:
        yield f"the allocation has {tasks} tasks, but this is one process. Start with srun or mpiexec"
    if first["driver"] and first["torch_cuda"] is None:
        yield (
            f"{first['host']} has an NVIDIA driver, but torch {first['torch']} has no CUDA. Install one from "
            "https://download.pytorch.org/whl/cuNNN for a CUDA version that the driver supports (see nvidia-smi)"
        )
    elif first["driver"] and not first["gpus"]:
        yield f"{first['host']} has an NVIDIA driver, but torch sees no GPU. Request one from the batch system"
    if len(ranks) > 1 and any(found["gpus"] for found in ranks) and not first["cuda_aware"]:
        yield f"{first['mpi']} is not CUDA-aware, so updates on GPUs are sent through host memory"
    if not first["folder_writable"]:
        yield f"{folder} is not writable. Choose a folder for each run with --out"
    elif first["folder_free"] < LITTLE_SPACE:
        yield f"{first['folder_free'] / 1e9:.1f} GB are free in {folder}. Checkpoints may not fit; use another folder"
    if first["folder_kind"] in ("tmpfs", "ramfs"):
        yield f"{folder} is in memory ({first['folder_kind']}), so its runs are lost with the node. Use a disk"
    if first["slurm"] == "no answer":
        yield "sbatch does not answer. Jobs cannot be submitted from this machine"


def _slow_node(host: str, members: Sequence[Findings], ranks: int) -> Iterator[str]:
    first, count, gpus, free = members[0], len(members), len(members[0]["gpus"]), members[0]["shm_free"]
    use = Counter(core for found in members for core in found["cores"])
    at_once = min(len(use), max(found["cores_at_once"] for found in members))
    bound = count > 1 and any(len(found["cores"]) < found["cores_of_node"] for found in members)
    if bound and len(use) < count:
        yield (
            f"{count} ranks on {host} are bound to {len(use)} core(s) and take turns. Unbind them (mpiexec --bind-to "
            "none, srun --cpu-bind=none), or request more cores"
        )
    elif count > at_once:
        yield f"{count} ranks share {at_once} core(s) on {host}. Start fewer, or use more nodes"
    elif bound and max(use.values()) > 1 and len(use) >= 2 * count:
        yield f"ranks on {host} share cores, although each could have its own. Bind them (--bind-to core)"
    if first["load"] - (count if ranks > 1 else 0) > BUSY * first["cores_of_node"]:
        yield (
            f"{host} is busy (load {first['load']:.1f} on {first['cores_of_node']} cores), which slows runs down. Set "
            "cluster.threads = 1, or wait"
        )
    if 0 < gpus < count:
        yield f"{count} ranks share {gpus} GPU(s) on {host}. Start one rank per GPU"
    elif ranks > 1 and count < gpus:
        yield f"{count} ranks on {host} leave {gpus - count} of its {gpus} GPUs idle. Start one rank per GPU"
    if count > 1 and free is not None and free < LITTLE_SHARED_MEMORY:
        yield (
            f"{host} has {free / 1e6:.0f} MB free in /dev/shm, where the ranks of a node sum updates (8 bytes per "
            "parameter and rank); larger models use the slower Allreduce. Give a container more (docker run "
            "--shm-size=4g), or remove files of dead jobs"
        )


def _where(ranks: Sequence[Findings], holds: Callable[[Findings], bool]) -> list[int]:
    return [rank for rank, found in enumerate(ranks) if holds(found)]


def _ranks(ranks: Sequence[Findings], some: Sequence[int]) -> str:
    """Return "rank 3 (host)" or "ranks 1, 2, 3, 4 and 12 more (host)" with the host of the first."""
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some[:4]))}{more} ({ranks[some[0]]['host']})"
