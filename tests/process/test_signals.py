"""Signals that ask a run to save and stop, in processes that load nothing else of fedmpi's."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from fedmpi.records.progress import shown_warnings
from tests.mpi.launch import REPOSITORY

PROGRAM = """
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
    time.sleep(0.4)
    if sys.argv[1] == "twice":
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
        ("twice", "SIGTERM", 143, ""),
        ("twice", "SIGINT", 130, ""),
        ("ignored", "SIGHUP", 0, "False"),  # the run was started to continue without its terminal
    ],
)
def test_a_signal_asks_the_run_to_stop_and_a_second_one_ends_it(how: str, numbers: str, code: int, asked: str) -> None:
    words = [sys.executable, "-c", PROGRAM, how, *numbers.split()]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    assert done.stdout.split() == ([] if code else [asked, "True"] * len(numbers.split())), done.stderr
    assert (f"error: ended by a second {numbers}" in done.stderr) == bool(code)


def test_a_job_is_ended_from_a_thread_whatever_has_become_of_standard_error() -> None:
    program = """
import io, sys, threading, time
from fedmpi.process.signals import end_now
sys.stderr = io.StringIO()
sys.stderr.close()
threading.Thread(target=end_now, args=(7, "why"), daemon=True).start()
time.sleep(30)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=100).returncode == 7


@pytest.mark.parametrize("stream", ["full", "closed", "none"])
def test_a_warning_that_cannot_be_shown_ends_no_run(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    lost = {"full": open("/dev/full", "w", buffering=1), "closed": closed, "none": None}  # noqa: SIM115
    with shown_warnings(), monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", lost[stream])
        logging.getLogger("fedmpi").warning("one that is not shown")
