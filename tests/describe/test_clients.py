"""`fedmpi inspect RUN --clients`: what it says is in the table of the run, and its picture is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from typer.testing import CliRunner

from fedmpi import UserError
from fedmpi.cli import app
from fedmpi.describe.run import inspect_clients, rank_correlation
from fedmpi.records.tables import last_evaluation, read_clients
from tests.end_to_end.in_process import run_into

RUN = (
    *("preset=fedavg", "rounds=4", "clients.count=4", "model.hidden=[6]", "local.engine=sequential"),
    *("evaluation.clients=all", "evaluation.clients_every=2", "evaluation.fine_tune=1"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "RUN"
    assert run_into(folder, *RUN) == 0
    return folder


def test_it_reports_how_the_last_scores_spread_and_the_worst_clients(folder: Path, capsys: pytest.CaptureFixture[str]):
    found = CliRunner().invoke(app, ["inspect", str(folder), "--clients"], env={"COLUMNS": "160"})
    assert found.exit_code == 0, found.output
    last = last_evaluation(read_clients(folder))
    assert "20 clients after round 4 on their training rows; 2 evaluations" in " ".join(found.output.split())
    for score in ("accuracy", "tuned_accuracy"):
        for value in (last[score].mean(), last[score].std(), np.median(last[score]), np.sort(last[score])[:2].mean()):
            assert f"{value:.4f}" in found.output
    worst = int(last["client"][last["accuracy"].argmin()])
    listed = found.output[found.output.index("served worst") :]
    assert f" {worst} " in listed and f"{last['label_distance'][last['accuracy'].argmin()]:.4f}" in listed
    assert f"{spearmanr(last['accuracy'], last['training_samples']).statistic:.4f}" in found.output


def test_rank_correlation_is_spearmans_of_rows_that_are_known():
    generator = np.random.default_rng(0)
    one, other = generator.integers(0, 9, 60).astype(float), generator.integers(0, 9, 60).astype(float)
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    one[3], other[7] = np.nan, np.nan
    known = ~np.isnan(one + other)
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one[known], other[known]).statistic)
    assert np.isnan(rank_correlation(np.ones(4), np.arange(4.0)))


def test_its_picture_is_drawn(folder: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    inspect_clients(folder).plot(tmp_path / "clients.png")
    assert (tmp_path / "clients.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_clients_scores_is_rejected(folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="holds no run"):
        inspect_clients(tmp_path)
    assert run_into(tmp_path / "plain", "preset=fedavg", "rounds=1", "model.hidden=[6]") == 0
    with pytest.raises(UserError, match="has no table of clients. Run with --set evaluation.clients=all"):
        inspect_clients(tmp_path / "plain")
