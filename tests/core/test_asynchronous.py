"""Asynchronous rounds: equal speeds are FedAvg, samplers see who is busy.

tests/reference compares runs with the papers' algorithms, and on several ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import Cohort, ComponentFailure, UserError, client_sampler
from fedmpi.clients.events import EventQueue
from fedmpi.core import asynchronous
from tests.end_to_end.runs import TIMINGS

SMALL: dict[str, Any] = {
    "data.source": "digits:clients=14,alpha=0.5",
    "model.hidden": [6],
    "cluster.threads": 1,
    "logging.tensorboard": False,
    "logging.participants": True,
    "checkpoint.every": 0,
    "evaluation.every": 100,
    "rounds": 5,
}
COUNTING: dict[str, Any] = {"model": "tests.reference.networks:cumulative_norm", "local.batch_size": 20}
FLYING: dict[str, Any] = {"topology": "async", "topology.in_flight": 6, "topology.buffer": 3}


@pytest.mark.parametrize("average", ["updates", "models"])
@pytest.mark.parametrize(
    "local",
    [
        {},
        {"local.batch_size": "all"},
        {"clients.sampler": "weighted", "server.weights": "uniform"},
        COUNTING | {"local.drop_last": True},
        COUNTING | {"local.drop_last": True, "model.dtype": "float64"},
    ],
    ids=["steps", "merged", "drawn twice", "counted batches", "float64"],
)
def test_clients_of_equal_speed_and_a_full_buffer_are_federated_averaging(average: str, local: dict[str, Any]):
    viewed = {"evaluation.clients": "all", "evaluation.clients_every": 5, "devices.power": True}
    same = {"devices.speed.median": 1e30, "server.optimizer": "momentum", **SMALL, **viewed, **local}  # equal times
    star = fedmpi.run({**same, "clients.count": 6})
    flying = fedmpi.run({**same, **FLYING, "topology.buffer": 6, "topology.average": average})
    found = flying.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in star.model.state_dict().items())
    assert {name: column.tolist() for name, column in star.clients.items()} == {
        name: column.tolist() for name, column in flying.clients.items()
    }
    assert {"bytes", "joules"} <= {*star.clients}
    for one, other in zip(star.records, flying.records, strict=True):
        assert other["virtual_seconds"] == pytest.approx(one["virtual_seconds"], rel=1e-12)
        assert other["staleness_max"] == 0
        assert all(other[key] == value for key, value in one.items() if key not in (*TIMINGS, "virtual_seconds"))


def test_a_step_counts_as_many_batches_as_its_largest_update_or_the_model_before():
    stale = {"devices.speed": "lognormal", "topology.buffer": 1, "local.steps": 3, "rounds": 20}
    run = fedmpi.run({**SMALL, **FLYING, **COUNTING, **stale})
    counted, events = [0], run.events
    for version in events["version"][events["event"] == "arrival"].tolist():
        counted.append(max(counted[-1], counted[version] + 3))
    assert run.model.layers[1].num_batches_tracked == counted[-1] < 3 * 20


def test_a_sampler_fills_free_places_and_sees_who_is_busy():
    seen, known = [], list[Any]()

    @client_sampler(needs=("history", "seconds"))
    def lowest(view: Any) -> Cohort:
        assert not np.isin(view.busy, view.available).any()
        known[:] = [view.history, view.last("seconds")]
        seen.append((view.round, view.count, view.busy.tolist()))
        return Cohort(view.available[: view.count])

    run = fedmpi.run({**SMALL, **FLYING, "clients.sampler": lowest, "devices.speed": "lognormal"})
    assert seen[0] == (0, 6, []) and {count for _, count, _ in seen[1:]} == {1}
    assert all(count + len(busy) == 6 for _, count, busy in seen)
    assert len(seen) == 1 + sum(record["asked"] for record in run.records) - 6
    assert [record["in_flight"] for record in run.records] == [5] * 5
    history, seconds = known
    expected, started = np.full(14, np.nan), {}
    for past in history:
        rows = run.events["round"] == past.round
        events = [*zip(*(run.events[name][rows].tolist() for name in ("event", "client", "seconds")), strict=True)]
        assert past.selected.tolist() == sorted({client for event, client, _ in events if event == "start"})
        assert past.arrived.tolist() == sorted({client for event, client, _ in events if event == "arrival"})
        for event, client, clock in events:
            if event == "start":
                started[client] = clock
            else:
                expected[client] = clock - started[client]
    assert len(history) == 4 and seconds == pytest.approx(expected, rel=1e-9, nan_ok=True)


def test_a_client_that_is_drawn_twice_takes_two_places():
    counts = []

    def twice(view: Any) -> Cohort:
        counts.append((view.count, len(view.busy)))
        return Cohort(np.repeat(view.available[: max(1, view.count // 2)], min(2, view.count)))

    fedmpi.run({**SMALL, **FLYING, "clients.sampler": twice, "devices.speed": "lognormal"})
    assert counts[0] == (6, 0) and set(counts[1:]) == {(2, 2)}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"topology.staleness": lambda staleness: -1}, r"returned -1 for staleness 0\. Return a finite number from 0"),
        ({"topology.staleness": lambda staleness: None}, "returned None for staleness 0"),
        ({"clients.sampler": lambda view: Cohort(view.available)}, "14 clients for view.count = 6 free places"),
    ],
)
def test_what_a_component_returns_is_checked(wrong: dict[str, Any], sentence: str):
    with pytest.raises(ComponentFailure, match=sentence):
        fedmpi.run({**SMALL, **FLYING, "devices": True, **wrong})


def test_more_places_than_clients_are_rejected():
    with pytest.raises(UserError, match=r"topology\.in_flight = 64, but the data hold 14 clients. Choose 1 to 14"):
        fedmpi.run({**SMALL, "topology": "async", "devices": True})


def test_clients_start_while_they_are_available_and_are_lost_when_they_leave(tmp_path: Path):
    rows = [(k, start, start + length) for k in range(14) for start, length in ((0.02 * (k % 3), 0.1), (5.0 + k, 0.08))]
    (tmp_path / "intervals.csv").write_text("client,start,end\n" + "".join(f"{k},{a},{b}\n" for k, a, b in rows))
    there = {"clients.availability": "intervals", "clients.availability.file": str(tmp_path / "intervals.csv")}
    run = fedmpi.run({**SMALL, **FLYING, **there, "devices.speed": "lognormal", "topology.in_flight": 9, "rounds": 9})
    columns = (run.events[name].tolist() for name in ("seconds", "event", "client"))
    started, seen = {}, set()
    for seconds, event, client in zip(*columns, strict=True):
        seen.add(event)
        if event == "start":
            [started[client]] = [(a, b) for k, a, b in rows if k == client and a <= seconds < b]
        else:
            end = started.pop(client)[1]
            assert seconds <= end + 1e-9 and (event != "lost" or seconds == pytest.approx(end, abs=1e-9))
    assert seen == {"start", "arrival", "lost"} and seconds > 5
    waiting = run.events["seconds"][5:9]  # five clients are available from the start, further ones after 0.02 s
    assert waiting == pytest.approx([0.02] * 4, abs=1e-9) and run.events["event"][:9].tolist() == ["start"] * 9


def test_a_run_ends_if_all_clients_leave_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asynchronous, "MOST_LOST", 50)
    (tmp_path / "short.csv").write_text("client,start,end,period\n0,0,0.001,1\n")
    there = {"clients.availability": "intervals", "clients.availability.file": str(tmp_path / "short.csv")}
    with pytest.raises(UserError, match="round 0: the last 50 updates were lost"):
        fedmpi.run({**SMALL, **FLYING, **there, "devices": True})
    mostly = {"clients.failure_rate": 0.6, "devices": True, "topology.buffer": 60, "rounds": 1}
    assert fedmpi.run({**SMALL, **FLYING, **mostly}).records[0]["asked"] > 110  # more than 50 are lost, not in a row


def test_an_update_that_arrives_as_a_period_ends_enters_its_step():
    same = {**SMALL, "devices.speed.median": 1e30, "rounds": 1}  # bytes take equal time
    seconds = fedmpi.run({**same, "clients.count": 6}).records[0]["virtual_seconds"]
    run = fedmpi.run({**same, **FLYING, "topology.buffer": None, "topology.period": seconds})
    assert run.records[0]["participants"] == 6


def test_a_queue_resumes_with_its_clock_starts_and_count():
    queue, other = EventQueue(), EventQueue()
    queue.start(3, Cohort([2, 5, 7]), np.array([0.5, 0.25, 0.75]), np.array([False, False, True]))
    queue.pop()
    queue.close_step(3)
    other.load(queue.state())
    assert (other.clock, other.started, sorted(other._heap)) == (0.25, 3, sorted(queue._heap))
    assert [start.client for start in other.flying()] == [2] and other.busy.tolist() == [2, 7]
    other.start(4, Cohort([1, 4]), np.array([0.25, 0.5]), np.array([False, False]))  # client 1 arrives with 2
    assert [other.pop().client for _ in range(4)] == [2, 1, 7, 4]


def test_numbers_of_a_draw_are_in_the_record_of_its_step_only():
    seen = []

    def numbered(view: Any) -> Cohort:
        seen.append(view.round)
        return Cohort(view.available[: view.count], numbers={"turn": float(len(seen))})

    short = {"topology.buffer": None, "topology.period": 0.02, "devices": True, "clients.sampler": numbered}
    records = fedmpi.run({**SMALL, **FLYING, **short, "rounds": 12}).records
    assert {one["round"] for one in records if "sampler_turn" in one} == {*seen} < {*range(12)}


def test_a_server_without_available_clients_steps_on_and_waits():
    nobody = {"clients.availability": "bernoulli", "clients.availability.probability": 1e-9, "devices": True}
    run = fedmpi.run({**SMALL, **FLYING, **nobody, "topology.buffer": None, "topology.period": 2.0})
    assert [(one["participants"], one["virtual_seconds"]) for one in run.records] == [(0, 2.0)] * 5
    assert fedmpi.run({**SMALL, **FLYING, **nobody}).records[-1]["virtual_seconds"] == 0
