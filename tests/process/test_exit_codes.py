"""Exit codes of a command: by its errors, and if its output is lost; the files that it may open."""

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


@pytest.mark.parametrize(
    ("error", "code", "words", "shared"),
    [
        (SystemExit("why"), 1, "why", True),
        (SystemExit(75), 75, "", True),
        (UserError("wrong"), 2, "error: wrong", True),
        (RunFailure("disk"), 1, "error: disk", True),
        (ImportError("no torch"), 1, "a package cannot be loaded (ImportError: no torch)", True),
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


GUARDED = """
import sys
from fedmpi.process.exit_codes import run_guarded

def main():
    for number in range(int(sys.argv[1])):
        print(number)
    return 0

run_guarded(main, ignores_lost_output=sys.argv[2] == "run")
"""


@pytest.mark.parametrize(
    ("lines", "kind", "output", "code"),
    [
        (5, "ends", "unread", 141),  # which all fit into a buffer
        (100_000, "ends", "unread", 141),
        (100_000, "run", "unread", 0),
        (5, "run", "/dev/full", 0),
        (5, "ends", "closed", 0),
    ],
)
def test_a_run_continues_without_a_reader_of_its_output_and_other_commands_end(
    lines: int, kind: str, output: str, code: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    to = {"unread": f">&{writing}", "closed": ">&-"}.get(output, f"> {output}")
    done = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -c '{GUARDED}' {lines} {kind} {to}"],
        pass_fds=[writing],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")
