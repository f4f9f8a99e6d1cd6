"""What a run has cost up to each of its rounds, and up to the first that reached an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmpi.common.types import Floats
from fedmpi.records.history import LINKS, SCORES, Record

AXES = {
    "round": "round",
    "samples": "samples trained on",
    "megabytes": "megabytes on the simulated links",
    "seconds": "seconds",
    "virtual_seconds": "virtual seconds",
}
"""What a curve can be drawn against."""
LESS_IS_BETTER = (
    (
        "loss",
        "error",
        "perplexity",
        "mae",
        "rmse",
        "seconds",
        "gini",
        "divergence",
        "drift",
        "diverged",
        "clipped_fraction",
        "_std",
    ),
    ("kl_", "bytes", "stratum_spread", "client_loss_", "client_tuned_loss_"),
)
"""Ends and beginnings of keys of which less is better."""
MORE_IS_BETTER = ("client_use_effective", "sample_use_effective", "clients_used", "samples_used", "rank_balance")
EQUAL = 1e-12
"""Values that differ by less of the largest are equal but for rounding."""


def spent(records: Sequence[Record]) -> dict[str, Floats]:
    """What has been spent at the end of each round, float64 (rounds,) for each of `AXES`.

    Virtual seconds only where every record has them (`system.clock`).
    """
    megabytes = [sum(record.get(f"bytes_{link}") or 0 for link in LINKS) / 1e6 for record in records]
    found = {
        "round": np.array([record["round"] + 1 for record in records], np.float64),
        "samples": np.cumsum([record.get("samples") or 0 for record in records], dtype=np.float64),
        "megabytes": np.cumsum(megabytes, dtype=np.float64),
        "seconds": np.cumsum([record.get("seconds") or 0.0 for record in records], dtype=np.float64),
    }
    if records and all(record.get("virtual_seconds") is not None for record in records):
        found["virtual_seconds"] = np.cumsum([record["virtual_seconds"] for record in records], dtype=np.float64)
    return found


def judged(records: Sequence[Record]) -> str:
    """The key that judges a run: its accuracy on the test part, or on the validation part if only that is recorded; the
    loss on them of tasks without one."""
    keys = ("test_accuracy", "val_accuracy", "test_loss", "val_loss")
    return next((key for key in keys if any(key in record for record in records)), "val_accuracy")


def better(key: str) -> Literal["more", "less"] | None:
    """Which of two values of what a record tells is the better one; None where neither is, as of participants."""
    if key.endswith("_jain"):
        return "more"
    if key.endswith(LESS_IS_BETTER[0]) or key.startswith(LESS_IS_BETTER[1]) or "epsilon" in key:
        return "less"
    return "more" if key.startswith(SCORES) or key in MORE_IS_BETTER else None


def rises(key: str) -> bool:
    """Whether a target of it is come up to, and not down to."""
    return better(key) != "less"


def first_reached(records: Sequence[Record], target: float, key: str) -> int | None:
    """The index of the first record whose `key` has come up to `target` (a loss: down to it); None without one."""
    known = ((i, record[key]) for i, record in enumerate(records) if record.get(key) is not None)
    return next((i for i, value in known if (value >= target if rises(key) else value <= target)), None)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of `n` values; no deviation of fewer than two."""

    n: int
    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """That of some values; None of none."""
        if not len(values):
            return None
        mean, alike = float(np.mean(values)), np.ptp(values) <= EQUAL * np.max(np.abs(values))
        if len(values) < 2:
            return cls(len(values), mean, None)
        return cls(len(values), mean, 0.0 if alike else float(np.std(values, ddof=1)))


def to_target(runs: Sequence[Sequence[Record]], target: float, axis: str, key: str) -> Spread | None:
    """What the runs that reached an accuracy had spent at the end of the round that did."""
    firsts = [first_reached(records, target, key) for records in runs]
    return up_to([spent(records) for records in runs], firsts, axis)


def up_to(spending: Sequence[dict[str, Floats]], firsts: Sequence[int | None], axis: str) -> Spread | None:
    """As `to_target`, of what each run had spent (`spent`) at the end of one of its rounds (`first_reached`)."""
    return Spread.of([float(x[axis][i]) for x, i in zip(spending, firsts, strict=True) if i is not None and axis in x])
