"""The process of a command: exit codes by its errors, lost output, signals, and memory that is used again."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedmpi
from fedmpi import ClientFailure, ComponentFailure, UserError
from fedmpi.common.errors import Divergence, RanksDisagree, RunFailure
from fedmpi.process import malloc
from fedmpi.process.exit_codes import _ending_of
from fedmpi.records.progress import shown_warnings
from tests.mpi.launch import REPOSITORY

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NUMPY_MADVISE_HUGEPAGE": "0"}


def run(program: str, *words: str | Path, shell: str = "", fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess:
    """Run a Python program, started by a line of bash that ends with `shell`, and begins with what is before "exec"."""
    before, _, after = shell.rpartition("exec")
    line = f'{before} exec "$@" {after}'
    command = ["bash", "-c", line, "bash", sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, pass_fds=fds, timeout=100)


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
        (5, "run", "> /dev/full", 0),
        (5, "ends", ">&-", 0),
    ],
)
def test_a_run_continues_without_a_reader_of_its_output_and_other_commands_end(
    lines: int, kind: str, output: str, code: int
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run(GUARDED, str(lines), kind, shell=f"exec {output.replace('unread', f'>&{writing}')}", fds=(writing,))
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


SIGNALED = """
import os, signal, sys, time
from fedmpi.process import signals

signals.SECONDS_OF_COPIES = 0.2
usual = {signal.SIGINT: signal.default_int_handler}  # in any test process
for number in (signal.Signals[name] for name in sys.argv[2:]):
    before = signal.SIG_IGN if sys.argv[1] == "ignored" else usual.get(number, signal.SIG_DFL)
    signal.signal(number, before)
    interrupt = signals.Interrupt()
    os.kill(os.getpid(), number)
    asked = interrupt.asked()
    if sys.argv[1] == "over":  # the run ended meanwhile, and the next signal is the caller's
        interrupt.restore()
    time.sleep(0.4)
    if sys.argv[1] in ("twice", "over"):
        os.kill(os.getpid(), number)
        time.sleep(0.4)
    interrupt.restore()
    print(asked, signal.getsignal(number) == before)
"""


@pytest.mark.parametrize(
    ("how", "numbers", "code", "asked"),
    [
        ("once", "SIGTERM SIGUSR1 SIGINT SIGHUP", 0, "True"),
        ("twice", "SIGUSR1 SIGHUP", 0, "True"),  # which are warnings
        ("twice", "SIGTERM", -15, ""),
        ("twice", "SIGINT", -2, ""),
        ("over", "SIGINT", -2, ""),
        ("ignored", "SIGHUP", 0, "False"),  # the run was started to continue without its terminal
    ],
)
def test_a_signal_asks_the_run_to_stop_and_a_second_one_ends_it(how: str, numbers: str, code: int, asked: str) -> None:
    done = run(SIGNALED, how, *numbers.split())
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == ([] if code else [asked, "True"] * len(numbers.split())), done.stderr
    assert ("Ctrl-C once more ends at once" in done.stderr) == ("SIGINT" in numbers)
    assert ("KeyboardInterrupt" in done.stderr) == (how == "over")


@pytest.mark.parametrize("stream", ["full", "closed", "none"])
def test_a_warning_that_cannot_be_shown_ends_no_run(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    lost = {"full": open("/dev/full", "w", buffering=1), "closed": closed, "none": None}  # noqa: SIM115
    with shown_warnings(), monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", lost[stream])
        logging.getLogger("fedmpi").warning("one that is not shown")


FAULTS = """
import resource, sys
from contextlib import nullcontext
import numpy as np
from fedmpi.process.malloc import freed_memory_kept

def backward_pass(mebibytes):
    blocks = [np.empty(mebibytes << 20, np.uint8) for _ in range(60 // mebibytes)]
    for block in blocks:
        block[::4096] = 1

for mebibytes in (3, 60):
    with freed_memory_kept() if sys.argv[1] == "kept" else nullcontext(True) as kept:
        assert kept
        backward_pass(mebibytes)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            backward_pass(mebibytes)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 60 * 256
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
on_glibc = pytest.mark.skipif(malloc._library() is None, reason="glibc's settings, where the user has made none")


@on_glibc
@pytest.mark.skipif(HUGE.exists() and "[always]" in HUGE.read_text(), reason="huge pages: few faults in any case")
@pytest.mark.parametrize(("how", "fewest", "most"), [("as it is", PAGES // 4, 10 * PAGES), ("kept", 0, PAGES // 100)])
def test_freed_memory_is_used_again_without_page_faults(how: str, fewest: int, most: int):
    done = run(FAULTS, how)
    faults = [int(line) for line in done.stdout.split()]
    assert len(faults) == 2 and all(fewest <= count < most for count in faults), done


@on_glibc
def test_a_run_keeps_memory_unless_the_user_has_set_glibc_and_what_comes_after_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "131072")
            assert malloc._library.__wrapped__() is None
    made, change = [], malloc._set
    monkeypatch.setattr(malloc, "_set", lambda library, wanted: (made.append(wanted), change(library, wanted))[1])

    def fail(record: dict[str, object]) -> None:
        assert made == [malloc.IN_A_RUN]
        raise RuntimeError("a test fault")

    with pytest.raises(fedmpi.ComponentFailure):
        fedmpi.run("fedavg", {"rounds": 2}, data="digits", on_round=fail)
    assert made == [malloc.IN_A_RUN, malloc.AFTERWARDS]
