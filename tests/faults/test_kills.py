"""A run killed by signal 9 at random moments leaves, once it was resumed, what an undisturbed one leaves.

Fifty kills of three systems: `python -m tests.faults.kills --runs 50`; here one system with all their kinds of state
but SCAFFOLD's.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.kills import ALL_AT_ONCE, Report, left_by, tortured, undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_twice_is_the_undisturbed_one(tmp_path: Path):
    report = Report()
    whole = undisturbed(tmp_path / "WHOLE", ALL_AT_ONCE, ranks=2)
    tortured(tmp_path / "RUN", ALL_AT_ONCE, 2, kills=2, dice=random.Random(3), report=report)
    assert not report.wrong and report.kills.total() > 0, report
    assert left_by(tmp_path / "RUN") == whole
