"""A wait that is known to be long takes no core: asleep at once, and woken by what it waits for."""

from __future__ import annotations

import os

import pytest

from fedmpi.mpi.collectives import wait_until


@pytest.mark.parametrize(("long", "asked", "yields"), [(True, 1 + 4, 0), (False, 200 + 4, 1)])
def test_a_long_wait_sleeps_at_once(long: bool, asked: int, yields: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, yielded, slept = [], [], []
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(len(calls)))

    def arrived() -> bool:
        calls.append(len(slept))
        return bool(slept)

    assert wait_until(arrived, pause=slept.append, long=long)
    assert len(slept) == 1
    assert calls.count(0) >= asked and (calls.count(0) == asked) == long
    assert bool(yielded) == bool(yields)
