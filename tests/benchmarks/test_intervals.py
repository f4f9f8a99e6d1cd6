"""Tables of runs over seeds: what is averaged, what a difference and a ratio of spreads rest on."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import intervals
from benchmarks.intervals import Difference, paired, points, spread, spread_ratio, welch
from benchmarks.repeat import Outcome, averaged, finished, read, run_folder, table_of


def outcome(every: int, rounds: int, level: float) -> Outcome:
    """A curve that is `level` up to ten rounds before the end and level + 0.1 from there on."""
    measured = np.arange(every, rounds + 1, every)
    return Outcome(measured, np.where(measured > rounds - 10, level + 0.1, level))


def test_a_paired_interval_is_students_of_the_differences_per_seed() -> None:
    found = paired([5.0, 1.0, 9.0], [4.0, -1.0, 6.0])  # differences 1, 2, 3: s = 1, t(2; 0.975) = 4.3027
    assert found.n == 3 and found.mean == pytest.approx(2)
    assert found.high - found.mean == pytest.approx(found.mean - found.low) == pytest.approx(4.3026527 / 3**0.5)
    assert not found.supported and paired([5.0, 6.0, 7.1], [1.0, 2.0, 3.0]).supported
    assert paired([1.0, 2.0, 3.0], [5.0, 6.0, 7.1]).supported
    assert paired([1, 2, 3], [0, 0, 0], level=0.5).high == pytest.approx(2 + 0.8164966 / 3**0.5)


def test_a_paired_interval_covers_the_true_difference_in_19_of_20_cases() -> None:
    """1,000 sets of four seeds with a common part of the seed: the count is within four standard errors (0.69 %)."""
    generator = np.random.default_rng(0)
    common = generator.normal(0, 5, (1000, 4))
    ours, theirs = common + generator.normal(1.5, 1, common.shape), common + generator.normal(0, 2, common.shape)
    found = [paired(one, other) for one, other in zip(ours, theirs, strict=True)]
    covered = np.mean([one.low <= 1.5 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.0276)


def test_six_times_the_variance_over_five_seeds_is_no_difference_of_spreads() -> None:
    found = spread_ratio([0.0, 2.5, -2.5, 1.25, -1.25], [0.0, 1.0, -1.0, 0.5, -0.5])
    assert found.ratio == pytest.approx(6.25)
    assert found.p == pytest.approx(0.104, abs=0.001)
    swapped = spread_ratio([0.0, 1.0, -1.0, 0.5, -0.5], [0.0, 2.5, -2.5, 1.25, -1.25])
    assert swapped.ratio == pytest.approx(1 / 6.25) and swapped.p == pytest.approx(found.p)


def test_equal_spreads_are_called_unlike_in_one_case_of_20() -> None:
    """1,000 pairs of samples of 5 and of 3: within four standard errors (0.69 %)."""
    values = np.random.default_rng(0).normal(0, 3, (1000, 8))
    alarms = np.mean([spread_ratio(one[:5], one[5:]).p < 0.05 for one in values])
    assert alarms == pytest.approx(0.05, abs=0.0276)


def test_what_a_single_seed_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="1 and 1 seeds"):
        paired([1.0], [1.0])
    with pytest.raises(ValueError, match="3 and 2 seeds"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="two seeds"):
        spread_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no spread"):
        spread_ratio([1.0, 2.0], [2.0, 2.0])
    assert spread([0.5]) == "50.00" and spread([0.5, 0.52]) == "51.00 ± 1.41"
    assert points(Difference(3, 0.012, -0.001, 0.025)) == "+1.20 [-0.10, +2.50]"


def test_the_table_says_how_many_evaluations_its_last_rounds_are() -> None:
    every, third = outcome(1, 99, 0.5), outcome(3, 99, 0.5)
    assert every.late == pytest.approx([0.6] * 10) and third.late == pytest.approx([0.6] * 4)
    assert averaged({"a": {0: every}, "b": {0: every}}) == "10"
    assert averaged({"a": {0: every}, "b": {0: third}}) == "4 to 10"
    assert "mean of 4 evaluations in the last 10 rounds" in table_of({"a": {0: third}}, None).splitlines()[0]


def test_systems_are_compared_seed_by_seed_over_the_seeds_that_both_have() -> None:
    reference = {seed: outcome(1, 20, level) for seed, level in enumerate((0.1, 0.3, 0.5, 0.7))}
    better = {seed: outcome(1, 20, level) for seed, level in ((3, 0.73), (1, 0.32), (0, 0.11), (9, 0.2))}
    lines = table_of({"a": reference, "b": better}, "a").splitlines()
    assert lines[2].startswith("| a | 4 |") and lines[2].endswith("|  |  |")
    assert lines[3].startswith("| b | 4 | 44.00 ± 27.39 |") and "| +2.00 [-0.48, +4.48] |" in lines[3]
    assert "1 shared seeds" in table_of({"a": {0: reference[0]}, "b": better}, "a")


def test_a_table_of_runs_is_trained_once_and_tabulated(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    common = ["rounds=3", "data.shards=digits:clients=10", "model.name=mlp", "checkpoint.every=0"]
    runs = {"One": ["participation.count=2"], "Two, E = 2": ["participation.count=2", "local.epochs=2"]}
    lines = [f"seeds = [0, 1]\ncommon = {json.dumps([*common, 'logging.tensorboard=false'])}\n[runs]"]
    table.write_text("\n".join([*lines, *(f"{json.dumps(name)} = {json.dumps(keys)}" for name, keys in runs.items())]))
    out = tmp_path / "runs"
    command = [sys.executable, "-m", "benchmarks.repeat", str(table), "--out", str(out), "--reference", "One"]
    nothing = subprocess.run([*command, "--finished"], capture_output=True, text=True)
    assert nothing.returncode == 2 and "holds no finished run" in nothing.stderr
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    folders = [run_folder(out, name, seed) for name in runs for seed in (0, 1)]
    assert all(map(finished, folders)) and len(read(folders[0]).accuracy) == 3
    written = [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert again == first and written == [(folder / "summary.json").stat().st_mtime_ns for folder in folders]
    assert [line.split("|")[1].strip() for line in first.splitlines()[2:]] == list(runs)
    assert "mean of 3 evaluations" in first and "[" in first.splitlines()[3]


def test_a_difference_known_by_its_spreads_has_welchs_interval() -> None:
    values, reference = [1.0, 2.0, 4.0], [0.0, 0.5, 0.2, 0.7]
    expected = stats.ttest_ind(values, reference, equal_var=False).confidence_interval(0.95)
    sides = [(float(np.mean(side)), float(np.std(side, ddof=1)), len(side)) for side in (values, reference)]
    found = welch(*sides)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high)) and found.n == 3
    with pytest.raises(ValueError, match="two seeds or more"):
        welch((1.0, 0.5, 1), (1.0, 0.5, 3))


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(str(intervals.__file__)).parent.glob("*.py")))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    importlib.import_module("benchmarks" if name == "__init__" else f"benchmarks.{name}")
