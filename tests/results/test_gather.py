"""Runs are found by their folders; what they spent up to an accuracy is read off their records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedmpi import UserError
from fedmpi.results.comparison import Spread, first_reached, judged, spent, up_to
from fedmpi.results.loading import find_runs


def records(*accuracies: float | None) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for t, accuracy in enumerate(accuracies):
        made.append({"round": t, "samples": 10, "seconds": 0.5, "bytes_client_up": 10**6, "bytes_mediator_down": 10**6})
        if accuracy is not None:
            made[-1]["test_accuracy"] = accuracy
    return made


def test_runs_are_found_by_name_and_below_folders_once_each(tmp_path: Path) -> None:
    """The file of a sweep may be called sweep.toml and be above its runs."""
    files = {
        "sweep.toml": "",
        "one/config.toml": "",
        "one/plugins/own/config.toml": "",
        "deep/two/config.toml": "",
        "deep/two/sweep.json": "",
        "planned/sweep.toml": "",
        "empty/notes.txt": "",
    }
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    begun = [tmp_path / "deep/two", tmp_path / "one"]
    assert find_runs([tmp_path]) == begun and find_runs([tmp_path / "one", tmp_path]) == begun[::-1]
    for name, words in (("none", "is no folder"), ("empty", "holds no run"), ("planned", "holds no run")):
        with pytest.raises(UserError, match=words):
            find_runs([tmp_path / name])


def test_runs_come_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    ordered = ["epochs=1", "epochs=5", "epochs=20", "lr=1e-05", "lr=0.001", "lr=0.01", "lr=5", "lr=1e+16", "rounds"]
    ordered += [f"t={'0' * zeros}7" for zeros in (5, 4, 3, 2, 1, 0)]
    for name in sorted(ordered):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    assert [folder.name for folder in find_runs([tmp_path])] == ordered


def test_costs_up_to_a_target_are_those_of_the_first_round_that_reached_it() -> None:
    runs = [records(0.1, 0.6, 0.7), records(None, 0.2, None, 0.6), records(0.1)]

    def to_target(target: float, axis: str) -> Spread | None:
        firsts = [first_reached(run, target, "test_accuracy") for run in runs]
        return up_to([spent(run) for run in runs], firsts, axis)

    assert [first_reached(run, 0.6, "test_accuracy") for run in runs] == [1, 3, None]
    assert to_target(0.6, "round") == Spread(2, 3.0, 2**0.5)
    assert to_target(0.6, "samples") == Spread(2, 30.0, 200**0.5)
    assert to_target(0.65, "megabytes") == Spread(1, 6.0, None)
    assert to_target(0.65, "seconds") == Spread(1, 1.5, None)
    assert to_target(0.65, "virtual_seconds") is None
    assert to_target(0.9, "round") is None
    assert spent([{**r, "virtual_seconds": 2.0} for r in runs[0]])["virtual_seconds"].tolist() == [2, 4, 6]
    first, *others = runs[0]
    assert spent([{**first, "bytes_mediator_down": None}])["megabytes"].tolist() == [1.0]
    assert "virtual_seconds" not in spent([{**first, "virtual_seconds": 2.0}, *others]), "the clock came later"
    assert judged(runs[1]) == "test_accuracy" and judged([{"round": 0, "val_accuracy": 0.1}]) == "val_accuracy"


def test_values_that_are_equal_but_for_rounding_have_no_spread() -> None:
    assert Spread.of([971.7, 971.7 * (1 + 2e-16), 971.7]) == Spread(3, pytest.approx(971.7), 0.0)
    assert Spread.of([1.0]) == Spread(1, 1.0, None) and Spread.of([]) is None
    assert Spread.of([1.0, 2.0]) == Spread(2, 1.5, 0.5**0.5)
