"""The undisturbed run that all others are compared with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.runs import RICH, SECONDS, TRAIN, Done
from tests.made_once import made_once
from tests.mpi.launch import run_mpi


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished run of rich.toml on three ranks."""

    def make(folder: Path) -> None:
        job = run_mpi(3, [*TRAIN, RICH, "--out", folder / "RUN"], timeout=SECONDS)
        assert job.returncode == 0, job.stderr
        (folder / "printed.json").write_text(json.dumps([job.stdout, job.stderr]))

    folder = made_once(tmp_path_factory, "undisturbed", make)
    stdout, stderr = json.loads((folder / "printed.json").read_text())
    return Done(folder / "RUN", subprocess.CompletedProcess([], 0, stdout, stderr))
