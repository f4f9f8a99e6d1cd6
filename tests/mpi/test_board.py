"""Ranks of a node meet at a board in the memory that they share, sleep there, and are woken by the last one."""

from __future__ import annotations

import os
import re
import time
from functools import cache

import numpy as np
import pytest

from fedmpi.cluster import semaphore
from fedmpi.cluster.board import board_of
from fedmpi.cluster.semaphore import BYTES, Semaphore, semaphores_work
from tests.mpi.launch import run_mpi

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not semaphores_work(), reason="no semaphores here"),
]

PROGRAM = ("-m", "tests.mpi.boards")
PLAIN = (
    "preset=fedavg rounds=6 participation.count=7 logging.tensorboard=false local.engine=sequential evaluation.every=2"
)


def passed(n: int, *words: str) -> str:
    job = run_mpi(n, [*PROGRAM, *words])
    assert job.returncode == 0 and job.stdout.count(f"passed {words[0]}\n") == n, job.stdout + job.stderr
    return job.stdout


@pytest.mark.parametrize(
    "program",
    [
        "woken",
        "progress",
        "signals",
        "many_meetings 400",
        "server_away",
        "large_broadcasts",
        "announced",
        "without semaphores",
        pytest.param("without room", marks=pytest.mark.slow),
        pytest.param("without memory", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_node(program: str):
    passed(3, *program.split())


@pytest.mark.slow
def test_two_ranks_meet_as_well():
    passed(2, "many_meetings", "400")


def counted(settings: str) -> tuple[int, int]:
    """Plans announced and broadcasts of a run on three ranks, which all count alike."""
    output = passed(3, "rounds", *PLAIN.split(), *settings.split())
    found = re.findall(r"^rank \d: (\d+) ahead, (\d+) broadcasts$", output, re.MULTILINE)
    assert len(found) == 3 and len(set(found)) == 1, output
    return int(found[0][0]), int(found[0][1])


@cache
def broadcasts_without_announcements() -> int:
    return counted("server.trains=always")[1]


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ("server.trains=never", 5),
        pytest.param("server.trains=always", 0, marks=pytest.mark.slow),
        ("server.trains=never topology.placement=shared topology.balance=measured", 0),
        pytest.param("server.trains=never topology.placement=owner", 5, marks=pytest.mark.slow),
    ],
)
def test_plans_that_nothing_can_change_are_announced(settings: str, ahead: int):
    """All but the first round's; the others are broadcast, one a round."""
    announced, broadcasts = counted(settings)
    assert announced == ahead
    assert broadcasts == broadcasts_without_announcements() - ahead


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
    monkeypatch.setattr(semaphore, "_library", lambda: None)
    assert not semaphores_work()
    with pytest.raises(RuntimeError, match="no semaphores"):
        Semaphore(memory(), made=True)


def test_a_job_that_outlives_its_ranks_waits_in_mpi(monkeypatch: pytest.MonkeyPatch):
    from fedmpi.cluster import board

    asked = []
    monkeypatch.setattr(board, "why_fatal", lambda *_: None)
    monkeypatch.setattr(board, "_everywhere", lambda world, own: asked.append(own))
    assert board_of(None, None, lacking=False) is None  # type: ignore[arg-type]
    assert asked == [False]
