"""A short run of the fuzzers; `python -m tests.fuzz` runs them as long as wished, see docs/dev/decisions.md."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import checkpoints, configurations, parts, places, raw, readers, runs, shards, texts
from tests.fuzz.guarded import Beside

pytestmark = pytest.mark.timeout(900)  # seconds, on a busy machine
EXAMPLES = {
    configurations: 15,
    shards: 12,
    checkpoints: 25,
    raw: 12,
    texts: 40,
    places: 8,
    runs: 3,
    parts: 5,
    readers: 20,
}


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__.rpartition(".")[2])
def test_any_input_is_refused_in_a_sentence_or_used_rightly(kind: ModuleType) -> None:
    with Beside(kind.attempt) as attempt:

        @settings(
            max_examples=EXAMPLES[kind],
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(kind.strategy())
        def try_one(case: object) -> None:
            attempt(case)

        try_one()
