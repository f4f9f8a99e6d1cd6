"""What a round's sums tell beside the update."""

import numpy as np
import torch

from fedmpi.rounds.sum import RoundTotals


def test_the_seconds_of_a_phase_are_those_of_the_slowest_rank():
    busy, load = np.array([3.0, 9.0, 8.0]), np.array([1.0, 4.0, 0.5])
    totals = RoundTotals(torch.zeros(1), {"stop": 0.0}, busy, load, np.zeros(3), np.zeros(3), np.zeros(3))
    assert totals.phase_seconds() == {"load": 4.0, "train": 7.5}
