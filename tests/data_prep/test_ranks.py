"""Several processes prepare one folder together: the bytes of one process, and no process left behind."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from fedmpi.data.opening import open_store
from tests.mpi.launch import find_mpiexec, finish_job, run_mpi, start_job

PREPARE = ["-m", "data_prep", "digits", "--partition", "lognormal", "--clients", "40"]
PREPARE += ["--val", "0.1", "--out", "shards"]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("ranks", "shards"), [(3, 2)])
def test_ranks_write_the_bytes_of_one_process(tmp_path: Path, ranks: int, shards: int) -> None:
    """There may be fewer shards than ranks; the manifest is the same too."""
    program = [sys.executable, *PREPARE, "--shards", str(shards)]
    for place, launcher in (("alone", []), ("together", [find_mpiexec(), "-n", str(ranks)])):
        (tmp_path / place).mkdir()
        done = finish_job(start_job([*launcher, *program], cwd=tmp_path / place), timeout=150)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("licence") == 1 and done.stdout.count("Gini") == 1
    found = digests(tmp_path / "together" / "shards")
    assert found == digests(tmp_path / "alone" / "shards") and f"train-{shards - 1:05d}.h5" in found
    assert open_store(tmp_path / "together" / "shards", verify=True).clients == 40


def test_an_error_ends_all_ranks_with_one_sentence(tmp_path: Path) -> None:
    done = run_mpi(2, [*PREPARE, "--alpha", "3"], timeout=150, cwd=tmp_path)
    assert done.returncode == 2
    assert "--alpha" in done.stderr and "Traceback" not in done.stderr
