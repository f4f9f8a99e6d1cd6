"""A run killed by signal 9 at random moments leaves, once it was resumed, what an undisturbed one leaves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.kills import SYSTEMS, left_by, tortured, undisturbed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_twice_is_the_undisturbed_one(tmp_path: Path):
    system = SYSTEMS["all but SCAFFOLD"]
    whole = undisturbed(tmp_path / "WHOLE", system, ranks=2)
    assert tortured(tmp_path / "RUN", system, 2, kills=2, dice=random.Random(3))
    assert left_by(tmp_path / "RUN") == whole
