"""Ranks on unlike nodes decide alike, and where they do not do one run's work the run ends with a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.mpi.launch import run_mpi

PROGRAM = ("-m", "tests.mpi.unlike_ranks")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CompletedProcess[str]]:
    """A job of three ranks that goes through all scenarios and is ended by `another_model`."""
    out = tmp_path_factory.mktemp("unlike") / "found.json"
    return out, run_mpi(3, [*PROGRAM, out, "another_model"])


@pytest.fixture(scope="module")
def found(ended: tuple[Path, CompletedProcess[str]]) -> dict[str, list[dict[str, Any]]]:
    """What the three ranks say of every scenario."""
    out, job = ended
    assert out.exists(), job.stderr
    return json.loads(out.read_text())


def the_same(said: list[dict[str, Any]]) -> dict[str, Any]:
    assert said[0] == said[1] == said[2]
    return said[0]


@pytest.mark.parametrize(
    "scenario, words",
    [
        ("another_opinion_of_the_server", "2 workers: each trains an equal part"),
    ],
)
def test_rank_0_decides_for_all_who_trains_what(scenario: str, words: str, found: dict):
    assert words in the_same(found[scenario])["layout"]


def test_runs_of_ranks_that_agree_are_as_ever(found: dict):
    assert "model" in the_same(found["alike"])


def test_the_node_with_the_fewest_gpus_decides_whether_the_server_trains(found: dict):
    assert the_same(found["unlike_numbers_of_gpus"])["decided"] == [True, False]


@pytest.mark.parametrize(
    "scenario, words",
    [
        ("coupling_found_by_one", "a sample's outputs depend on the other samples"),
        ("keeping_found_by_one", "the forward pass changes parameters"),
    ],
)
def test_what_one_rank_finds_out_about_the_model_counts_for_all(scenario: str, words: str, found: dict):
    assert f"nothing is merged: {words}" in the_same(found[scenario])["engine"]


def test_processors_and_gpus_in_one_job_are_refused(found: dict):
    refused = the_same(found["a_gpu_on_one"])
    assert refused["error"] == "UserError"
    assert "different kinds of devices (2 on cpu, 1 on cuda)" in refused["words"]
    assert 'cluster.device = "cpu"' in refused["words"]


@pytest.mark.parametrize(
    "scenario, words",
    [
        ("another_layout", r"round 0: 7 participants are planned, but the ranks took \d+ for theirs"),
        ("left_out", "round 0: 7 participants have samples to train on, but 6 were trained"),
        ("visited_once_too_often", r"round 0: 12 visits of mediators are planned, but there were 1[3-9]"),
    ],
)
def test_work_that_is_not_the_plans_ends_the_run_on_all_ranks(scenario: str, words: str, found: dict):
    ended = the_same(found[scenario])
    assert ended["error"] == "RanksDisagree"
    assert re.match(words, ended["words"]), ended["words"]


@pytest.mark.parametrize(
    "scenario, round, ranks",
    [
        ("another_model", 0, "[2]"),
        ("another_vector_of_the_server", 0, "[2]"),
    ],
)
def test_a_rank_whose_model_is_another_is_named_and_ends_the_run(scenario: str, round: int, ranks: str, found: dict):
    ended = the_same(found[scenario])
    assert ended["error"] == "RanksDisagree"
    assert f"different models after round {round}: not that of rank 0 have ranks {ranks}" in ended["words"]


def test_parts_of_ones_own_are_named_where_the_ranks_models_differ(found: dict):
    ended = the_same(found["a_part_of_ones_own_by_rank"])
    words = "does a part of your own (server optimizer tests.mpi.own_step:ByRank) give different results on different"
    assert ended["error"] == "RanksDisagree" and words in ended["words"]
    assert "part of your own" not in the_same(found["another_model"])["words"]


def test_more_ranks_than_sums_are_exact_for_are_refused(found: dict):
    refused = the_same(found["too_many"])
    assert refused["error"] == "UserError"
    assert "this job has 3 ranks, and sums over more than 2" in refused["words"]


def test_a_run_that_is_ended_says_so_once_and_exits_with_1(ended: tuple[Path, CompletedProcess[str]]):
    _, job = ended
    assert job.returncode == 1
    assert "error: the ranks hold different models after round 0" in job.stderr
    assert "Traceback" not in job.stderr
