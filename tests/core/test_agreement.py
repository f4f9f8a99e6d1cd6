"""What the ranks did is held against the plan: here by the sums alone, without ranks that disagree."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.core.agreement import TakenClients, check_work, fingerprint

PLAN = Plan(3, 0.1, np.arange(4), np.ones(4), per_sample=True, normalise=True)


@pytest.mark.parametrize("trained", [2, 4])
def test_where_rows_are_drawn_those_who_got_some_are_all_trained(trained: int):
    sums = {"places": 4.0, "due": 3.0, "clients": 3.0, "fingerprint": 0.0, "diverged": 0.0}
    check_work(PLAN, sums, expected=None, visits_each=None)
    check_work(PLAN, sums | {"clients": 2.0, "diverged": 1.0}, expected=3, visits_each=None)
    with pytest.raises(RanksDisagree, match=f"3 participants have samples to train on, but {trained} were trained"):
        check_work(PLAN, sums | {"clients": trained}, expected=None, visits_each=None)


def taken(plan: Plan, *parts: list[int]) -> int:
    """What the fingerprints of ranks that took these participants add up to; the first of them is the server."""
    marks = [TakenClients.of(plan, np.array(part, np.int64), 0, rank == 0) for rank, part in enumerate(parts)]
    return sum(mark.fingerprint for mark in marks) % 2**40


@pytest.mark.parametrize("clients", [np.arange(9), np.array([2, 3, 4, 9, 11, 12, 40, 41, 10**12])])
def test_who_is_missing_or_trained_twice_shows_in_the_fingerprints_however_the_ranks_share_the_work(
    clients: np.ndarray,
):
    plan = Plan(5, 0.1, clients, np.ones(9), per_sample=0, normalise=True)
    for right in ([[], [0, 1, 2, 3], [4, 5, 6, 7, 8]], [[0, 8], [1, 3, 5, 7], [2, 4, 6]], [list(range(9))]):
        assert taken(plan, *right) == 0
    wrong = [
        [[], [0, 1, 2, 3], [5, 6, 7, 8]],
        [[], [0, 1, 2, 3, 4], [4, 5, 6, 7, 8]],
        [[], [0, 1, 2, 3], [3, 5, 6, 7, 8]],
        [[], [0, 0, 2, 3], [4, 5, 6, 7, 8]],
        [[], [1, 2, 3, 4], [4, 5, 6, 7, 8]],
        [[], []],
        [list(range(9)), list(range(9))],
    ]
    assert all(taken(plan, *parts) for parts in wrong)


def test_fingerprints_belong_to_rounds():
    assert fingerprint(1, np.arange(5)) != fingerprint(2, np.arange(5))
    assert fingerprint(1, np.arange(0)) == 0
