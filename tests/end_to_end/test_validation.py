"""Training on shards with a validation part: evaluated parts, records, and rejected settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn.functional import cross_entropy

from fedmpi import UserError
from fedmpi.data.opening import open_store
from tests.data_prep.command import main
from tests.end_to_end.in_process import run

SETTINGS = ("preset=fedavg", "rounds=3", "clients.fraction=0.5", "local.lr=0.1")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits, a fifth of every client's held out."""
    folder = tmp_path_factory.mktemp("shards") / "digits"
    words = f"digits --partition dirichlet --alpha 1 --clients 12 --val 0.2 --shards 3 --out {folder}"
    assert main(words.split()) == 0
    return folder


@pytest.mark.parametrize(("on", "parts"), [("test", ["test"]), ("val", ["val"]), ("auto", ["test", "val"])])
def test_records_report_the_scores_of_the_requested_parts(shards: Path, on: str, parts: list[str]):
    done = run(*SETTINGS, f"data.source={shards}", f"evaluation.on={on}", "evaluation.every=2")
    evaluated = [{key for key in record if key.startswith(("test_", "val_"))} for record in done.records]
    scores = {f"{part}_{score}" for part in parts for score in ("loss", "accuracy", "macro_f1")}
    assert evaluated == [set(), scores, scores]


def test_validation_scores_are_those_of_the_samples_held_out_and_choose_the_best_round(shards: Path):
    done = run(*SETTINGS, f"data.source={shards}", "evaluation.on=both", evaluate=True)
    store, last, module = open_store(shards), done.records[-1], done.experiment.model.module.eval()
    done.experiment.model.bind(done.model)
    mean, std = store.description.mean[0], store.description.std[0]
    for name, (x, y) in (("val", store.validation() or ()), ("test", store.test())):
        with torch.inference_mode():
            logits = module(torch.from_numpy((x / 255 - mean) / std).float())
        guess, labels = logits.argmax(1).numpy(), torch.from_numpy(y.astype(np.int64))
        assert last[f"{name}_loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-4)
        assert last[f"{name}_accuracy"] == pytest.approx((guess == y).mean(), abs=1e-6)
        assert last[f"{name}_macro_f1"] == pytest.approx(f1_score(y, guess, average="macro", zero_division=0.0))
    best = max(done.records, key=lambda record: record["val_accuracy"])
    assert done.summary["best_chosen_on"] == "val" and done.summary["best_round"] == best["round"]
    assert done.summary["best_val_accuracy"] == best["val_accuracy"]
    assert done.summary["best_test_accuracy"] == best["test_accuracy"]


@pytest.mark.parametrize("on", ["val", "both"])
def test_validation_that_the_data_lack_is_rejected(on: str):
    with pytest.raises(UserError, match=f'evaluation.on = "{on}" needs validation samples'):
        run(*SETTINGS, f"evaluation.on={on}")
