"""Records and summaries that are read again: a value of an unexpected kind is named and rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedmpi import UserError
from fedmpi.records.history import read_record, read_records, read_summary

WHOLE: dict[str, Any] = {
    "round": 3,
    "seconds": 0.5,
    "samples": None,
    "participants": 4,
    "clients": "0-2 7",
    "test_accuracy": 0.5,
    "test_loss": None,
    "stratum_sizes": [3, 1],
    "allocation": [2, 1],
    "busy_seconds": [0.25, 0],
    "kl_quartiles": None,
    "phase_seconds": {"plan": 0.5},
    "opening": True,
    "own": {"anything": ["goes"]},
}


@pytest.mark.parametrize(
    "changed", [{}, {"clients": ""}, {"allocation": None}, {"round": 0, "test_loss": float("nan")}]
)
def test_a_record_is_read_as_it_was_written(changed: dict[str, Any]) -> None:
    line = json.dumps(WHOLE | changed).encode()
    assert json.dumps(read_record(line)) == line.decode()


def test_a_last_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
    for half in ('{"round": 1', '{"round": 1}'):
        (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n' + half)
        assert read_records(tmp_path) == [{"round": 0}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("round", value) for value in ("3", True, 10**400)),
        *(("seconds", "1"), ("participants", []), ("train_loss", {}), ("samples", 2**63), ("virtual_seconds", "2")),
        *(("bytes_mediator_up", "7"), ("size_estimate", "9"), ("size_true", [9]), ("test_accuracy", "0.5")),
        *(("client_accuracy_mean", True), ("client_tuned_loss_std", "1")),
        *(("clients", value) for value in (None, 0.5, "1 x", "1-1234567890123", "\u0663")),
        *(("busy_seconds", 0.5), ("busy_seconds", ["a"]), ("kl_quartiles", [True]), ("kl_client_quartiles", 0.5)),
        *(("stratum_sizes", "ab"), ("stratum_sizes", None), ("allocation", [1])),
        *(("phase_seconds", 0.5), ("phase_seconds", {"plan": "long"})),
    ],
)
def test_a_record_with_a_value_of_another_kind_is_rejected(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(WHOLE) + "\n")
    assert len(read_records(tmp_path)) == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(WHOLE | {key: value}) + "\n")
    with pytest.raises(UserError, match=rf"metrics.jsonl cannot be read \(.*{'' if value == 10**400 else key}"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("wall_seconds", "long"), ("bytes_total", "many"), ("best_round", True), ("best_test_accuracy", [])),
        *(("best_val_loss", "low"), ("rounds_to_target", "3"), ("megabytes_to_target", {})),
        *(("clients", 0), ("clients", 2**63), ("mpi_bytes", None), ("mpi_bytes", {}), ("mpi_bytes", {"total": "7"})),
        ("final", {"round": 2, "test_loss": "low"}),
    ],
)
def test_a_summary_with_a_value_of_another_kind_is_rejected(key: str, value: object, tmp_path: Path) -> None:
    whole = {"final": {"round": 2, "test_loss": None}, "best_round": None, "mpi_bytes": {"total": 7}, "clients": 1}
    for content in (whole, {}, {"clients": 2**63 - 1}):
        (tmp_path / "summary.json").write_text(json.dumps(content))
        assert read_summary(tmp_path / "summary.json") == content
    (tmp_path / "summary.json").write_text(json.dumps(whole | {key: value}))
    with pytest.raises(UserError, match=rf"summary.json cannot be read \({'test_loss' if key == 'final' else key} = "):
        read_summary(tmp_path / "summary.json")


def test_brackets_without_an_end_are_rejected_as_any_damage(tmp_path: Path) -> None:
    for name, read in (("metrics.jsonl", lambda: read_records(tmp_path)), ("summary.json", None)):
        (tmp_path / name).write_text("[" * 100_000 + "\n")
        with pytest.raises(UserError, match=rf"{name} cannot be read \(maximum recursion depth"):
            read() if read else read_summary(tmp_path / name)
