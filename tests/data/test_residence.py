"""How much data stays in memory: the decision, with figures of devices that are not here."""

from __future__ import annotations

from fedmpi.data.source import RESIDENT_BYTES, Residence, resident_budget

GIB = 1 << 30


def test_a_gpu_keeps_half_of_what_is_free_and_the_host_a_fixed_amount() -> None:
    assert resident_budget(None) == RESIDENT_BYTES == GIB
    assert resident_budget(80 * GIB) == 40 * GIB
    assert resident_budget(0) == 0


def test_data_stays_until_the_budget_is_spent_and_smaller_pieces_still_fit() -> None:
    residence = Residence(100)
    assert [residence.takes(size) for size in (60, 50, 40, 1, 0)] == [True, False, True, False, True]


def test_ranks_that_share_a_gpu_leave_half_of_it_free_together() -> None:
    """Four of 1000 bytes in steps of ten: each could keep 500 by itself, but what the others keep is seen."""
    used = 0

    def free() -> int:
        return 1000 - used

    ranks = [Residence(resident_budget(free()), free) for _ in range(4)]
    kept = [0] * 4
    for _ in range(100):
        for rank, residence in enumerate(ranks):
            used += 10  # the piece lies on the device when it is asked for
            if residence.takes(10):
                kept[rank] += 10
            else:
                used -= 10
    assert sum(kept) == 500
    assert max(kept) - min(kept) <= 10


def test_memory_that_another_program_takes_is_not_used() -> None:
    free = 1000
    residence = Residence(resident_budget(free), lambda: free)
    assert residence.takes(10)
    free = 499
    assert not residence.takes(10)
    free = 600
    assert residence.takes(10)
