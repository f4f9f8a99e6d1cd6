"""The folder of a run: its owner, its records in the end, and full disks."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from sklearn.metrics import confusion_matrix
from torch import nn

import fedmpi
from fedmpi import UserError
from fedmpi.common.files import LOCK, is_locked, lock_folder
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.data.source import ClientData
from fedmpi.mpi import BytesMoved, Cluster
from fedmpi.records.checkpoint import newest_checkpoint
from fedmpi.records.history import History, as_line
from fedmpi.records.provenance import part_sources
from fedmpi.records.recorder import OF_A_RUN, Recorder
from fedmpi.tasks.losses import label_smoothing
from tests.data_prep.command import main
from tests.end_to_end.in_process import run_into
from tests.end_to_end.runs import curve
from tests.end_to_end.user_models import tied

ADAM = ("server.optimizer=adam", "server.optimizer.lr=0.01")
SETTINGS = ("preset=fedavg", "rounds=4", "checkpoint.every=1", "local.engine=sequential", *ADAM)
CONFIG = load_config(None, ["logging.tensorboard=false", *SETTINGS])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four rounds, a checkpoint after each, the last two kept."""
    folder = tmp_path_factory.mktemp("undisturbed") / "RUN"
    assert run_into(folder, *SETTINGS) == 0
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "RUN")
    return folder / "RUN"


def content(run: Path) -> dict[str, bytes]:
    """All files but the lock."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


# Ownership of a folder


def test_a_folder_in_use_is_rejected_with_its_owner_until_it_is_released(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "nowhere")
    first = lock_folder(tmp_path)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+\. .* remove {tmp_path / LOCK}$"):
            fedmpi.run("fedavg", {"rounds": 1}, out=tmp_path, resume=resume)
    assert is_locked(tmp_path)
    first.release()
    assert not is_locked(tmp_path) and not (tmp_path / LOCK).exists()
    lock_folder(tmp_path).release()


def test_the_folder_of_a_killed_process_of_this_host_is_free_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        kept = lock_folder(tmp_path)
        os.kill(os.getpid() if kept.is_locked else 0, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL and (tmp_path / LOCK).exists()
    assert not is_locked(tmp_path)
    lock_folder(tmp_path).release()


@pytest.mark.parametrize(("content", "owner"), [("4711\nanother-host\n", "process 4711 on another-host"), ("", "")])
def test_an_owner_of_another_host_or_that_is_not_named_is_believed(tmp_path: Path, content: str, owner: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with pytest.raises(UserError, match=f"{owner}.*remove"):
        lock_folder(tmp_path)


@pytest.mark.parametrize("name", OF_A_RUN)
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_anything_of_a_run_but_no_configuration_is_rejected(tmp_path: Path, name: str, resume: bool):
    path = tmp_path / name / "round-00000001.safetensors" if name == "checkpoints" else tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("of a run")
    (tmp_path / "notes.txt").write_text("of another program")
    before = content(tmp_path)
    with pytest.raises(UserError, match=rf"contains {name} but no config"):
        Recorder(tmp_path, CONFIG, resume)
    assert content(tmp_path) == before


def test_a_run_is_not_continued_without_resume(undisturbed: Path, tmp_path: Path):
    run = copy_of(undisturbed, tmp_path)
    before = content(run)
    with pytest.raises(UserError, match="holds a run already. Add --resume"):
        run_into(run, *SETTINGS)
    assert content(run) == before


def test_a_run_without_a_checkpoint_says_that_it_begins_again(
    undisturbed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = copy_of(undisturbed, tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    with caplog.at_level(logging.WARNING, "fedmpi"):
        assert run_into(run, *SETTINGS, "checkpoint.keep=3", resume=True) == 0
    assert f"no checkpoint in {run}: begins again at round 0, 4 records are dropped" in caplog.text
    assert curve(run) == curve(undisturbed)
    assert "changed before round 0: checkpoint.keep: 2 -> 3\n" in (run / "run.log").read_text()


# Keys that may change


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (
            [],
            ["local.lr=0.5", "seed=3", "evaluation.every=2"],
            r"\(seed: 0 .*, 3 .*; local\.lr: 0\.05 .*, 0\.5 [^;]*\)",
        ),
        ([], ["data.normalize=false", "data.verify=true"], r"\(data\.normalize: True .*, False [^;]*\)"),
        ([], ["logging.diagnostics=true"], r"\(logging\.diagnostics: False .*, True "),
        (["local.schedule=cosine"], ["rounds=6"], r"\(rounds: 4 .*, 6 "),
    ],
)
def test_every_key_that_differs_and_may_not_is_named_with_both_values(
    before: list[str], after: list[str], named: str, tmp_path: Path
):
    common = [*SETTINGS, "logging.tensorboard=false", *before]
    Recorder(tmp_path, load_config(None, common), resume=False).close()
    with pytest.raises(UserError, match=f"cannot change {named}"):
        Recorder(tmp_path, load_config(None, [*common, *after]), resume=True)


def test_allowed_changes_take_effect_and_equal_a_run_started_with_them(undisturbed: Path, tmp_path: Path):
    """A finished run of four rounds continues to eight, in two changes, and is bit-identical to one of eight rounds."""
    longer = [setting for setting in SETTINGS if not setting.startswith("rounds")]
    assert run_into(tmp_path / "WHOLE", *longer, "rounds=8") == 0
    run = copy_of(undisturbed, tmp_path)
    first = ("rounds=9", "checkpoint.keep=3", "evaluation.target_accuracy=0.3", "data.verify=true")
    assert run_into(run, *longer, *first, resume=True, stop_after=2) == 75
    assert not (run / "summary.json").exists() and not (run / "model.safetensors").exists()
    assert run_into(run, *longer, "rounds=8", "checkpoint.keep=3", resume=True) == 0
    assert curve(run) == curve(tmp_path / "WHOLE")
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "WHOLE" / "model.safetensors").read_bytes()
    assert fedmpi.load_run(run).config.rounds == 8
    said = (run / "run.log").read_text()
    notes = [line.partition(" INFO ")[2] for line in said.splitlines() if "changed before" in line]
    assert notes == [
        "changed before round 4: rounds: 4 -> 9",
        "changed before round 4: data.verify: False -> True",
        "changed before round 4: evaluation.target_accuracy: unset -> 0.3",
        "changed before round 4: checkpoint.keep: 2 -> 3",
        "changed before round 6: rounds: 9 -> 8",
        "changed before round 6: data.verify: True -> False",
        "changed before round 6: evaluation.target_accuracy: 0.3 -> unset",
    ]


def test_fewer_rounds_than_are_done_are_rejected_and_as_many_end_the_run(undisturbed: Path, tmp_path: Path):
    run = copy_of(undisturbed, tmp_path)
    shorter = [setting for setting in SETTINGS if not setting.startswith("rounds")]
    before = content(run)
    with pytest.raises(UserError, match=r"has done 4 rounds already, more than rounds = 3. Give rounds = 4 or more"):
        run_into(run, *shorter, "rounds=3", resume=True)
    after = content(run)
    assert all(after[name] == text for name, text in before.items() if name != "run.log")
    assert run_into(run, *SETTINGS, resume=True) == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda lines: lines[:1], "differs from what was written up to round 4"),
        (lambda lines: [lines[0], b"[]\n", lines[2]], "differs from what was written up to round 4"),
        (lambda lines: [lines[0], lines[1].replace(b": 0.", b": 9.", 1), lines[2]], "differs from what was written"),
    ],
)
def test_records_that_a_checkpoint_counts_on_must_be_there_as_written(undisturbed, tmp_path, changed, words: str):
    run = copy_of(undisturbed, tmp_path)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(changed(lines)))
    with pytest.raises(UserError, match=words):
        run_into(run, *SETTINGS, resume=True)


# The whole run's totals


def test_the_summary_of_a_resumed_run_is_that_of_an_undisturbed_one(tmp_path: Path):
    """Two interruptions; only what was moved for the starts, the times and the versions may be others."""
    private = ("samples.sampler=bernoulli", "samples.budget=100", "samples.size.estimate=randomized-response")
    settings = (
        "preset=fedavg",
        "server.weights=gradient-sum",
        *private,
        "rounds=7",
        "checkpoint.every=2",
        "local.engine=sequential",
    )
    assert run_into(tmp_path / "WHOLE", *settings) == 0
    assert run_into(tmp_path / "RUN", *settings, stop_after=3) == 75
    assert run_into(tmp_path / "RUN", *settings, resume=True, stop_after=2) == 75
    assert run_into(tmp_path / "RUN", *settings, resume=True) == 0
    whole, resumed = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("WHOLE", "RUN"))
    for summary in (whole, resumed):
        assert summary.pop("wall_seconds") > 0
    assert resumed == whole
    recorded = curve(tmp_path / "WHOLE")
    assert whole["samples_total"] == sum(record["samples"] for record in recorded) > 0
    assert whole["steps_total"] == sum(record["steps"] for record in recorded) > 0
    assert whole["size_epsilon_max"] == recorded[-1]["size_epsilon_max"] > 0


def test_what_was_moved_before_an_interruption_is_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Simulate seven bytes moved by every component of the run."""
    monkeypatch.setattr(Cluster, "share_bytes", lambda self: BytesMoved(relay=7))
    assert run_into(tmp_path / "RUN", *SETTINGS, "checkpoint.every=9", stop_after=1) == 75
    assert run_into(tmp_path / "RUN", *SETTINGS, "checkpoint.every=9", resume=True, stop_after=2) == 75
    assert run_into(tmp_path / "RUN", *SETTINGS, "checkpoint.every=9", resume=True) == 0
    assert json.loads((tmp_path / "RUN" / "summary.json").read_text())["mpi_bytes"]["relay"] == 3 * 7


def test_a_run_does_not_continue_with_data_prepared_again_under_the_same_name(tmp_path: Path):
    shards, run = tmp_path / "shards", tmp_path / "RUN"
    words = ["digits", "--partition", "iid", "--clients", "6", "--shards", "2", "--out", str(shards), "--overwrite"]
    settings = [setting for setting in SETTINGS if not setting.startswith("data.")] + [f"data.source={shards}"]
    assert main([*words, "--seed", "0"]) == 0
    assert run_into(run, *settings) == 0
    assert main([*words, "--seed", "0"]) == 0
    assert run_into(run, *settings, resume=True) == 0
    assert main([*words, "--seed", "1"]) == 0
    before = content(run)
    with pytest.raises(UserError, match=r"shards holds other data than those that .*RUN was trained on up to round 4"):
        run_into(run, *settings, resume=True)
    assert content(run)["metrics.jsonl"] == before["metrics.jsonl"]


# Damaged checkpoints


def test_a_run_continues_from_the_checkpoint_before_a_damaged_one_bit_for_bit(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = copy_of(undisturbed, tmp_path)
    newest = max((run / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    assert run_into(run, *SETTINGS, resume=True) == 0
    assert curve(run) == curve(undisturbed)
    assert (run / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    for text in (capsys.readouterr().err, (run / "run.log").read_text()):
        assert f"{newest} is damaged" in text
    assert "resumed at round 3" in text


# Records at the end of a run


def test_the_seconds_of_a_run_are_those_of_all_its_parts(tmp_path: Path):
    first = Recorder(tmp_path, CONFIG, resume=False)
    first.history.seconds_before = 1000.0
    first.checkpoint(0, {"model": torch.zeros(2)}, {"data": "", "settled": 0})
    first.close()
    second = Recorder(tmp_path, CONFIG, resume=True)
    second.resume()
    summary = second.finish(nn.Linear(2, 2), {})
    second.close()
    assert summary["wall_seconds"] >= 1000


@pytest.mark.parametrize(
    ("on", "scores", "summary"),
    [
        ("test", [0.2, 0.7, None, 0.5, 0.7], {"best_round": 1, "best_test_accuracy": 0.7, "rounds_to_target": 2}),
        ("test", [None, 0.0, 0.0], {"best_round": 1, "rounds_to_target": None}),
        ("test", [(0.7, 0.3), (0.5, 0.8), (0.9, 0.6)], {"best_round": 2, "best_chosen_on": "test"}),
        ("both", [(0.7, 0.3), (0.5, 0.8), (0.9, 0.6)], {"best_round": 1, "best_test_accuracy": 0.5}),
        ("both", [(0.7, 0.3), (0.5, 0.8)], {"best_chosen_on": "val", "best_val_accuracy": 0.8, "rounds_to_target": 1}),
        ("auto", [(0.7, 0.3), (0.5, 0.8)], {"best_round": 1, "best_chosen_on": "val"}),
        ("val", [(0.7, 0.3), (0.5, 0.8)], {"best_round": 1, "best_test_accuracy": None, "rounds_to_target": 2}),
        ("val", [(0.7, 0.3), None], {"final": {"round": 1, "val_accuracy": 0.3}}),
    ],
)
def test_the_best_round_is_the_first_of_equal_ones_judged_on_validation_if_there_is_one(
    on: str, scores: list, summary: dict[str, Any]
):
    """Scores are test accuracies, or test and validation accuracies; None means a round without evaluation."""
    keys = [f"evaluation.on={on}", "evaluation.target_accuracy=0.7"]
    history = History(load_config(None, [*SETTINGS, *keys]))
    for t, score in enumerate(scores):
        both = score if isinstance(score, tuple) else (score, None)
        parts = {f"{part}_accuracy": both[part == "val"] for part in history.config.evaluation.parts(True)}
        history.lines.append(as_line({"round": t, **{name: x for name, x in parts.items() if x is not None}}))
    found = history.summary({})
    assert {key: found.get(key) for key in summary} == summary


def test_the_best_round_of_a_regression_has_the_lowest_loss() -> None:
    history = History(load_config(None, [*SETTINGS, "task.kind=regression"]))
    history.lines = [as_line({"round": t, "test_loss": loss}) for t, loss in enumerate((0.5, 0.2, 0.3))]
    found = history.summary({})
    assert (found["best_round"], found["best_test_loss"]) == (1, 0.2)


def test_final_scores_are_those_of_the_last_evaluation() -> None:
    history = History(CONFIG)
    for record in ({"test_accuracy": 0.5, "client_accuracy_mean": 0.1}, {"test_accuracy": 0.6}, {"train_loss": 1.0}):
        history.lines.append(as_line({"round": history.rounds, **record}))
    assert history.summary({})["final"] == {"round": 2, "test_accuracy": 0.6, "train_loss": 1.0}


def test_the_confusion_matrix_is_that_of_the_final_model_on_the_test_part(undisturbed: Path):
    x, y = ClientData(open_store("digits")).test()
    run = fedmpi.load_run(undisturbed)
    with torch.no_grad():
        guess = run.model(x).argmax(1).numpy()
    found = pandas.read_csv(undisturbed / "confusion.csv", index_col=0)
    np.testing.assert_array_equal(found, confusion_matrix(y.numpy(), guess, labels=range(10)))
    assert [*found.columns] == list("0123456789")
    f1 = 2 * np.diag(found) / np.maximum(found.to_numpy().sum(0) + found.to_numpy().sum(1), 1)
    assert f1.mean() == pytest.approx(run.records[-1]["test_macro_f1"], rel=1e-12)


def test_validation_samples_are_not_in_the_confusion_matrix(tmp_path: Path):
    x, y = np.random.default_rng(1).standard_normal((60, 4)), np.arange(60) % 3
    data = fedmpi.ClientArrays(x, y, np.arange(60) % 4, test=(x[:21], y[:21]), val=(x[:35], y[:35]))
    settings = {"rounds": 1, "clients.sampler": "all", "evaluation.on": "both", "logging.tensorboard": False}
    fedmpi.run("fedavg", settings, data=data, out=tmp_path)
    assert pandas.read_csv(tmp_path / "confusion.csv", index_col=0).sum(axis=1).tolist() == [7, 7, 7]


@pytest.mark.parametrize(("every", "evaluated"), [(3, [2, 4]), (100, [4]), (1, [0, 1, 2, 3, 4])])
def test_the_last_round_is_evaluated_and_saved_whatever_the_interval(tmp_path: Path, every: int, evaluated: list[int]):
    """A signal in the last round comes too late to stop the run."""
    settings = ("preset=fedavg", "rounds=5", f"evaluation.every={every}", f"checkpoint.every={every}")
    assert run_into(tmp_path / "RUN", *settings, stop_after=5) == 0
    assert [record["round"] for record in curve(tmp_path / "RUN") if "test_accuracy" in record] == evaluated
    last = newest_checkpoint(tmp_path / "RUN" / "checkpoints")
    assert last is not None and last.next_round == 5 and (tmp_path / "RUN" / "summary.json").exists()


# Models that can and cannot be saved


def test_tied_weights_are_saved_and_tied_again_when_loaded(tmp_path: Path):
    settings = ("preset=fedavg", "rounds=2", "model=tests.end_to_end.user_models:tied")
    assert run_into(tmp_path / "RUN", *settings) == 0
    stored, fresh = load_file(tmp_path / "RUN" / "model.safetensors"), tied(open_store("digits").description)
    fresh.load_state_dict(stored)
    assert fresh[1].weight is fresh[3].weight and torch.equal(stored["1.weight"], stored["3.weight"])


class Talkative(nn.Sequential):
    """Keeps words in its state dict, which a file of tensors cannot store."""

    def get_extra_state(self) -> str:
        return "not a tensor"


def test_a_model_that_cannot_be_saved_is_rejected_before_the_folder_is_made(tmp_path: Path):
    with pytest.raises(UserError, match=r"the model cannot be saved: .* not a dense tensor; leave it out"):
        fedmpi.run("fedavg", model=Talkative(nn.Flatten(), nn.Linear(64, 10)), out=tmp_path / "RUN")
    assert not (tmp_path / "RUN").exists()


# Failures of the disk


@pytest.mark.parametrize("call", ["write", "checkpoint", "finish"])
def test_whatever_cannot_be_written_is_said_in_a_sentence(tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture):
    """A limit on the length of files replaces the full disk: it needs no rights."""
    recorder = Recorder(tmp_path, CONFIG, resume=False)
    recorder.resume()
    recorder.checkpoint(1, {"model": torch.ones(10)}, {"settled": 0})
    recorder.saved()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError, match=r"writing to the run folder .* failed \(File too large\). Make room there"):
            if call == "write":
                recorder.write({"round": 0, "long": "x" * 5000})
            elif call == "checkpoint":
                recorder.checkpoint(2, {"model": torch.ones(5000)}, {"settled": 0})
                recorder.saved()
            else:
                recorder.finish(nn.Linear(100, 100), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    logging.getLogger("fedmpi").warning("the end")
    recorder.close()
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found.next_round == 1
    assert not list(tmp_path.rglob("*.partial"))


def test_only_components_of_users_have_sources_and_one_in_no_file_is_warned_of(caplog: pytest.LogCaptureFixture):
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec("def few(client):\n    return client", names)
    with caplog.at_level(logging.WARNING, "fedmpi"):
        for loss in (label_smoothing, {"name": label_smoothing, "smoothing": 0.2}):
            assert part_sources(fedmpi.Config(task={"loss": loss}, clients={"count": 4}), warns=True) == {}
        assert not caplog.records
        assert part_sources(fedmpi.Config(samples={"sampler": names["few"]}, clients={"count": 4}), warns=True) == {}
    assert "samples.sampler = typed_in:few(...) is in no file" in caplog.text
