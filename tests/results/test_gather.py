"""Runs are found by their folders; what they spent up to an accuracy is read off their records."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmpi import UserError
from fedmpi.results.comparison import Spread, judged, spent
from fedmpi.results.loading import differing, find_runs


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


def test_what_was_spent_is_summed_and_the_clock_counts_only_if_it_was_there_from_the_first_round() -> None:
    records = [{"round": t, "samples": 10, "seconds": 0.5, "bytes_mediator_down": 10**6 * t or None} for t in range(3)]
    expected = {"round": [1, 2, 3], "samples": [10, 20, 30], "megabytes": [0, 1, 3], "seconds": [0.5, 1, 1.5]}
    assert {axis: x.tolist() for axis, x in spent(records).items()} == expected
    timed = [{**record, "virtual_seconds": 2.0} for record in records]
    assert spent(timed)["virtual_seconds"].tolist() == [2, 4, 6]
    assert "virtual_seconds" not in spent([*timed[:1], *records[1:]])
    assert judged([{"round": 0}, {"test_accuracy": 1}]) == "test_accuracy" and judged([{}]) == "val_accuracy"


def test_values_that_are_equal_but_for_rounding_have_no_spread() -> None:
    assert Spread.of([971.7, 971.7 * (1 + 2e-16), 971.7]) == Spread(3, pytest.approx(971.7), 0.0)
    assert Spread.of([1.0]) == Spread(1, 1.0, None) and Spread.of([]) is None
    assert Spread.of([1.0, 2.0]) == Spread(2, 1.5, 0.5**0.5)


def test_keys_that_differ_are_listed_before_the_sources_of_components() -> None:
    tables = [{"plugins": "a", "rounds": 1, "seed": 0}, {"plugins": "b", "rounds": 2, "seed": 0, "preset": "fedavg"}]
    assert differing(tables) == ["rounds", "preset", "plugins"]
