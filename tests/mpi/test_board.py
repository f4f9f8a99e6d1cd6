"""Ranks of a node meet at a board in the memory that they share, sleep there, and are woken by the last one."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from fedmpi.mpi import board
from fedmpi.mpi.board import BYTES, Semaphore, semaphores_work
from tests.mpi.launch import run_mpi

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not semaphores_work(), reason="no semaphores here"),
]

PROGRAMS = ("-m", "tests.mpi.boards")
SMALL = (
    "woken",
    "progress",
    "signals",
    "many_meetings 400",
    "server_away",
    "large_broadcasts",
    "without semaphores",
    "without room",
    "without memory",
)


@pytest.fixture(scope="module")
def printed() -> str:
    """What a job of three ranks printed that runs all programs one after another."""
    job = run_mpi(3, [*PROGRAMS, *" + ".join(SMALL).split()])
    return job.stdout + ("the job ended well\n" if not job.returncode else job.stderr)


@pytest.mark.parametrize("program", SMALL)
def test_ranks_of_a_node(program: str, printed: str):
    assert printed.count(f"passed: {program}\n") == 3, printed


def test_a_job_of_several_programs_ends_well(printed: str):
    assert printed.endswith("the job ended well\n"), printed


@pytest.mark.slow
def test_two_ranks_meet_as_well():
    job = run_mpi(2, [*PROGRAMS, "many_meetings", "400"])
    assert job.returncode == 0, job.stderr


def memory() -> np.ndarray:
    """What parent and child share."""
    import mmap

    return np.frombuffer(mmap.mmap(-1, BYTES), np.uint8)


def test_a_bell_wakes_another_process():
    shared = memory()
    own = Semaphore(shared, made=True)
    child = os.fork()
    if not child:
        time.sleep(0.2)
        Semaphore(shared, made=False).post()
        os._exit(0)
    started = time.monotonic()
    own.wait(30)
    waited = time.monotonic() - started
    os.waitpid(child, 0)
    assert 0.1 < waited < 10


def test_a_bell_that_nobody_rings_lets_go_in_time_and_one_that_was_rung_before_at_once():
    own = Semaphore(memory(), made=True)
    started = time.monotonic()
    own.wait(0.1)
    assert 0.09 < time.monotonic() - started < 5
    own.post()
    started = time.monotonic()
    own.wait(30)
    assert time.monotonic() - started < 10


def test_a_hushed_bell_was_never_rung():
    own = Semaphore(memory(), made=True)
    own.post()
    own.post()
    own.reset()
    started = time.monotonic()
    own.wait(0.1)
    assert time.monotonic() - started > 0.09


def test_there_are_no_semaphores_without_the_calls_of_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(board, "_library", lambda: None)
    assert not semaphores_work()
    with pytest.raises(RuntimeError, match="no semaphores"):
        Semaphore(memory(), made=True)
