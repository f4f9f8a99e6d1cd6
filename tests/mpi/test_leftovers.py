"""Shared memory of a killed job is removed by the next one, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedmpi.common.processes import Process
from fedmpi.mpi import leftovers
from tests.mpi.launch import run_alone, run_mpi

KILLED = """
import os, signal
from fedmpi.mpi import Cluster, leftovers
cluster = Cluster.connect()
os.write(1, " ".join([*sorted(leftovers._mapped("self")), "\\n"]).encode())  # one write: the ranks' lines do not mix
cluster.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""
NEXT = "from fedmpi.mpi import Cluster; Cluster.connect().close()"


def note_of(process: Process, folder: Path, *files: str, processes: str = "") -> Path:
    note = folder / f"fedmpi-{os.getuid()}-{process.pid}-{process.started}"
    note.write_text("\n".join([processes or os.readlink("/proc/self/ns/pid"), *files]))
    return note


def test_only_files_of_dead_processes_that_nobody_uses_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        gone = Process.of(child.pid)
    living = Process.of(os.getpid())
    names = ("mpich_shm_left", "mpich_shm_shared", "mpich_shm_alive", "mpich_shm_elsewhere", "precious", "sm_segment.x")
    for name in names:
        (tmp_path / name).write_bytes(b"12345678")
    (tmp_path / "mpich_shm_link").symlink_to(tmp_path / "precious")
    own = ("mpich_shm_left", "mpich_shm_shared", "mpich_shm_link", "precious", "../x", "sm_segment.x")
    dead = note_of(gone, tmp_path, *own)
    alive = note_of(living, tmp_path, "mpich_shm_alive", "mpich_shm_shared")
    elsewhere = note_of(Process("", gone.pid, gone.started + 1), tmp_path, "mpich_shm_elsewhere", processes="pid:[1]")
    leftovers.remove_leftovers()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*names, "mpich_shm_link", alive.name, elsewhere.name} - {"mpich_shm_left", "sm_segment.x"}
    assert not dead.exists()


def test_what_a_process_has_mapped_is_not_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    file = tmp_path / "mpich_shm_mapped"
    file.write_bytes(bytes(4096))
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        gone = Process.of(child.pid)
    hold = f"import mmap; f = open({str(file)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        note_of(gone, tmp_path, file.name)
        leftovers.remove_leftovers()
        assert file.exists()
        holder.kill()
    note_of(gone, tmp_path, file.name)
    leftovers.remove_leftovers()
    assert not file.exists()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory")
def test_the_next_run_removes_what_a_killed_job_has_left() -> None:
    job = run_mpi(2, ["-c", KILLED])
    files = {name for line in job.stdout.splitlines() for name in line.split()}
    assert job.returncode not in (0, 1, 2) and files
    notes = [path for path in Path("/dev/shm").glob(f"fedmpi-{os.getuid()}-*") if files & {*path.read_text().split()}]
    done = run_alone(["-c", NEXT])
    assert done.returncode == 0, done.stderr
    assert not [name for name in files if (Path("/dev/shm") / name).exists()]
    assert not [note for note in notes if note.exists()]
