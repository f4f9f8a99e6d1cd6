"""The past that samplers see is that of the records. tests/reference compares ranks and resumptions."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import Cohort, client_sampler
from fedmpi.records.history import clients_from_text

KEPT = ("update_sketch", "head_update", "update_norm", "loss_rms")


@client_sampler(needs=("history", *KEPT), measures=("update_sketch", "loss"))
class Historian:
    """Record a digest of all that it sees, and draw by the sketches."""

    def candidates(self, view: Any) -> np.ndarray:
        return np.sort(view.generator.choice(view.available, 5, replace=False))

    def draw(self, view: Any) -> Cohort:
        seen = [(one.round, one.selected.tolist(), one.arrived.tolist(), one.seconds) for one in view.history]
        scores = [one.metrics.get("test_accuracy") for one in view.history]
        digest = zlib.crc32(repr((seen, scores, view.clock)).encode())
        for values in (*map(view.last, KEPT), view.fresh("update_sketch"), view.fresh("loss")):
            digest = zlib.crc32(values.tobytes(), digest)
        length = np.nan_to_num(np.linalg.norm(view.fresh("update_sketch"), axis=1))
        return Cohort(np.sort(np.argsort(-length)[:3]), numbers={"digest": digest, "past": len(seen)})


@pytest.mark.parametrize("listens", [False, True])
def test_the_history_is_that_of_the_records_of_the_rounds_so_far(listens: bool) -> None:
    views: list[tuple[Any, float]] = []

    @client_sampler(needs=("history",))
    def noting(view: Any) -> Cohort:
        views.append((view.history, view.clock))
        return Cohort(np.sort(view.generator.choice(view.available, view.count, replace=False)))

    settings = {"rounds": 5, "clients.count": 4, "clients.sampler": noting, "clients.failure_rate": 0.3}
    more = {"devices": True, "evaluation.every": 2, "logging.participants": True, "logging.tensorboard": False}
    said = {"on_round": lambda record: False} if listens else {}
    records = fedmpi.run("fedavg", {**settings, **more}, data="digits:clients=9", **said).records
    assert len(views) == 5
    for t, (past, clock) in enumerate(views):
        assert [one.round for one in past] == list(range(t))
        assert clock == pytest.approx(sum(record["virtual_seconds"] for record in records[:t]), rel=1e-12)
        for one, record in zip(past, records, strict=False):
            np.testing.assert_array_equal(one.arrived, clients_from_text(record["clients"]))
            assert len(one.selected) == record["asked"] == 4 and np.isin(one.arrived, one.selected).all()
            assert not one.selected.flags.writeable
            assert (one.metrics["train_loss"], one.seconds) == (record["train_loss"], record["virtual_seconds"])
            assert one.metrics.get("test_accuracy") == record.get("test_accuracy")
            assert ("test_accuracy" in one.metrics) == (one.round % 2 == 1) and "seconds" not in one.metrics
