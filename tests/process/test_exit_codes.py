"""Exit codes of a command whose process lacks something: files that it may open, a package."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.errors import Divergence, RanksDisagree, RunFailure
from fedmpi.process.exit_codes import _ending_of
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


@pytest.mark.parametrize(
    ("error", "code", "words", "shared"),
    [
        (SystemExit("why"), 1, "why", True),
        (SystemExit(75), 75, "", True),
        (UserError("wrong"), 2, "error: wrong", True),
        (RunFailure("disk"), 1, "error: disk", True),
        (Divergence("nan"), 1, "error: nan", True),
        (RanksDisagree("other"), 1, "error: other", True),
        (ComponentFailure("sampler", "mine", "bad", trace="line 3"), 1, "line 3", True),
        (ClientFailure(3, 1, ValueError("rows")), 1, "client 3 on rank 1", False),
        (KeyboardInterrupt(), 130, "interrupted", False),
        (ZeroDivisionError("x"), 1, "ZeroDivisionError: x", False),
    ],
)
def test_every_error_has_its_exit_code(error: BaseException, code: int, words: str, shared: bool) -> None:
    found, why, together = _ending_of(error)
    assert (found, together) == (code, shared) and words in why
