"""What the ranks did is held against the plan: here by the sums alone, without ranks that disagree.

What a round's sums tell beside the update.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmpi.common.errors import RanksDisagree
from fedmpi.common.plan import Plan
from fedmpi.core.reduce import RankWork, RoundSum, RoundTotals, check_work
from fedmpi.mpi import Cluster

PLAN = Plan(3, 0.1, np.arange(4), np.ones(4), per_sample=True, normalize=True)


@pytest.mark.parametrize("trained", [2, 4])
def test_where_rows_are_drawn_those_who_got_some_are_all_trained(trained: int):
    sums = {"places": 4.0, "due": 3.0, "clients": 3.0, "diverged": 0.0}
    check_work(PLAN, sums, expected=None, visits_each=None)
    check_work(PLAN, sums | {"clients": 2.0, "diverged": 1.0}, expected=3, visits_each=None)
    with pytest.raises(RanksDisagree, match=f"3 participants have samples to train on, but {trained} were trained"):
        check_work(PLAN, sums | {"clients": trained}, expected=None, visits_each=None)


def test_the_seconds_of_a_phase_are_those_of_the_slowest_rank():
    busy, load = np.array([3.0, 9.0, 8.0]), np.array([1.0, 4.0, 0.5])
    totals = RoundTotals(torch.zeros(1), {"stop": 0.0}, busy, load, np.zeros(3), np.zeros(3), np.zeros(3))
    assert totals.phase_seconds() == {"load": 4.0, "train": 7.5}


def test_vectors_of_an_algorithm_are_its_own_and_outlast_the_next_sum():
    cluster = Cluster.connect()
    summed, kept = RoundSum(cluster, torch.zeros(4), exact=False, vectors=("c",)), []
    for t in (1.0, 2.0):
        summed.open(Plan(0, 0.1, np.arange(0), np.zeros(0), 0, False), torch.zeros(4))
        summed.updates.add(torch.full((4,), t), 1.0)
        summed.further["c"].add(torch.full((4,), 10 * t), 1.0)
        summed.close(RankWork(), 0.0, False)
        totals = summed.reduce()
        assert totals.update.tolist() == [t] * 4
        kept.append(totals.further["c"])
    kept[1].mul_(3)
    assert kept[0].tolist() == [10.0] * 4 and kept[1].tolist() == [60.0] * 4
    summed.release()
    cluster.close()
