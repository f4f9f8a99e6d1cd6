"""What the ranks did is held against the plan: here by the sums alone, without ranks that disagree."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.rounds.agreement import check_work

PLAN = Plan(3, 0.1, np.arange(4), np.ones(4), per_sample=True, normalise=True)


@pytest.mark.parametrize("trained", [2, 4])
def test_where_rows_are_drawn_those_who_got_some_are_all_trained(trained: int):
    sums = {"places": 4.0, "due": 3.0, "clients": 3.0, "fingerprint": 0.0, "diverged": 0.0}
    check_work(PLAN, sums, expected=None, visits_each=None)
    check_work(PLAN, sums | {"clients": 2.0, "diverged": 1.0}, expected=3, visits_each=None)
    with pytest.raises(RanksDisagree, match=f"3 participants have samples to train on, but {trained} were trained"):
        check_work(PLAN, sums | {"clients": trained}, expected=None, visits_each=None)
