"""fedmpi.run under mpiexec: every rank calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedmpi
from tests.mpi import api_ranks
from tests.mpi.launch import REPOSITORY, run_mpi

PROGRAM = REPOSITORY / "tests" / "mpi" / "api_ranks.py"
RANKS = 3
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of each of three ranks."""
    folder = tmp_path_factory.mktemp("api")
    job = run_mpi(RANKS, [PROGRAM, folder])
    assert job.returncode == 0, job.stderr
    assert (job.stdout, job.stderr) == ("", ""), "a run prints nothing"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_records_are_whole_on_rank_0_and_summary_and_model_everywhere(found: Found):
    for name in ("plain", "written", "ended", "arrays"):
        server, *workers = (ranks[name] for ranks in found)
        assert len(server["records"]) == (2 if name == "ended" else 3)
        for worker in workers:
            assert worker["records"] == []
            assert {**worker, "records": 0} == {**server, "records": 0}


def test_one_process_and_three_come_to_the_same(found: Found):
    for name, keys, data in (
        ("plain", api_ranks.KEYS, None),
        ("arrays", {**api_ranks.KEYS, "clients.count": 4}, api_ranks.arrays()),
    ):
        alone = api_ranks.facts_of(fedmpi.run("fedavg", keys, data=data))
        assert alone["model"] == found[0][name]["model"] and alone["final"] == found[0][name]["final"]
        for one, three in zip(alone["records"], found[0][name]["records"], strict=True):
            assert one["samples"] == three["samples"] and one["test_accuracy"] == three["test_accuracy"]


def test_a_folder_changes_nothing(found: Found):
    written, plain = found[0]["written"], found[0]["plain"]
    assert written["records"] == plain["records"] and written["model"] == plain["model"]
    assert {ranks["written"]["folder"] for ranks in found} == {written["folder"]} and Path(written["folder"]).is_dir()


def test_on_round_is_called_on_rank_0_and_ends_all_and_any_rank_can_stop_all(found: Found):
    assert [ranks["calls"] for ranks in found] == [[0, 1], [], []]
    assert {ranks["ended"]["ending"] for ranks in found} == {"ended"}
    assert found[0]["ended"]["records"] == found[0]["plain"]["records"][:2]
    assert {ranks["stopped"]["ending"] for ranks in found} == {"stopped"}
    assert found[0]["stopped"]["records"] == found[0]["plain"]["records"][:1]


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("failed", "in round 0: KeyError: 'a test fault'"),
        ("wrong", "unknown key local.lrr"),
        ("too many", "clients.count = 99, but the shards hold 7 clients"),
        ("nowhere", "the shard folder nowhere does not exist"),
        ("different arrays", "the ranks do not run the same: "),
        ("different networks", "the values of the model given (sha256)"),
    ],
)
def test_wrong_input_is_rejected_by_all_ranks_alike(found: Found, name: str, sentence: str):
    words = {ranks[name] for ranks in found}
    assert len(words) == 1 and sentence in words.pop()


def test_windows_are_freed_after_every_run(found: Found):
    for ranks in found:
        assert len(set(ranks["many"][1:])) == 1, ranks["many"]


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_job(tmp_path: Path):
    job = run_mpi(RANKS, [PROGRAM, tmp_path, "lone"])
    assert job.returncode != 0 and "ZeroDivisionError" in job.stderr and "rank 1 on " in job.stderr
