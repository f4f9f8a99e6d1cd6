"""TensorBoard shows the numbers of a run in groups, each round once, and its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
from tensorboard.summary.writer import event_file_writer

import fedmpi
from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.records.tensorboard import GROUPS, TensorBoard, by_group, settings, tag

SMALL: dict[str, Any] = {
    "rounds": 5,
    "checkpoint.every": 2,
    "clients.count": 4,
    "local.lr": 0.2,
    "local.engine": "sequential",
    "logging.tensorboard": False,
    "cluster.threads": 1,
}


def interrupted(folder: Path, **keys: Any) -> list[dict[str, Any]]:
    """The records of a run that was stopped in its fourth round and then went on."""
    rounds: list[bool] = []

    def stop() -> bool:
        rounds.append(True)
        return len(rounds) == 4

    config = SMALL | {key.replace("_", ".", 1): value for key, value in keys.items()}
    assert fedmpi.run("fedavg", config, out=folder, stop=stop).ending == "stopped"
    assert fedmpi.run("fedavg", config, out=folder, resume=True).ending == "finished"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_numbers_are_named_by_what_they_are_about() -> None:
    assert [tag(key) for key in ("test_accuracy", "val_macro_f1", "train_loss", "lr", "participants")] == [
        "test/accuracy",
        "val/macro_f1",
        "train/loss",
        "train/lr",
        "clients/participants",
    ]
    record = {
        "round": 3,
        "test_loss": 0.5,
        "seconds": 2,
        "phase_seconds": {"plan": 0.1},
        "clients": "0-3",
        "kl_mean": 1,
    }
    assert by_group(record) == {
        "test/loss": 0.5,
        "time/seconds": 2.0,
        "time/plan": 0.1,
        "mediators/kl_mean": 1.0,
    }
    assert [tag(key) for key in ("update_epsilon", "size_epsilon_max", "size_estimate", "bytes_client_up")] == [
        "privacy/update_epsilon",
        "privacy/size_epsilon_max",
        "sizes/size_estimate",
        "traffic/bytes_client_up",
    ]
    assert tag("mine") == "other/mine"


def test_fields_of_a_record_have_groups() -> None:
    fields = "train_loss test_accuracy val_loss kl_mean virtual_seconds bytes_client_up update_epsilon size_estimate"
    assert not [field for field in fields.split() if tag(field).startswith("other/")]
    assert len({group for group, _ in GROUPS}) == 11


def test_settings_are_those_that_are_not_at_their_defaults() -> None:
    config = load_config(None, ["preset=fedavg", "local.lr=0.2", "clients.count=4", "logging.tensorboard=true"])
    chosen = settings(config)
    assert (chosen["preset"], chosen["seed"], chosen["local.lr"], chosen["clients.count"]) == (
        "fedavg",
        0,
        0.2,
        4,
    )
    assert "logging.tensorboard" not in chosen and "logging.interval" not in chosen


def test_tensorboard_shows_groups_and_settings(tmp_path: Path) -> None:
    records = interrupted(tmp_path / "RUN", logging_tensorboard=True)
    events = EventAccumulator(str(tmp_path / "RUN"), size_guidance={SCALARS: 0}).Reload()
    tags = by_group(records[-1])
    assert set(tags) <= set(events.Tags()["scalars"]) and {"time/train", "train/loss", "clients/participants"} <= set(
        tags
    )
    for name in tags:
        assert [one.step for one in events.Scalars(name)] == list(range(5)), name
    shown = [one.value for one in events.Scalars("test/accuracy")]
    assert shown == pytest.approx([record["test_accuracy"] for record in records])
    known = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"local.lr" in known and b"fedavg" in known and b"logging.interval" not in known


def test_events_of_a_run_that_continues_within_the_second_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenth and eleventh file of a process, whose running numbers are not in the order of the alphabet."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for first in (0, 3):
        events = TensorBoard(tmp_path, load_config(None, ["preset=fedavg"]), first)
        for t in range(first, first + 3):
            events.record({"round": t, "lr": float(t)})
        events.close()
    read = EventAccumulator(str(tmp_path), size_guidance={SCALARS: 0}).Reload()
    assert [one.step for one in read.Scalars("train/lr")] == [0, 1, 2, 3, 4, 5]


def test_a_folder_whose_name_is_no_utf8_is_rejected_with_tensorboard_and_used_without(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    with pytest.raises(UserError, match=r"whose name is not UTF-8\. Choose another --out, or set logging"):
        fedmpi.run("fedavg", SMALL | {"logging.tensorboard": True}, out=folder)
    assert not folder.exists()
    assert fedmpi.run("fedavg", SMALL, out=folder).ending == "finished"
    with pytest.raises(UserError, match=r"udcff holds a run already"):  # in words that can be sent to other ranks
        fedmpi.run("fedavg", SMALL, out=folder)
