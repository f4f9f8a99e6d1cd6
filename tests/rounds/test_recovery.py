"""What a run goes on from when a rank has died: here in one process, told of a death that was none.

The deaths themselves are in tests/mpi/test_deaths.py, with the MPI that survives them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from fedmpi.cluster import RankLost
from fedmpi.common.plan import Plan
from fedmpi.rounds import recovery
from fedmpi.rounds.loop import Simulation
from fedmpi.rounds.round_sum import RoundTotals
from tests.end_to_end.runs import TIMINGS

COMMON: dict[str, Any] = {
    "data.shards": "digits:clients=6",
    "participation.count": 4,
    "local.engine": "sequential",
    "local.batch_size": 40,
    "rounds": 6,
    "logging.tensorboard": False,
    "cluster.on_rank_failure": "shrink",
}
SCAFFOLD = {"local.algorithm": "scaffold"}
FEEDBACK = {"transport.kind": "topk", "transport.fraction": 0.1, "transport.error_feedback": True}
ADAM = {"aggregation.optimizer": "adam", "evaluation.every": 2}


@pytest.fixture(autouse=True)
def survivable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that survives a death: as if started by Open MPI's mpiexec --with-ft ulfm."""
    monkeypatch.setattr(recovery, "refuse_fatal_losses", lambda: None)


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds in which a rank "dies", each once: before the server's step in odd ones, after it in even ones."""
    rounds: list[int] = []
    step = Simulation._apply

    def apply(self: Simulation, plan: Plan, totals: RoundTotals) -> None:
        if plan.round % 2 == 0:
            step(self, plan, totals)
        if plan.round in rounds:
            rounds.remove(plan.round)
            raise RankLost
        if plan.round % 2:
            step(self, plan, totals)

    monkeypatch.setattr(Simulation, "_apply", apply)
    monkeypatch.setattr(recovery, "stop_everyone", lambda: None)
    monkeypatch.setattr(recovery, "shrink", lambda: [1])
    return rounds


def untimed(run: fedmpi.Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in run.records]


def values(run: fedmpi.Run) -> list[list[float]]:
    return [value.flatten().tolist() for value in run.model.state_dict().values()]


SYSTEMS = {
    "in memory": ADAM,
    "in a checkpoint": SCAFFOLD | {"checkpoint.every": 2},
    "nowhere": FEEDBACK | {"checkpoint.every": 0},
}


@cache
def without_deaths(name: str) -> fedmpi.Run:
    return fedmpi.run(COMMON | SYSTEMS[name])


@pytest.mark.parametrize(
    ("name", "kept", "folder"),
    [
        ("in memory", (3, 4), False),
        ("in a checkpoint", (2, 4), True),
        ("nowhere", (0, 0), True),
        pytest.param("in memory", (3, 4), True, marks=pytest.mark.slow),
        pytest.param("in a checkpoint", (2, 4), False, marks=pytest.mark.slow),
        pytest.param("nowhere", (0, 0), False, marks=pytest.mark.slow),
    ],
)
def test_rounds_done_again_leave_nothing(
    name: str, kept: tuple[int, int], folder: bool, dies: list[int], tmp_path: Path
):
    system, whole = SYSTEMS[name], without_deaths(name)
    dies += [3, 4]
    rounds: list[int] = []
    out = tmp_path / "RUN" if folder else None
    run = fedmpi.run(COMMON | system, out=out, on_round=lambda record: rounds.append(record["round"]))
    assert untimed(run) == untimed(whole) and values(run) == values(whole)
    kept = kept if folder or system is ADAM else (0, 0)
    assert [lost["resumed_at"] for lost in run.summary["lost_ranks"]] == list(kept)
    assert rounds == [*range(3), *range(kept[0], 4), *range(kept[1], 6)]
    assert out is None or "ended by" not in (out / "run.log").read_text()
    assert run.summary["samples_total"] == whole.summary["samples_total"]


def test_a_run_that_only_some_have_finished_goes_on_from_its_last_checkpoint(
    dies: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    answers = [True, False]
    monkeypatch.setattr(recovery, "all_done", lambda done: answers.pop())
    run = fedmpi.run(COMMON | {"checkpoint.every": 1}, out=tmp_path / "RUN")
    assert not answers and [lost["resumed_at"] for lost in run.summary["lost_ranks"]] == [6]
    assert [record["round"] for record in run.records] == [*range(6)]
    assert untimed(run) == untimed(fedmpi.run(COMMON | {"cluster.on_rank_failure": "end"}))


def test_a_run_without_deaths_is_the_same_and_tells_of_none(tmp_path: Path):
    survivable, plain = fedmpi.run(COMMON), fedmpi.run(COMMON | {"cluster.on_rank_failure": "end"})
    assert untimed(survivable) == untimed(plain) and "lost_ranks" not in survivable.summary
