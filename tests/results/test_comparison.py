"""Runs put beside one another: what belongs together, means and intervals over seeds, costs to a target, tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console
from scipy import stats

from fedmpi import UserError
from fedmpi.cli import compare
from fedmpi.config.loading import nested
from fedmpi.results.comparison import Comparison, as_csv, as_latex, compare_runs, print_comparison
from fedmpi.results.loading import find_runs, read_runs

Record = dict[str, Any]
EVALUATION = {"evaluation.every": 1, "evaluation.on": "auto"}
"""Keys that every config.toml has."""


def write_run(
    folder: Path,
    accuracies: Sequence[float | None],
    config: Record | None = None,
    finished: bool = True,
    labels: Record | None = None,
    **further: Any,
) -> None:
    """The files of a run with these test accuracies; each round uses 10 samples and sends 1,000 bytes up and down."""
    folder.mkdir(parents=True)
    table = {"preset": "fedavg", "rounds": len(accuracies), "data.source": "digits", **EVALUATION, **(config or {})}
    (folder / "config.toml").write_text(tomli_w.dumps(nested(table)))
    with open(folder / "metrics.jsonl", "w") as file:
        for round, accuracy in enumerate(accuracies):
            record: Record = {"round": round, "samples": 10, "bytes_client_up": 400, "bytes_client_down": 600}
            record |= {"test_accuracy": accuracy, "test_loss": 1 - accuracy} if accuracy is not None else {}
            record |= {key: values[round] for key, values in further.items()}
            file.write(json.dumps(record) + "\n")
    if finished:
        (folder / "summary.json").write_text(json.dumps({"final": {"round": len(accuracies) - 1}, "clients": 20}))
    if labels is not None:
        (folder / "sweep.json").write_text(json.dumps({"labels": labels}))


def compared(folder: Path, **options: Any) -> Comparison:
    return compare_runs(read_runs(find_runs([folder])), **options)


@pytest.fixture
def systems(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Two presets, seeds 0 to 3 and 1 to 4; accuracies after three rounds."""
    generator = np.random.default_rng(5)
    curves = {"fedavg": generator.uniform(0.2, 0.9, (4, 3)), "fedprox": generator.uniform(0.2, 0.9, (4, 3))}
    for preset, first in (("fedavg", 0), ("fedprox", 1)):
        for number, curve in enumerate(curves[preset]):
            config = {"preset": preset, "seed": first + number, "local.proximal_mu": 0.1 if first else 0.0}
            write_run(tmp_path / "runs" / f"{preset}-{first + number}", list(curve), config)
    return tmp_path / "runs", curves


def test_seeds_are_averaged_and_differences_taken_over_those_that_both_have(
    systems: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, curves = systems
    [(block, [ours, theirs])] = compared(folder).blocks
    assert [row.group.label for row in (ours, theirs)] == ["fedavg", "fedprox"] and not block.notes
    assert ours.final.mean == pytest.approx(curves["fedavg"][:, -1].mean())
    assert ours.final.deviation == pytest.approx(np.sqrt(((curves["fedavg"][:, -1] - ours.final.mean) ** 2).sum() / 3))
    assert theirs.best.mean == pytest.approx(curves["fedprox"].max(1).mean())
    differences = curves["fedprox"][:3, -1] - curves["fedavg"][1:, -1]
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert theirs.common == (1, 2, 3) and theirs.interval is not None
    assert (theirs.interval.low, theirs.interval.high) == pytest.approx((expected.low, expected.high))
    assert theirs.difference == pytest.approx(differences.mean()) and ours.difference is None
    [(_, [first, _])] = compared(folder, reference="FedProx", last=2).blocks
    assert first.reference is not None and first.reference.label == "fedprox"
    assert first.final.mean == pytest.approx(curves["fedavg"][:, 1:].mean())


def test_what_a_target_took_is_counted_to_the_first_evaluation_that_reached_it(tmp_path: Path) -> None:
    clock = {"virtual_seconds": [5, 6, 7, 8]}
    write_run(tmp_path / "a", [0.1, None, 0.8, 0.7], {"seed": 0}, **clock)
    write_run(tmp_path / "b", [0.1, 0.8, 0.8, 0.9], {"seed": 1}, **clock)
    write_run(tmp_path / "c", [0.1, 0.2, 0.3, 0.79], {"seed": 2}, **clock)
    [(_, [row])] = compared(tmp_path, target=0.8).blocks
    assert row.reached == 2 and {key: cost.mean for key, cost in row.costs.items()} == {
        "round": 2.5,
        "samples": 25,
        "megabytes": 0.0025,
        "virtual_seconds": 14.5,
    }
    assert row.costs["round"].deviation == pytest.approx(0.5**0.5)
    [(_, [row])] = compared(tmp_path, metric="test_loss", target=0.75).blocks
    assert row.reached == 3 and row.costs["round"].mean == pytest.approx((3 + 2 + 3) / 3), "losses fall to a target"
    assert row.best.mean == pytest.approx((0.2 + 0.1 + 0.21) / 3) and row.final.mean == pytest.approx(
        (0.3 + 0.1 + 0.21) / 3
    )
    [(_, [row])] = compared(tmp_path, target=0.95).blocks
    assert row.reached == 0 and row.costs == {}
    assert "not reached" in rendered(compared(tmp_path, target=0.95))
    assert "2.5 ± 0.7 (2 of 3)" in rendered(compared(tmp_path, target=0.8))
    write_run(tmp_path / "own" / "a", [0.1, 0.6], {"evaluation.target_accuracy": 0.5})
    assert compared(tmp_path / "own").target == 0.5
    assert compared(tmp_path / "own", metric="test_loss").target is None, "an accuracy is no target of a loss"
    write_run(tmp_path / "own" / "b", [0.1, 0.6], {"evaluation.target_accuracy": 0.4, "seed": 1})
    assert compared(tmp_path / "own").target is None


def test_a_name_says_the_keys_of_its_values_but_those_of_variants(tmp_path: Path) -> None:
    for name, rounds, labels in (("a", 1, {"run": "short"}), ("b", 2, {"run": "long"}), ("c", 2, {})):
        write_run(tmp_path / name, [0.1] * rounds, {"local.lr": 0.5 if labels else 0.1}, labels=labels)
    [(_, rows)] = compared(tmp_path, by=("run", "rounds", "local.lr")).blocks
    expected = ["short, rounds = 1, lr = 0.5", "long, rounds = 2, lr = 0.5", "rounds = 2, lr = 0.1"]
    assert [row.group.label for row in rows] == expected
    lines = list(csv.DictReader(StringIO(as_csv(compared(tmp_path, by=("run", "rounds"))))))
    assert [(line["run"], line["rounds"]) for line in lines] == [("short", "1"), ("long", "2"), ("", "2")]
    rates = {"local.lr": 0.2, "server.optimizer.lr": 0.3}
    write_run(tmp_path / "rates" / "a", [0.1], rates)
    write_run(tmp_path / "rates" / "b", [0.1], rates | {"server.optimizer.lr": 0.4})
    [(_, [first, _])] = compared(tmp_path / "rates", by=("local.lr", "server.optimizer.lr")).blocks
    assert first.group.label == "local.lr = 0.2, server.optimizer.lr = 0.3"


def test_an_option_is_named_only_with_the_component_that_has_it(tmp_path: Path) -> None:
    stratified = {"clients.sampler": "stratified"}
    for name, config, labels in (
        ("two", stratified | {"clients.sampler.strata": 2}, {"clients.sampler.strata": 2}),
        ("ten", stratified | {"clients.sampler.strata": 10}, {"clients.sampler.strata": 10}),
        ("uniform", {"clients.sampler": "uniform"}, {}),
        ("adam", {"local.optimizer": "adam", "local.optimizer.beta1": 0.9}, {}),
        ("gone", {"clients.sampler": "no longer there"}, {}),
    ):
        write_run(tmp_path / name, [0.1], config, labels={"run": name, **labels})
    [(_, rows)] = compared(tmp_path).blocks
    assert {row.group.label for row in rows} == {"two, strata = 2", "ten, strata = 10", "uniform", "adam", "gone"}
    [(_, rows)] = compared(tmp_path, by=("run", "local.optimizer.beta1")).blocks
    assert [row.group.label for row in rows if "beta1" in row.group.label] == ["adam, beta1 = 0.9"]


def test_runs_on_other_data_or_evaluated_otherwise_are_not_compared(tmp_path: Path) -> None:
    for preset in ("fedavg", "fedadam"):
        for number, data in enumerate(("shards/mnist", "shards/emnist")):
            write_run(tmp_path / f"{preset}{number}", [0.1, 0.6], {"preset": preset, "data.source": data})
    write_run(tmp_path / "val", [0.1, 0.6], {"data.source": "shards/mnist", "evaluation.on": "both"})
    found = compared(tmp_path)
    assert [(block.title, [row.group.label for row in rows]) for block, rows in found.blocks] == [
        ("data.source = shards/mnist, evaluation.on = auto", ["fedadam", "fedavg"]),
        ("data.source = shards/emnist, evaluation.on = auto", ["fedadam", "fedavg"]),
        ("data.source = shards/mnist, evaluation.on = both", ["fedavg"]),
    ]
    assert "are not compared" in rendered(found)


def test_partitions_drawn_for_each_seed_are_one_data_set(tmp_path: Path) -> None:
    for seed in range(3):
        for preset in ("fedavg", "fedadam"):
            config = {"preset": preset, "seed": seed, "data.source": f"shards/mnist-dir0.1-{seed}"}
            write_run(tmp_path / f"{preset}{seed}", [0.1, 0.6], config)
    [(_, rows)] = compared(tmp_path).blocks
    assert [(row.group.label, sorted(row.group.runs)) for row in rows] == [
        ("fedadam", [0, 1, 2]),
        ("fedavg", [0, 1, 2]),
    ]


def test_a_folder_that_several_seeds_share_keeps_its_name(tmp_path: Path) -> None:
    for seed in (0, 10):
        write_run(tmp_path / str(seed), [0.1, 0.6], {"seed": seed, "data.source": "shards/mnist10"})
        write_run(tmp_path / f"{seed}b", [0.1, 0.6], {"seed": seed, "data.source": "shards/mnist"})
    assert [(block.title, rows[0].final.n) for block, rows in compared(tmp_path).blocks] == [
        ("data.source = shards/mnist10", 2),
        ("data.source = shards/mnist", 2),
    ]


def test_what_would_be_overlooked_is_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [0.1, 0.6, 0.7])
    write_run(tmp_path / "b", [0.1, 0.6], {"preset": "fedadam", "evaluation.every": 2})
    [(block, _)] = compared(tmp_path).blocks
    assert [note.split(" (")[0] for note in block.notes] == ["evaluation.every differs", "rounds differs"]


def test_labels_are_as_few_keys_as_distinguish_groups(tmp_path: Path) -> None:
    for number, (preset, lr, count) in enumerate((("fedavg", 0.1, 5), ("fedavg", 0.2, 6), ("fedadam", 0.1, 7))):
        write_run(tmp_path / str(number), [0.5], {"preset": preset, "local.lr": lr, "clients.count": count})
    [(_, rows)] = compared(tmp_path).blocks
    assert [row.group.label for row in rows] == ["fedavg, lr = 0.1", "fedavg, lr = 0.2", "fedadam, lr = 0.1"]
    [(_, rows)] = compared(tmp_path, by=["clients.count"]).blocks
    assert [row.group.label for row in rows] == ["count = 5", "count = 6", "count = 7"]
    with pytest.raises(UserError, match=r"--by preset puts runs together that differ in local.lr \(0.1, 0.2\)"):
        compared(tmp_path, by=["preset"])
    with pytest.raises(UserError, match=r"unknown key presett in --by; did you mean preset\?"):
        compared(tmp_path, by=["presett"])


def test_a_sweeps_names_are_kept_and_each_is_compared_with_its_like(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        for name, mu, gain in (("Fed Avg", 0.0, 0.0), ("Prox", 0.1, 0.05)):
            for lr in (0.1, 0.2):
                level = 0.5 + lr + gain + seed / 100 + gain * seed / 10
                labels = {"run": name, "seed": seed, "local.lr": lr}
                config = {"seed": seed, "local.lr": lr, "local.proximal_mu": mu}
                write_run(tmp_path / f"{name},{lr},{seed}", [level], config, labels=labels)
    found = compared(tmp_path, reference="fed avg")
    [(_, rows)] = found.blocks
    assert [row.group.label for row in rows] == [f"{n}, lr = {lr}" for n in ("Fed Avg", "Prox") for lr in (0.1, 0.2)]
    assert [row.reference.label if row.reference else "" for row in rows[2:]] == [
        "Fed Avg, lr = 0.1",
        "Fed Avg, lr = 0.2",
    ]
    assert all(row.difference == pytest.approx(0.055) for row in rows[2:])
    assert "difference to fed avg" in rendered(found) and "+5.50 [+4.26, +6.74] significant" in rendered(found)
    with pytest.raises(UserError, match="--reference FedSGD: .* Choose one of: Fed Avg, lr = 0.1;"):
        compared(tmp_path, reference="FedSGD")


def test_few_seeds_and_like_differences_give_no_interval(tmp_path: Path) -> None:
    for seed, level in ((0, 0.1), (1, 0.5)):
        write_run(tmp_path / f"a{seed}", [level], {"seed": seed})
        write_run(tmp_path / f"b{seed}", [level + 0.2], {"seed": seed, "preset": "fedadam"})
    write_run(tmp_path / "c", [0.4], {"seed": 1, "preset": "fedyogi"})
    write_run(tmp_path / "d", [0.4], {"seed": 7, "preset": "fedprox"})
    found = compared(tmp_path)
    assert [row.interval for _, rows in found.blocks for row in rows] == [None] * 4
    text = rendered(found)
    assert "+20.00 (n = 2 alike: no interval)" in text and "-10.00 (n = 1: no interval)" in text
    assert "no seed in common" in text and "in brackets" not in text


@pytest.mark.parametrize(
    ("gains", "significant"),
    [
        pytest.param([0.021], [True], id="one comparison keeps its 95 % interval"),
        pytest.param([0.021, 0.0, 0.001, -0.002], [False] * 4, id="the same difference among four"),
        pytest.param([0.021, 0.021, 0.021, 0.021], [True] * 4, id="four such differences support one another"),
        pytest.param([0.3, 0.021, 0.0], [True, False, False], id="one large, one small"),
    ],
)
def test_intervals_are_corrected_for_the_comparisons_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gains: list[float], significant: list[bool]
) -> None:
    noise = np.array([-0.01, 0.01, -0.01, 0.01])  # a gain of 0.021 has p = 0.036
    for number, gain in enumerate((0.0, *gains)):
        for seed, level in enumerate(0.5 + gain + noise * (number > 0)):
            labels = {"run": f"Method {number}", "seed": seed}
            config = {"seed": seed, "local.proximal_mu": float(number)}
            write_run(tmp_path / "runs" / f"{number}-{seed}", [level], config, labels=labels)
    compare([tmp_path / "runs"], csv=tmp_path / "table.csv", latex=tmp_path / "table.tex")
    reference, *lines = list(csv.DictReader(StringIO((tmp_path / "table.csv").read_text())))
    assert reference["significant"] == ""
    assert [line["significant"] for line in lines] == [str(one) for one in significant]
    assert [float(line["low"]) > 0 for line in lines] == significant
    level = 1 - max(sum(significant), 1) * 0.05 / len(gains)
    half = stats.t.ppf((1 + level) / 2, 3) * noise.std(ddof=1) / 2
    assert [float(line["high"]) - gain for line, gain in zip(lines, gains, strict=True)] == pytest.approx(
        [half] * len(gains)
    )
    assert {(line["comparisons"], line["level"]) for line in lines} == {(str(len(gains)), str(level))}
    shown, latex = " ".join(capsys.readouterr().out.split()), (tmp_path / "table.tex").read_text()
    for text in (shown, latex):
        assert f"{len(gains)} comparison" in text and "over 4 seeds" in text
    assert shown.count("] significant") == latex.count("]* ") == sum(significant)


def test_seeds_are_listed_in_their_order(tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        write_run(tmp_path / f"run-{seed}", [0.5], {"seed": seed, "data.verify": seed > 1})
    [(block, [row])] = compared(tmp_path).blocks
    assert list(row.group.runs) == [1, 2, 10] and block.notes == []
    write_run(tmp_path / "again", [0.5], {"seed": 2})
    with pytest.raises(UserError, match="/again and .*/run-2 are the same run, seed 2 included"):
        compared(tmp_path)


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "done", [0.1, 0.2])
    write_run(tmp_path / "half", [0.1], {"rounds": 9, "seed": 1}, finished=False)
    write_run(tmp_path / "other", [None, None], {"seed": 3})
    text = rendered(compared(tmp_path))
    assert f"not finished: {tmp_path}/half (1 of 9 rounds)" in text
    assert f"without test_accuracy in the end: {tmp_path}/other" in text
    with pytest.raises(UserError, match=r"no run is finished: .*half \(1 of 9 rounds\)"):
        compared(tmp_path / "half")
    with pytest.raises(UserError, match="no record has test_acuracy.*test_accuracy"):
        compared(tmp_path, metric="test_acuracy")


def test_a_loss_that_is_no_number_in_the_end_is_not_that_of_an_earlier_round(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", [0.1, 0.2], {"seed": seed}, test_loss=[0.5, None if seed else 0.4])
    found = compared(tmp_path, metric="test_loss")
    [(_, [row])] = found.blocks
    assert list(row.group.runs) == [0] and row.final.mean == 0.4
    assert f"without test_loss in the end: {tmp_path}/a1 (2 of 2 rounds), {tmp_path}/a2" in rendered(found)
    with pytest.raises(UserError, match="no run ends with a finite value of test_loss"):
        compared(tmp_path / "a1", metric="test_loss")
    assert compared(tmp_path).blocks[0][1][0].final.n == 3, "its accuracy is a number"


def test_the_best_of_a_divergence_is_the_least_and_of_a_count_there_is_none(tmp_path: Path) -> None:
    for seed in (0, 1):
        columns = {"kl_mean": [0.4, 0.1 + seed, 2.0], "size_epsilon_max": [3.0, 6.0, 9.0], "participants": [5, 9, 7]}
        write_run(tmp_path / str(seed), [0.1, 0.2, 0.15], {"seed": seed}, **columns)
    best = {}
    for metric in ("kl_mean", "size_epsilon_max", "participants", "test_loss", "test_accuracy"):
        found = compared(tmp_path, metric=metric)
        [(_, [row])] = found.blocks
        best[metric] = None if row.best is None else row.best.mean
        [line] = csv.DictReader(StringIO(as_csv(found)))
        assert line["best_mean"] == ("" if row.best is None else str(row.best.mean))
        assert ("best" in rendered(found).split("\n")[1]) == (row.best is not None)
    assert best.pop("participants") is None
    expected = {"kl_mean": 0.25, "size_epsilon_max": 3.0, "test_loss": 0.8, "test_accuracy": 0.2}
    assert best == pytest.approx(expected)


def rendered(comparison: Comparison, columns: int = 200) -> str:
    screen = Console(width=columns, file=StringIO(), color_system=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("builtins.print", lambda text: screen.file.write(f"{text}\n"))
        print_comparison(comparison, screen)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_tables_fit_the_terminal_and_lose_no_number(systems: tuple[Path, dict[str, np.ndarray]], columns: int) -> None:
    found = compared(systems[0], target=0.5)
    table = [line for line in rendered(found, columns).splitlines() if line.startswith(("│", "┃"))]
    assert table and max(map(len, table)) <= columns
    [(_, rows)] = found.blocks
    shown = " ".join(table)
    for row in rows:
        assert f"{100 * row.final.mean:.2f} ± {100 * (row.final.deviation or 0):.2f}" in shown
        assert f"{100 * row.final.mean:.2f}" in shown and f"{100 * row.best.mean:.2f}" in shown
        assert f"{row.costs['samples'].mean:,.0f}" in shown and "…" not in shown


def test_csv_has_all_digits_and_latex_is_escaped(systems: tuple[Path, dict[str, np.ndarray]]) -> None:
    found = compared(systems[0], target=0.5)
    [(_, rows)] = found.blocks
    lines = list(csv.DictReader(StringIO(as_csv(found))))
    for line, row in zip(lines, rows, strict=True):
        assert line["group"] == line["preset"] == row.group.label and line["n"] == "4"
        assert float(line["mean"]) == row.final.mean and float(line["round_mean"]) == row.costs["round"].mean
    assert row.interval is not None and row.difference is not None
    assert (float(lines[1]["difference"]), float(lines[1]["low"])) == (row.difference, row.interval.low)
    assert lines[1]["reference"] == "fedavg" and lines[1]["common_seeds"] == "1 2 3" and lines[0]["low"] == ""
    text = as_latex(found)
    assert r"test accuracy, \%" in text and text.count(" & 4 & ") == 2 and "]* &" not in text.splitlines()[5]
    assert text.count("{") == text.count("}")


def test_numbers_in_a_table_of_a_record_are_compared_too(tmp_path: Path) -> None:
    for preset, share in (("fedavg", 0.25), ("fedprox", 0.5)):
        for seed in (0, 1):
            tables = [{"overhead": share + seed, "mode": "virtual"}, {}]
            write_run(tmp_path / f"{preset}{seed}", [0.5, 0.6], {"preset": preset, "seed": seed}, rebalancing=tables)
    [(_, rows)] = compared(tmp_path, metric="rebalancing.overhead").blocks
    assert [row.final.mean for row in rows] == [0.75, 1.0]
    with pytest.raises(UserError, match=r"no record has rebalancing.mode"):
        compared(tmp_path, metric="rebalancing.mode")


def test_no_name_changes_what_latex_reads(tmp_path: Path) -> None:
    for number, name in enumerate(("100 %\n&", "a_b")):
        for data in ("c", "a\\input{b}\nc"):
            config = {"local.lr": 0.1 * (number + 1), "data.source": data}
            write_run(tmp_path / f"{number}{data[0]}", [0.5], config, labels={"run": name})
    text = as_latex(compared(tmp_path))
    assert text.count(r"100 \% \& & 1") == text.count(r"a\_b & 1") == 2
    assert all(one[:1] in ("", "\\", "%", "1", "a", " ") for one in text.splitlines())


def test_a_reference_lacks_only_what_its_sweep_gave_it(tmp_path: Path) -> None:
    """A variant lists μ, which the reference does not know; rates are crossed; one variant has another rate."""
    for seed in (0, 1):
        runs = [("FedAvg", lr, 0.0, {}) for lr in (0.1, 0.2)]
        runs += [("Prox", lr, mu, {"local.proximal_mu": mu}) for lr in (0.1, 0.2) for mu in (0.1, 1.0)]
        for name, lr, mu, own in [*runs, ("Alone", 0.3, 0.0, {})]:
            labels = {"run": name, "seed": seed, "local.lr": lr, **own}
            config = {"seed": seed, "local.lr": lr, "local.proximal_mu": mu}
            write_run(tmp_path / f"{name},{lr},{mu},{seed}", [lr + mu / 2 + seed / 100], config, labels=labels)
    found = compared(tmp_path, reference="FedAvg")
    [(_, rows)] = found.blocks
    differences = {row.group.label: row.difference for row in rows if row.reference and row.reference is not row.group}
    expected = {f"Prox, lr = {lr}, proximal_mu = {mu}": mu / 2 for lr in (0.1, 0.2) for mu in (0.1, 1.0)}
    assert differences == pytest.approx(expected)
    words = "no row named FedAvg is otherwise as Alone, lr = 0.3, proximal_mu = 0.0: no difference is shown"
    assert words in " ".join(rendered(found).split())


def test_of_several_references_the_one_that_is_most_alike_counts(tmp_path: Path) -> None:
    """One sweep has another rate for all variants and does not name it; the other one crosses rates."""
    for lr, own in ((0.05, {}), (0.1, {"local.lr": 0.1}), (0.2, {"local.lr": 0.2})):
        for name, mu in (("FedAvg", 0.0), ("Prox", 0.1)):
            config = {"local.lr": lr, "local.proximal_mu": mu}
            write_run(tmp_path / f"{name},{lr}", [lr + mu], config, labels={"run": name, **own})
    [(_, rows)] = compared(tmp_path, reference="FedAvg").blocks
    assert {row.group.label: row.reference.label for row in rows if row.reference} == {
        f"Prox, lr = {lr}": f"FedAvg, lr = {lr}" for lr in (0.05, 0.1, 0.2)
    }
