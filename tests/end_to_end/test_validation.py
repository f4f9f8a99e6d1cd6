"""Training on shards with a validation part: evaluated parts, records, and rejected settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn.functional import cross_entropy

from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.data.opening import open_store
from fedmpi.tasks.evaluation import evaluate
from tests.data_prep.command import main
from tests.end_to_end.in_process import run, run_into

SETTINGS = ("preset=fedavg", "rounds=3", "clients.fraction=0.5", "local.lr=0.1")
SCORES = {"loss", "accuracy", "macro_f1"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, a fifth of every client's held out."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    words = f"digits --partition dirichlet --alpha 1 --clients 12 --val 0.2 --shards 3 --out {folder}"
    assert main(words.split()) == 0
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("on", "parts"), [("test", {"test"}), ("val", {"val"}), ("both", {"test", "val"}), ("auto", {"test", "val"})]
)
def test_records_report_the_scores_of_the_requested_parts(shards: Path, tmp_path: Path, on: str, parts: set[str]):
    settings = (*SETTINGS, f"data.source={shards}", f"evaluation.on={on}", "evaluation.every=2")
    assert run_into(tmp_path / "RUN", *settings) == 0
    evaluated = [{key for key in record if key.startswith(("test_", "val_"))} for record in records(tmp_path / "RUN")]
    assert evaluated == [set(), *[{f"{part}_{score}" for part in parts for score in SCORES}] * 2]


def test_validation_scores_are_those_of_the_samples_held_out(shards: Path, tmp_path: Path):
    settings = (*SETTINGS, f"data.source={shards}", "evaluation.on=both")
    done = run(*settings)
    flat = done.experiment.model
    flat.bind(done.model)
    part = open_store(shards).validation()
    assert part is not None
    x, y = (torch.from_numpy(array.copy()) for array in part)
    mean, std = done.experiment.data.description.mean[0], done.experiment.data.description.std[0]
    with torch.inference_mode():
        logits = flat.module.eval()((x.float() / 255 - mean) / std)
    assert run_into(tmp_path / "RUN", *settings) == 0
    last = records(tmp_path / "RUN")[-1]
    assert last["val_loss"] == pytest.approx(float(cross_entropy(logits, y.long())), rel=1e-4)
    assert last["val_accuracy"] == pytest.approx(float((logits.argmax(1) == y).float().mean()), abs=1e-6)
    assert last["val_macro_f1"] == pytest.approx(
        f1_score(y, logits.argmax(1), average="macro", zero_division=0.0), abs=1e-6
    )
    test_x, test_y = done.experiment.data.test()
    assert last["test_accuracy"] == pytest.approx(
        evaluate(flat.module, test_x, test_y, 2000).numbers["accuracy"], abs=1e-6
    )
    assert last["val_accuracy"] != last["test_accuracy"]


def test_the_summary_reports_the_round_that_validation_chose(shards: Path, tmp_path: Path):
    assert run_into(tmp_path / "RUN", *SETTINGS, f"data.source={shards}", "evaluation.on=both") == 0
    summary = json.loads((tmp_path / "RUN" / "summary.json").read_text())
    best = max(records(tmp_path / "RUN"), key=lambda record: record["val_accuracy"])
    assert summary["best_chosen_on"] == "val" and summary["best_round"] == best["round"]
    assert summary["best_val_accuracy"] == best["val_accuracy"]
    assert summary["best_test_accuracy"] == best["test_accuracy"]


@pytest.mark.parametrize("on", ["val", "both"])
def test_validation_that_the_data_lack_is_rejected(on: str):
    with pytest.raises(
        UserError, match=f'evaluation.on = "{on}" needs validation samples, but digits has none: .*--val'
    ):
        Experiment.connect(load_config(None, [*SETTINGS, f"evaluation.on={on}"]))
