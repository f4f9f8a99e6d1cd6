"""All ranks look around, rank 0 gathers what they have found, and says it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedmpi.common.errors import UserError
from fedmpi.doctor.advice import Advice, advise
from fedmpi.doctor.findings import Findings, find
from fedmpi.mpi import Cluster, read_launch


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
