"""Differences beyond rounding between a run of the program and the plain loop's replay of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from fedmpi import Config
from tests.reference.plain_data import Round
from tests.reference.plain_loop import PlainLoop
from tests.reference.plain_relays import PlainRelays

MODEL = 1e-5
"""Largest ‖w − w_ref‖/‖w_ref‖ after a round: the program computes in float32."""
CHANGE = 5e-3
"""Largest ‖w − w_ref‖ as a share of how far the run has moved the model."""
OF_THE_MODEL = {
    "train_loss": 1e-5,
    "test_loss": 1e-5,
    "update_norm": 2e-3,
    "gradient_diversity": 5e-3,
    "client_drift": 5e-3,
}
"""Relative error of what is computed from models; everything else is arithmetic on float64."""
SPREADS = 1e-5
TWO_IMAGES = 2 / 355
OF_LOSSES = 2e-6
CANCELED = {"client_drift": 1e-8}
"""Absolute error of a difference of two sums, which is 0 for a single client."""


def differences(config: Config, trace: dict[str, np.ndarray]) -> list[str]:
    """Return all differences, in words; empty where program and plain loop agree."""
    loop = PlainLoop(config)
    if config.topology.name == "mediators":
        loop = PlainRelays(config)
        loop.groups = _by_round(trace["groups"])
    start, rounds = loop.w.copy(), loop.run()
    return [text for t, expected in enumerate(rounds) for text in _of_round(t, expected, start, trace)]


def _by_round(marked: np.ndarray) -> list[np.ndarray]:
    """One array per round; a negative number marks the start of each."""
    return [part[1:] for part in np.split(marked, np.flatnonzero(marked < 0)[1:])]


def _of_round(t: int, expected: Round, start: np.ndarray, trace: dict[str, np.ndarray]) -> Iterator[str]:
    cohort = _by_round(trace["cohorts"])[t].tolist()
    if cohort != expected.clients:
        yield f"round {t}: participants {cohort}, expected {expected.clients}"
        return
    rows: dict[int, list[int]] = {}
    for _, k, row in trace["rows"][trace["rows"][:, 0] == t].tolist():
        rows.setdefault(k, []).append(row)
    if rows != expected.rows:
        wrong = {k for k in rows.keys() | expected.rows.keys() if rows.get(k) != expected.rows.get(k)}
        yield f"round {t}: other rows for clients {sorted(wrong)}"
    factors = {int(k): c for _, k, c in trace["factors"][trace["factors"][:, 0] == t].tolist()}
    divisor = sum(factors.values()) if trace["normalized"][t] and factors else 1.0
    for k in sorted(factors.keys() | expected.shares.keys()):
        share, wanted = factors.get(k, 0.0) / divisor, expected.shares.get(k, 0.0)
        if abs(share - wanted) > 2e-7 * abs(wanted) + 1e-11:
            yield f"round {t}: client {k} counts {share}, expected {wanted}"
    model = trace["models"][t].astype(np.float64)
    error = np.linalg.norm(model - expected.model)
    if not error <= MODEL * np.linalg.norm(expected.model):
        yield f"round {t}: models differ by {error / np.linalg.norm(expected.model):.2g} of the model"
    elif not error <= CHANGE * np.linalg.norm(expected.model - start) + 1e-7 * np.linalg.norm(expected.model):
        yield f"round {t}: models differ by {error / np.linalg.norm(expected.model - start):.2g} of the change"
    record = json.loads(str(trace["records"]).splitlines()[t])
    for key, wanted in expected.record.items():
        if not same(key, record.get(key), wanted):
            yield f"round {t}: {key} = {record.get(key)}, expected {wanted}"


def same(key: str, found: Any, wanted: Any) -> bool:
    """Return True if a number of the record is the expected one, up to rounding."""
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(same(key, a, b) for a, b in zip(found, wanted, strict=True))
    if wanted is None or found is None:
        return found is wanted
    if isinstance(wanted, bool | int):
        return bool(found == wanted)
    slack = {"test_accuracy": TWO_IMAGES, "test_macro_f1": TWO_IMAGES, "gamma": OF_LOSSES, **CANCELED}.get(key, 1e-12)
    if key.startswith(("inclusion_", "stratum_spreads")):
        return abs(found - wanted) <= SPREADS * abs(wanted)
    return abs(found - wanted) <= OF_THE_MODEL.get(key, 1e-9) * abs(wanted) + slack
