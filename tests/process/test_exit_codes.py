"""How a command ends whose process lacks something: files that it may open, a package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.mpi.launch import REPOSITORY

LIMITS = """
import resource
from fedmpi.process.exit_codes import run_guarded
run_guarded(lambda: print(*resource.getrlimit(resource.RLIMIT_NOFILE)))
"""


@pytest.mark.parametrize(("asked", "limits"), [("-S -n 64; ulimit -H -n 2000", "2000 2000"), ("-n 64", "64 64")])
def test_a_command_may_open_as_many_files_as_the_system_allows(asked: str, limits: str) -> None:
    words = f"ulimit {asked}; exec {sys.executable} -c '{LIMITS}'"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", words], env=environ, capture_output=True, text=True)
    assert done.stdout.strip() == limits, done.stderr


def test_a_package_that_cannot_be_loaded_is_a_sentence() -> None:
    program = "from fedmpi.process.exit_codes import run_guarded; run_guarded(lambda: __import__('no_such_package'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "error: a package cannot be loaded (ModuleNotFoundError: No module named 'no_such_package'): see `fedmpi "
        "doctor`\n"
    )
