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
number = signal.Signals[sys.argv[1]]
usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL  # in any test process
signal.signal(number, signal.SIG_IGN if sys.argv[2] == "ignored" else usual)
from fedmpi.process import signals
signals.SECONDS_OF_COPIES = 0.2
interrupt = signals.Interrupt()
os.kill(os.getpid(), number)
asked = interrupt.asked()
time.sleep(0.4)
if sys.argv[2] == "twice":
    os.kill(os.getpid(), number)
    time.sleep(0.4)
interrupt.restore()
handler = signal.getsignal(number)
print(asked, getattr(handler, "name", None) or handler.__name__)
"""


def sent(number: str, how: str) -> subprocess.CompletedProcess[str]:
    """Return the output and the exit code of a process to which a signal is sent."""
    words = [sys.executable, "-c", PROGRAM, number, how]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_asks_the_run_to_stop_and_its_handler_is_put_back(number: str) -> None:
    done = sent(number, "once")
    assert done.stdout.split() == ["True", "default_int_handler" if number == "SIGINT" else "SIG_DFL"], done.stderr


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 0), ("SIGHUP", 0)])
def test_the_second_one_ends_it_at_once_unless_it_is_a_warning(number: str, code: int) -> None:
    done = sent(number, "twice")
    assert done.returncode == code
    assert (f"error: ended by a second {number}" in done.stderr) == bool(code)


def test_a_run_that_was_started_to_continue_without_its_terminal_does() -> None:
    assert sent("SIGHUP", "ignored").stdout.split() == ["False", "SIG_IGN"]


@pytest.mark.parametrize("stream", ["None", "open('/dev/full', 'w')", "closed"])
def test_a_job_is_ended_from_a_thread_whatever_has_become_of_standard_error(stream: str) -> None:
    program = f"""
import io, sys, threading, time
from fedmpi.process.signals import end_now
closed = io.StringIO()
closed.close()
sys.stderr = {stream}
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
