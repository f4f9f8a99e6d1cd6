"""The undisturbed run that all others are compared with."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import RICH, SECONDS, TRAIN, Done
from tests.mpi.launch import run_mpi


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished run of rich.toml on three ranks."""
    folder = tmp_path_factory.mktemp("undisturbed") / "RUN"
    job = run_mpi(3, [*TRAIN, RICH, "--out", folder], timeout=SECONDS)
    assert job.returncode == 0, job.stderr
    return Done(folder, job)
