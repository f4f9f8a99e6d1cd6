"""Runs are told to TensorBoard, MLflow and Weights & Biases: numbers in groups, settings, a picture; once each."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import IMAGES, SCALARS, EventAccumulator
from tensorboard.summary.writer import event_file_writer

import fedmpi
from fedmpi import UserError
from fedmpi.config import load_config
from fedmpi.data.opening import open_store
from fedmpi.records.tracking.base import Tracker
from fedmpi.records.tracking.choice import Trackers
from fedmpi.records.tracking.names import GROUPS, by_group, name, settings
from fedmpi.records.tracking.picture import VIRIDIS, picture
from fedmpi.records.tracking.to_tensorboard import TensorBoard
from tests.keys.test_every_field import RECORD

SMALL: dict[str, Any] = {
    "rounds": 5,
    "checkpoint.every": 2,
    "participation.count": 4,
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
    assert [name(key) for key in ("test_accuracy", "val_macro_f1", "train_loss", "lr", "participants")] == [
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
    assert [name(key) for key in ("update_epsilon", "size_epsilon_max", "size_estimate", "bytes_client_up")] == [
        "privacy/update_epsilon",
        "privacy/size_epsilon_max",
        "sizes/size_estimate",
        "traffic/bytes_client_up",
    ]
    assert name("mine") == "other/mine"


def test_every_field_of_a_record_has_a_group() -> None:
    fields = {field for text in RECORD.values() for field in text.split()}
    homeless = sorted(field for field in fields if name(field).startswith("other/"))
    assert homeless == ["phase_seconds", "rebalancing", "round"] or set(homeless) <= set(fields), homeless
    assert len({group for group, _ in GROUPS}) == 11


def test_settings_are_those_that_are_not_at_their_defaults() -> None:
    config = load_config(None, ["preset=fedavg", "local.lr=0.2", "participation.count=4", "logging.tensorboard=true"])
    chosen = settings(config)
    assert (chosen["preset"], chosen["seed"], chosen["local.lr"], chosen["participation.count"]) == (
        "fedavg",
        0,
        0.2,
        4,
    )
    assert "logging.tensorboard" not in chosen and "logging.interval" not in chosen


def test_the_picture_has_a_cell_for_each_client_and_class_coloured_by_samples() -> None:
    drawn = picture(np.array([[0, 8], [4, 0], [0, 2]]))
    cell = drawn.shape[1] // 3
    assert drawn.shape == (2 * cell, 3 * cell, 3) and drawn.dtype == np.uint8
    at = drawn[cell // 2 :: cell, cell // 2 :: cell].tolist()
    assert at[0][0] == at[0][2] == at[1][1] == VIRIDIS[0].tolist(), "none"
    assert at[1][0] == VIRIDIS[4].tolist(), "most of all"
    assert at[0][1] == VIRIDIS[2].tolist(), "half of that"
    assert at[1][2] == VIRIDIS[1].tolist(), "a quarter"
    assert picture(np.ones((3, 250), np.int64)).shape[0] // cell <= 100 * cell


def test_tensorboard_shows_groups_settings_and_the_clients_data(tmp_path: Path) -> None:
    records = interrupted(tmp_path / "RUN", logging_tensorboard=True)
    events = EventAccumulator(str(tmp_path / "RUN"), size_guidance={SCALARS: 0, IMAGES: 0}).Reload()
    tags = by_group(records[-1])
    assert set(tags) <= set(events.Tags()["scalars"]) and {"time/train", "train/loss", "clients/participants"} <= set(
        tags
    )
    for tag in tags:
        assert [one.step for one in events.Scalars(tag)] == list(range(5)), tag
    shown = [one.value for one in events.Scalars("test/accuracy")]
    assert shown == pytest.approx([record["test_accuracy"] for record in records])
    [image] = events.Images("clients/samples of each class")
    counts = open_store("digits").class_counts()
    assert (image.width, image.height) == (20 * (480 // 20), 10 * (480 // 20)) and counts.shape == (20, 10)
    known = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"local.lr" in known and b"fedavg" in known and b"logging.interval" not in known


def test_events_of_a_run_that_goes_on_within_the_second_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenth and eleventh file of a process, whose running numbers are not in the order of the alphabet."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    for first in (0, 3):
        events = TensorBoard(tmp_path, {"local.lr": 0.1}, first)
        for t in range(first, first + 3):
            events.record(t, {"train/lr": float(t)})
        events.close(finished=first > 0)
    read = EventAccumulator(str(tmp_path), size_guidance={SCALARS: 0}).Reload()
    assert [one.step for one in read.Scalars("train/lr")] == [0, 1, 2, 3, 4, 5]


def test_what_is_not_installed_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, title in (("mlflow", "MLflow"), ("wandb", "Weights & Biases")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError, match=rf"logging\.{package} needs {title}: pip install 'fedmpi\[{package}\]'"):
            fedmpi.run("fedavg", SMALL | {f"logging.{package}": True}, out=tmp_path / "RUN")
    assert not (tmp_path / "RUN" / "config.toml").exists()


def test_a_folder_whose_name_is_no_utf8_is_refused_with_tensorboard_and_used_without(tmp_path: Path) -> None:
    folder = tmp_path / "\udcff"
    with pytest.raises(UserError, match="no folder whose name is no UTF-8, .*: choose another --out, or set logging"):
        fedmpi.run("fedavg", SMALL | {"logging.tensorboard": True}, out=folder)
    assert not folder.exists()
    assert fedmpi.run("fedavg", SMALL, out=folder).ending == "finished"
    with pytest.raises(UserError, match=r"udcff holds a run already"):  # in words that can be sent to other ranks
        fedmpi.run("fedavg", SMALL, out=folder)


class Distant(Tracker):
    """One that is reached for two rounds only."""

    title, raises = "the tracker", (ConnectionError,)

    def __init__(self, calls: list[int]):
        self.calls = calls

    def record(self, round: int, numbers: dict[str, float]) -> None:
        if round == 2:
            raise ConnectionError("no route\nto the host")
        self.calls.append(round)

    def show(self, picture: Any) -> None:
        self.calls.append(-1)

    def close(self, finished: bool) -> None:
        raise AssertionError("nobody is there any more")


def test_one_that_cannot_be_reached_is_reported_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    trackers = Trackers([(Distant, (calls,)), (Unborn, ())])
    with caplog.at_level(logging.WARNING, "fedmpi"):
        trackers.show(lambda: np.zeros((1, 1, 3), np.uint8))
        for round in range(4):
            trackers.record(round, {})
        trackers.close(True)
    assert calls == [-1, 0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        f"the tracker cannot be reached ({why}): the run goes on, and is told in its folder alone"
        for why in ("ConnectionError", "no route")
    ]


class Unborn(Distant):
    """One that cannot even be opened."""

    def __init__(self) -> None:
        raise ConnectionError


def test_mlflow_has_the_records_once_settings_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(None)
    records = interrupted(tmp_path / "RUN", logging_mlflow=True, logging_project="digits")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.run_name, run.info.status) == ("RUN", "FINISHED")
    assert run.data.params["local.lr"] == "0.2" and run.data.params["preset"] == "fedavg"
    for key in ("test/accuracy", "time/train", "train/samples"):
        history = sorted(client.get_metric_history(run.info.run_id, key), key=lambda one: one.step)
        assert [one.step for one in history] == list(range(5)), key
    accuracy = client.get_metric_history(run.info.run_id, "test/accuracy")
    assert {one.step: one.value for one in accuracy} == pytest.approx({r["round"]: r["test_accuracy"] for r in records})
    drawn = Image.open(client.download_artifacts(run.info.run_id, "clients.png", str(tmp_path)))
    assert drawn.size == (480, 240)


def test_weights_and_biases_has_the_records_once_settings_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    records = interrupted(tmp_path / "RUN", logging_wandb=True, logging_project="digits")
    kept = (tmp_path / "RUN" / "wandb-run").read_text().strip()
    parts = sorted((tmp_path / "RUN" / "wandb").glob(f"offline-run-*-{kept}"))
    assert len(parts) == 2, "each start leaves a part of the same run"
    rows = [row for part in parts for row in history_of(next(part.glob("*.wandb")))]
    rounds = [row for row in rows if "test/accuracy" in row]
    assert [row["_step"] for row in rounds] == list(range(5))
    assert [row["test/accuracy"] for row in rounds] == pytest.approx([r["test_accuracy"] for r in records])
    [drawn] = (tmp_path / "RUN" / "wandb").rglob("*.png")
    assert Image.open(drawn).size == (480, 240)
    assert [row["_step"] for row in rows if any("samples of each class" in key for key in row)] == [0]


def history_of(path: Path) -> Sequence[dict[str, Any]]:
    """The rows of an offline file of Weights & Biases."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for written in logged(path.read_bytes()):
        record = Record()
        record.ParseFromString(written)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
            rows[-1].setdefault("_step", record.history.step.num)
    return rows


def logged(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's format: blocks of 32 KiB, pieces of (checksum, length, whole or part)."""
    block, head, at, record = 1 << 15, 7, 7, b""
    while at + head <= len(content):
        left = block - at % block
        length, kind = struct.unpack_from("<HB", content, at + 4)
        if left < head or kind == 0:
            at += left
            continue
        record += content[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):
            yield record
            record = b""
