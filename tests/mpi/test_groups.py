"""Which groups have a communicator, and the thread that pushes what they send: without MPI."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.mpi import Cluster
from fedmpi.mpi.groups import PendingSends, Recent, progress_beside_work

A, B, C, D = (0, 1), (1, 2), (0, 2), (0, 1, 2)


def test_groups_used_longest_ago_are_freed_first() -> None:
    recent = Recent(3)
    assert recent.admit([A, B, C]) == ([], [A, B, C])
    assert recent.admit([A]) == ([], [])
    assert recent.admit([D]) == ([B], [D])
    assert recent.admit([B, D]) == ([C], [B])


def test_what_is_wanted_is_not_freed_and_the_first_without_get_what_room_there_is() -> None:
    recent = Recent(2)
    recent.admit([A, B])
    assert recent.admit([C, B, D, C]) == ([A], [C])
    assert B in recent and C in recent and D not in recent and A not in recent
    assert Recent(0).admit([A, B]) == ([], [])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.lists(st.lists(st.sampled_from([A, B, C, D, (2, 3), (1, 3), (0, 3)]), max_size=8)))
def test_never_more_than_allowed_and_freed_are_those_held(most: int, rounds: list[list[tuple[int, ...]]]) -> None:
    recent, held = Recent(most), set()
    for wanted in rounds:
        freed, made = recent.admit(wanted)
        assert set(freed) <= held - set(wanted) and set(made) <= set(wanted) - held
        held = held - set(freed) | set(made)
        assert len(held) == len(recent) <= most
        assert len(set(wanted) & held) == min(most, len(set(wanted))), "room is given to the groups of the round"
        assert all(ranks in recent for ranks in held)


@pytest.mark.parametrize("ranks", [(), (0, 0)])
def test_a_group_without_ranks_or_with_one_twice_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no group"):
        Cluster(None, "none").groups([ranks])


class Send:
    """A request of which MPI says that it is done after so many tests."""

    def __init__(self, tests: int):
        self.left, self.done = tests, threading.Event()

    def Test(self) -> bool:
        """One step."""
        assert not self.done.is_set(), "a request must not be tested after it was done"
        self.left -= 1
        if self.left <= 0:
            self.done.set()
        return self.done.is_set()


def pushing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fedmpi-sends"]


def test_pending_sends_get_on_beside_the_senders_work() -> None:
    pending, kept = PendingSends(lambda: None), np.empty(0, np.uint8)
    for _ in range(3):  # a thread that has ended is followed by another one
        first, second = Send(5), Send(20)
        pending.take([(first, kept)])  # type: ignore[list-item]
        pending.take([(second, kept)])  # type: ignore[list-item]
        assert first.done.wait(60) and second.done.wait(60)
        (thread,) = pushing_threads()
        pending.flush()
        thread.join(60)
        assert not thread.is_alive() and pending.push()


@pytest.mark.parametrize("tests", [1, 40])
def test_what_mpi_calls_sent_is_pushed_on_until_the_round_ends(tests: int) -> None:
    """The last bytes of a message that needs no further test may still wait for room in the connection."""
    pushed, send = threading.Semaphore(0), Send(tests)
    pending = PendingSends(pushed.release)
    pending.take([(send, np.empty(0, np.uint8))])  # type: ignore[list-item]
    for _ in range(10):
        assert pushed.acquire(timeout=60) and send.done.is_set()
    (thread,) = pushing_threads()
    pending.flush()
    thread.join(60)
    assert not thread.is_alive()
    while pushed.acquire(blocking=False):
        pass
    pending.flush()
    assert not pushing_threads() and not pushed.acquire(blocking=False), "nothing calls MPI between rounds"


@pytest.mark.parametrize("allowed", [True, False])
def test_mpi_is_called_beside_the_work_only_where_it_allows_that(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class World:
        def __init__(self) -> None:
            self.asked: list[int] = []

        def Get_rank(self) -> int:
            return 3

        def Iprobe(self, source: int) -> bool:
            """One step of whatever MPI has begun; nobody sends to themselves."""
            self.asked.append(source)
            return False

    monkeypatch.setattr("fedmpi.mpi.groups.calls_from_threads", lambda: allowed)
    world = World()
    progress = progress_beside_work(world)  # type: ignore[arg-type]
    assert progress_beside_work(None) is None and (progress is not None) == allowed
    if progress is not None:
        progress()
        assert world.asked == [3]
