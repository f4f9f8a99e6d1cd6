"""`fedmpi doctor`: facts that each rank collects about itself and its node, and advice on those of all ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.config.site import site_file
from fedmpi.mpi import Cluster, read_launch
from fedmpi.mpi.device import cores_allowed
from fedmpi.mpi.sums import cuda_aware

Findings = dict[str, Any]
"""Facts of a rank by name."""
PROBLEM = "problem"
LITTLE_SHARED_MEMORY = 1 << 30
LITTLE_SPACE = 2 << 30
BUSY = 0.5
"""Load of a node besides its ranks, as a share of its cores, that slows a run down."""
IDENTICAL = ("fedmpi", "python", "torch", "numpy")
"""Versions that must be identical on all ranks."""
SIMILAR = ("h5py", "hdf5", "mpi4py", "mpi", "torch_cuda", "cores_of_node", "threads")
SCHEDULER = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")


def find(cluster: Cluster | None, trouble: str = "", environ: Mapping[str, str] = os.environ) -> Findings:
    """Return all facts about this rank."""
    launch, folder, shared = read_launch(environ), Path.cwd(), Path("/dev/shm")
    disk = os.statvfs(folder)
    memory = os.statvfs(shared) if shared.is_dir() else None
    return {
        "host": platform.node(),
        **_versions(),
        "mpi": cluster.mpi if cluster else "none",
        "mpi_trouble": trouble,
        "launched_by": launch.variable if launch else "nothing",
        "launched": launch.size if launch else 1,
        "nodes": cluster.nodes if cluster else 1,
        "cuda_aware": cluster is not None and cluster.mpi != "none" and cuda_aware(),
        "cores": sorted(os.sched_getaffinity(0)),
        "cores_at_once": cores_allowed(),
        "cores_of_node": os.cpu_count() or 1,
        "threads": cluster.threads_for_rank() if cluster else 1,
        "load": os.getloadavg()[0],
        "memory_free": free_memory(),
        "shm_bytes": memory and memory.f_blocks * memory.f_frsize,
        "shm_free": memory and memory.f_bavail * memory.f_frsize,
        **_accelerators(),
        "folder": str(folder),
        "folder_free": disk.f_bavail * disk.f_frsize,
        "folder_writable": os.access(folder, os.W_OK),
        "variables": {name: environ[name] for name in SCHEDULER if environ.get(name)},
        "sbatch": shutil.which("sbatch"),
    }


def _versions() -> Findings:
    """Return versions of what a run loads; a package that cannot be loaded has its error instead."""
    found: Findings = {"fedmpi": fedmpi.__version__, "python": platform.python_version(), "executable": sys.executable}
    for name in ("torch", "numpy", "h5py"):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # any error of a broken installation
            found[name] = f"cannot be loaded ({error})"
            continue
        found[name] = str(module.__version__)
        if name == "h5py":
            found["hdf5"] = str(module.version.hdf5_version)
    mpi4py = importlib.util.find_spec("mpi4py")
    return found | {"mpi4py": metadata.version("mpi4py") if mpi4py else "none"}


def _accelerators() -> Findings:
    """Return the GPUs that torch sees, and whether there is a driver."""
    found: Findings = {"driver": Path("/proc/driver/nvidia/version").exists(), "torch_cuda": None, "gpus": []}
    try:
        import torch
    except Exception:  # reported with the versions
        return found
    found["torch_cuda"] = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def free_memory() -> int | None:
    """Return the bytes of memory that programs may still use on this machine; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def advise(ranks: Sequence[Findings]) -> list[str]:
    """Return all advice on a job: first problems, with which no run can start, then warnings."""
    warnings = [*_slow_job(ranks), *_differing(ranks, SIMILAR, "A run is as slow as its slowest rank")]
    for host in dict.fromkeys(found["host"] for found in ranks):
        warnings += _slow_node(host, [found for found in ranks if found["host"] == host], len(ranks))
    problems = [*_impossible(ranks), *_differing(ranks, IDENTICAL, "Use the same environment on all nodes")]
    return [f"{PROBLEM}: {text}" for text in problems] + [f"warning: {text}" for text in warnings]


def _impossible(ranks: Sequence[Findings]) -> Iterator[str]:
    if ranks[0]["mpi_trouble"]:
        yield ranks[0]["mpi_trouble"]
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
    first, folder = ranks[0], ranks[0]["folder"]
    if first["mpi"] == "none" and not first["mpi_trouble"]:
        yield "no MPI is installed, so a run is one process. Install one with pip install 'fedmpi[mpi]'"
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


def examine() -> bool:
    """Collect and print the facts of all ranks; return whether a run could start, the same on all of them."""
    try:
        cluster = Cluster.connect()
    except UserError as error:
        launch = read_launch()
        if launch is None or launch.rank == 0:
            found = [find(None, str(error))]
            print(examination_text(found, advise(found), site_file()), flush=True)
        return False
    try:
        own = find(cluster) | {"sees_folder": _sees_folder(cluster)}
        gathered = cluster.gather(np.frombuffer(json.dumps(own).encode(), np.uint8))
        problems = 0
        if gathered is not None:
            found = [json.loads(part.tobytes()) for part in gathered]
            advice = advise(found)
            problems = sum(one.startswith(PROBLEM) for one in advice)
            print(examination_text(found, advice, site_file()), flush=True)
        return cluster.maximum(problems) == 0
    finally:
        cluster.close()


def _sees_folder(cluster: Cluster) -> bool:
    """Return whether a file that rank 0 creates in its working directory is in that of this rank; collective."""
    number = np.array([os.getpid() if os.access(".", os.W_OK) else 0])
    if cluster.is_server and number[0]:
        Path(f".fedmpi-doctor-{number[0]}").touch()
    number = cluster.broadcast([number] if cluster.is_server else None)[0]
    path = Path(f".fedmpi-doctor-{number[0]}")
    seen = not number[0] or path.exists()
    cluster.barrier()
    if cluster.is_server:
        path.unlink(missing_ok=True)
    return seen


def examination_text(ranks: Sequence[Findings], advice: Sequence[str], site: Path) -> str:
    """Return facts and advice as text."""
    first = ranks[0]
    launched = "standalone" if first["launched_by"] == "nothing" else f"{first['launched']} by {first['launched_by']}"
    cuda = f"torch for CUDA {first['torch_cuda']}" if first["torch_cuda"] else "torch without CUDA"
    inside = ", ".join(f"{name}={value}" for name, value in first["variables"].items())
    rows = {
        "fedmpi": f"{first['fedmpi']}, Python {first['python']} ({first['executable']})",
        "torch": f"{first['torch']}, NumPy {first['numpy']}",
        "HDF5": f"{first.get('hdf5', 'none')}, h5py {first['h5py']}",
        "MPI": f"{first['mpi']}, mpi4py {first['mpi4py']}, {'' if first['cuda_aware'] else 'not '}CUDA-aware",
        "ranks": f"{len(ranks)} on {first['nodes']} node(s), launched {launched}",
        "GPUs": f"{', '.join(first['gpus']) or 'none'} ({cuda}, {'driver' if first['driver'] else 'no driver'})",
        "SLURM": f"{first['sbatch'] or 'no sbatch on the PATH'}{inside and f'; inside a job: {inside}'}",
        "site settings": f"{site}{'' if site.exists() else ' (none: defaults)'}",
        "folder": f"{first['folder']}: {_size(first['folder_free'])} free",
    }
    for host in dict.fromkeys(found["host"] for found in ranks):
        members = [found for found in ranks if found["host"] == host]
        one, cores = members[0], {core for found in members for core in found["cores"]}
        threads = sorted({found["threads"] for found in members})
        limit = f" ({one['cores_at_once']} at once)" if one["cores_at_once"] < len(one["cores"]) else ""
        rows[f"node {host}"] = (
            f"{len(members)} rank(s), {len(cores)} of {one['cores_of_node']} cores{limit}, load {one['load']:.1f}, "
            f"{'-'.join(map(str, threads))} thread(s) per rank, {_size(one['memory_free'])} memory free, "
            f"/dev/shm {_size(one['shm_free'])} of {_size(one['shm_bytes'])} free"
        )
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, "", *(advice or ["no problems found"])])


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"
