"""Fuzz for as long as wished: `python -m tests.fuzz 3000` tries so many inputs of each kind and counts what came of
them; `python -m tests.fuzz 3000 shards raw` only those kinds. Exit code 1 where there is a finding.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.guarded import Beside
from tests.fuzz.verdict import Finding

KINDS = ("configurations", "shards", "checkpoints", "raw", "runs", "texts", "places", "parts", "readers")
AT_ONCE = 250
"""Inputs of one seed, after which what was counted is told."""


def run(kind: str, examples: int) -> int:
    """Try inputs of a kind; tells the counts, and every new finding. Returns the number of findings."""
    module = importlib.import_module(f"tests.fuzz.{kind}")
    counts: Counter[str] = Counter()
    already_shown: set[str] = set()
    with Beside(module.attempt) as attempt:
        for number in range(0, examples, AT_ONCE):

            @seed(number + int(time.time()))
            @settings(
                max_examples=min(AT_ONCE, examples - number),
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            @given(module.strategy())
            def try_one(case: object) -> None:
                try:
                    counts[attempt(case)] += 1
                except Finding as finding:
                    counts["FINDING"] += 1
                    last = str(finding).strip().splitlines()[-1]
                    if last not in already_shown:
                        already_shown.add(last)
                        print(f"{kind}: {case!r}"[:500], str(finding)[-1500:], sep="\n", flush=True)

            try_one()
            print(kind, counts.total(), dict(counts), flush=True)
    return counts["FINDING"]


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    wanted = sys.argv[2:] or list(KINDS)
    sys.exit(1 if sum([run(kind, int(sys.argv[1])) for kind in wanted]) else 0)
