"""What is wrong with what the ranks have found: problems, with which no run starts, and warnings, each with advice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Findings = dict[str, Any]
"""What a rank has found: plain values by name."""
LITTLE_SHARED_MEMORY = 1 << 30
LITTLE_ROOM = 2 << 30
BUSY = 0.5
"""Load of a node, beside its ranks, from which on a run is slowed down: half of its cores."""
MOST_RANKS = 4096
TORCH_WHEELS = "https://download.pytorch.org/whl"
ALIKE = ("fedmpi", "python", "torch", "numpy")
"""Versions that ranks compare before a run: it is refused where they differ."""
MAY_DIFFER = ("h5py", "hdf5", "mpi4py", "mpi", "system", "torch_cuda", "cores_of_node", "threads", "folder_kind")


@dataclass(frozen=True)
class Advice:
    """One thing to know."""

    level: Literal["problem", "warning"]  # Whether a run is impossible, or only slower or less than it could be
    text: str  # What, where, and what to do

    def __str__(self) -> str:
        return f"{self.level}: {self.text}"


def advise(ranks: Sequence[Findings]) -> list[Advice]:
    """All advice on a job, problems first."""
    found = [Advice(level, text) for check in CHECKS for level, text in check(ranks)]
    return sorted(found, key=lambda advice: advice.level)


Remarks = Iterator[tuple[Literal["problem", "warning"], str]]


def _mpi(ranks: Sequence[Findings]) -> Remarks:
    first = ranks[0]
    if first["mpi_trouble"]:
        yield "problem", first["mpi_trouble"]
    elif first["mpi"] == "none":
        yield "warning", "no MPI: a run is one process (pip install 'fedmpi[mpi]' brings one)"
    if len(first["mpi_wheels"]) > 1:
        wheels = " and ".join(first["mpi_wheels"])
        yield "warning", f"{wheels} are both installed here, and launcher and library may not fit: keep one of them"
    if len(ranks) > MOST_RANKS:
        yield "problem", f"{len(ranks)} ranks: at most {MOST_RANKS} can take part in a run"
    tasks = first["variables"].get("SLURM_NTASKS", "1")
    if first["launched_by"] == "nothing" and tasks.isdigit() and int(tasks) > 1:
        yield "warning", f"this allocation has {tasks} tasks but this is one process: start with srun or mpiexec"


def _versions(ranks: Sequence[Findings]) -> Remarks:
    for name in ("torch", "numpy", "h5py"):
        broken = _where(ranks, lambda found: found[name].startswith("cannot be loaded"))  # noqa: B023
        if broken:
            yield "problem", f"{name} {ranks[broken[0]][name]} on {_ranks(broken)}: install it again"
    for name in ALIKE + MAY_DIFFER:
        values = [str(found.get(name)) for found in ranks]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            others = [rank for rank, value in enumerate(values) if value != usual]
            text = f"{name} is {usual}, but {values[others[0]]} on {_ranks(others)} ({ranks[others[0]]['host']})"
            if name in ALIKE:
                yield "problem", f"{text}: give all nodes the same environment"
            elif name == "threads":
                yield "warning", f"{text}: the slowest sets the pace; give every rank as many cores"
            else:
                yield "warning", text


def _cores(ranks: Sequence[Findings]) -> Remarks:
    for host, members in _hosts(ranks).items():
        cores = {core for found in members for core in found["cores"]}
        at_once = min(len(cores), max(found["cores_at_once"] for found in members))
        busy = Counter(core for found in members for core in found["cores"])
        bound = [found for found in members if len(found["cores"]) < found["cores_of_node"]]
        if len(members) > 1 and len(cores) < len(members) and bound:
            yield (
                "warning",
                f"{len(members)} ranks on {host} are bound to {len(cores)} core(s): they take turns; "
                "unbind them (mpiexec --bind-to none, srun --cpu-bind=none) or ask for more cores",
            )
        elif len(members) > at_once:
            yield (
                "warning",
                f"{len(members)} ranks share {at_once} core(s) on {host}: start fewer, or take more nodes",
            )
        elif len(members) > 1 and bound and max(busy.values()) > 1 and len(cores) >= 2 * len(members):
            yield "warning", f"ranks on {host} share cores although there is one for each: bind them (--bind-to core)"
        beside = members[0]["load"] - (len(members) if len(ranks) > 1 else 0)
        if beside > BUSY * members[0]["cores_of_node"]:
            yield (
                "warning",
                f"{host} is busy already (load {members[0]['load']:.1f} on {members[0]['cores_of_node']} cores): "
                "runs beside other work are slow, many threads most of all; set cluster.threads = 1 or wait",
            )


def _devices(ranks: Sequence[Findings]) -> Remarks:
    with_gpu = _where(ranks, lambda found: bool(found["gpus"]))
    without = [rank for rank in range(len(ranks)) if rank not in with_gpu]
    if with_gpu and without:
        yield (
            "problem",
            f"{_ranks(without)} ({ranks[without[0]]['host']}) see no GPU and the others do: unlike devices are "
            'refused; set cluster.device = "cpu", or start all ranks on nodes with GPUs',
        )
    for host, members in _hosts(ranks).items():
        gpus = len(members[0]["gpus"])
        if gpus and len(members) > gpus:
            yield "warning", f"{len(members)} ranks share {gpus} GPU(s) on {host}: one rank a GPU is usual"
        elif gpus and len(ranks) > 1 and len(members) < gpus:
            yield "warning", f"{len(members)} ranks on {host} leave {gpus - len(members)} of its {gpus} GPUs idle"
    first = ranks[0]
    if first["driver"] and first["torch_cuda"] is None:
        yield (
            "warning",
            f"{first['host']} has an NVIDIA driver, but torch {first['torch']} has no CUDA: install one from "
            f"{TORCH_WHEELS}/cuNNN, where cuNNN is a CUDA version that the driver supports (nvidia-smi shows it)",
        )
    elif first["driver"] and not first["gpus"]:
        yield "warning", f"{first['host']} has an NVIDIA driver, but torch sees no GPU: ask the batch system for one"
    if with_gpu and len(ranks) > 1 and not first["cuda_aware"]:
        yield "warning", f"{first['mpi']} is not CUDA-aware: updates on GPUs travel through host memory"


def _memory(ranks: Sequence[Findings]) -> Remarks:
    for host, members in _hosts(ranks).items():
        free = members[0]["shm_free"]
        if len(members) > 1 and free is not None and free < LITTLE_SHARED_MEMORY:
            yield (
                "warning",
                f"{host} has {free / 1e6:.0f} MB free in /dev/shm, where the ranks of a node sum updates (8 bytes a "
                "parameter and rank); where a model does not fit, the slower Allreduce takes over: give a container "
                "more (docker run --shm-size=4g), or remove what dead jobs left there",
            )


def _folder(ranks: Sequence[Findings]) -> Remarks:
    first = ranks[0]
    if not first["folder_writable"]:
        yield "warning", f"{first['folder']} cannot be written: choose a folder for each run with --out"
    elif first["folder_free"] < LITTLE_ROOM:
        yield "warning", f"{first['folder_free'] / 1e9:.1f} GB are free in {first['folder']}: checkpoints may not fit"
    if first["folder_kind"] in ("tmpfs", "ramfs"):
        yield "warning", f"{first['folder']} lies in memory ({first['folder_kind']}): runs there end with the node"
    blind = _where(ranks, lambda found: found.get("sees_folder") is False)
    if blind:
        yield (
            "problem",
            f"{_ranks(blind)} ({ranks[blind[0]]['host']}) do not see rank 0's files in {first['folder']}: start "
            "from a folder that all nodes share",
        )


def _scheduler(ranks: Sequence[Findings]) -> Remarks:
    if ranks[0]["slurm"] == "sbatch does not answer":
        yield "warning", "sbatch is installed but does not answer: jobs cannot be submitted from here"


CHECKS: tuple[Callable[[Sequence[Findings]], Remarks], ...] = (
    _mpi,
    _versions,
    _cores,
    _devices,
    _memory,
    _folder,
    _scheduler,
)


def _where(ranks: Sequence[Findings], true: Callable[[Findings], bool]) -> list[int]:
    return [rank for rank, found in enumerate(ranks) if true(found)]


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2, 3", or "ranks 1, 2, 3 and 12 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"ranks {', '.join(map(str, ranks[:4]))}{more}"


def _hosts(ranks: Sequence[Findings]) -> dict[str, list[Any]]:
    """The findings of the ranks of each host."""
    hosts: dict[str, list[Any]] = defaultdict(list)
    for found in ranks:
        hosts[found["host"]].append(found)
    return hosts
