"""Output and files of a run on two ranks; its own configuration repeats it in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedmpi
from tests.end_to_end.runs import RICH, ROUNDS, SECONDS, TRAIN, Done, assert_same_curve_to_rounding, curve, records
from tests.mpi.launch import run_mpi

pytestmark = pytest.mark.timeout(600)  # seconds, with its fixtures, on a busy machine
ALWAYS = {
    "round", "seconds", "train_loss", "test_loss", "test_accuracy", "test_macro_f1", "lr", "participants", "samples",
    "steps", "bytes_client_up", "bytes_client_down", "phase_seconds",
}  # fmt: skip
OF_THIS_RUN = {
    "size_estimate", "size_true", "sampling_probability", "clipped_fraction", "strata", "allocation", "virtual_seconds",
}  # fmt: skip
PHASES = {"plan", "load", "train", "reduce", "apply", "evaluate"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished run of rich.toml on two ranks."""
    folder = tmp_path_factory.mktemp("rich") / "RUN"
    job = run_mpi(2, [*TRAIN, RICH, "--out", folder], timeout=SECONDS)
    assert job.returncode == 0, job.stderr
    return Done(folder, job)


def test_the_folder_holds_what_the_manual_lists(run: Done):
    names = {path.name for path in run.folder.iterdir()}
    events = {name for name in names if name.startswith("events.out.tfevents.")}
    assert names - events == {
        "config.toml", "metrics.jsonl", "summary.json", "model.safetensors", "model-best.safetensors", "checkpoints",
        "run.log", "plugins", "confusion.csv",
    }  # fmt: skip
    assert len(events) == 1


def test_a_record_has_all_keys_that_apply(run: Done):
    for record in records(run.folder):
        assert record.keys() >= ALWAYS | OF_THIS_RUN
        assert record["phase_seconds"].keys() == PHASES
        assert not {"kl_mean", "bytes_mediator_up"} & record.keys()


def test_the_summary_reports_final_and_best_scores_and_where_it_ran(run: Done):
    summary, recorded = json.loads((run.folder / "summary.json").read_text()), records(run.folder)
    best = max(recorded, key=lambda record: record["test_accuracy"])
    assert summary["final"]["test_loss"] == recorded[-1]["test_loss"]
    assert (summary["best_test_accuracy"], summary["best_round"]) == (best["test_accuracy"], best["round"])
    assert summary["bytes_total"] == sum(r["bytes_client_up"] + r["bytes_client_down"] for r in recorded)
    assert (summary["ranks"], summary["clients"]) == (2, 30)
    assert summary["parameters"] == 64 * 16 + 16 + 16 * 10 + 10
    assert summary["wall_seconds"] > 0
    assert summary["versions"].keys() >= {"fedmpi", "python", "torch", "numpy", "mpi"}
    assert "git_commit" in summary


def test_the_newest_checkpoints_are_kept(run: Done):
    kept = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert kept == ["round-00000010.safetensors", f"round-{ROUNDS:08d}.safetensors"]


def test_the_log_names_versions_ranks_and_the_engine_with_its_reason(run: Done):
    log = (run.folder / "run.log").read_text()
    assert "2 ranks on 1 node" in log and "fedmpi" in log and "torch" in log
    assert "sequential (server.exact: the rounding of a stack depends on its clients)" in log
    assert "strata: " in log


def test_the_configuration_of_a_run_repeats_it_in_one_process(run: Done, tmp_path: Path):
    fedmpi.run(run.folder / "config.toml", out=tmp_path / "RUN")
    assert (tmp_path / "RUN" / "config.toml").read_bytes() == (run.folder / "config.toml").read_bytes()
    assert_same_curve_to_rounding(curve(run.folder), curve(tmp_path / "RUN"))
