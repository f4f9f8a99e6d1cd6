"""Runs put beside one another: what belongs together, means and intervals over seeds, costs to a target, tables."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedmpi import Config, UserError
from fedmpi.config.loading import nested
from fedmpi.config.writing import flat_table
from fedmpi.results.comparison import (
    Comparison,
    Spread,
    as_csv,
    as_latex,
    compare_runs,
    judged,
    print_comparison,
    spent,
)
from fedmpi.results.loading import OneRun, differing, grouped, read_runs

Table = dict[str, Any]
NUMBERS = count()


def run(
    scores: Sequence[float | None] = (0.5,), table: Table | None = None, labels: Table | None = None, **more: Any
) -> OneRun:
    """A finished run with these test accuracies; each round uses 10 samples and sends 1,000 bytes up and down."""
    work = {"samples": 10, "bytes_client_up": 400, "bytes_client_down": 600}
    records: list[Table] = [{"round": t, **work} for t in range(len(scores))]
    for record, score in zip(records, scores, strict=True):
        record |= {} if score is None else {"test_accuracy": score, "test_loss": 1 - score}
        record |= {key: values[record["round"]] for key, values in more.items()}
    table = {"preset": "fedavg", "rounds": len(scores), "data.source": "digits", **(table or {})}
    return OneRun(Path(f"run{next(NUMBERS)}"), table, records, {"clients": 20}, "finished", labels or {})


def rendered(comparison: Comparison, columns: int = 200) -> str:
    screen = Console(width=columns, file=StringIO(), color_system=None)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("builtins.print", lambda text: screen.file.write(f"{text}\n"))
        print_comparison(comparison, screen)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue()


def lines_of(comparison: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(as_csv(comparison))))


CURVES = np.random.default_rng(5).uniform(0.2, 0.9, (2, 4, 3))
METHODS = [
    run(list(CURVES[number, seed]), {"preset": preset, "seed": number + seed, "local.proximal_mu": mu})
    for number, (preset, mu) in enumerate((("fedavg", 0.0), ("fedprox", 0.1)))
    for seed in (3, 1, 2, 0)
]
"""Two presets, seeds 0 to 3 and 1 to 4; accuracies after three rounds."""


def test_seeds_are_averaged_and_differences_taken_over_those_that_both_have() -> None:
    ours, theirs = compare_runs(METHODS).rows
    assert [row.group.label for row in (ours, theirs)] == ["fedavg", "fedprox"]
    assert [list(row.group.runs) for row in (ours, theirs)] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert ours.final.mean == pytest.approx(CURVES[0, :, -1].mean())
    assert ours.final.deviation == pytest.approx(np.sqrt(((CURVES[0, :, -1] - ours.final.mean) ** 2).sum() / 3))
    assert theirs.best is not None and theirs.best.mean == pytest.approx(CURVES[1].max(1).mean())
    differences = CURVES[1, :3, -1] - CURVES[0, 1:, -1]
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert theirs.differences == pytest.approx(differences) and theirs.interval is not None and not ours.differences
    assert (theirs.interval.low, theirs.interval.high) == pytest.approx((expected.low, expected.high))
    first = compare_runs(METHODS, reference="Fed Prox", last=2).rows[0]
    assert first.reference is not None and first.reference.label == "fedprox"
    assert first.final.mean == pytest.approx(CURVES[0, :, 1:].mean())


def test_costs_of_a_target_are_counted_to_the_first_evaluation_that_reached_it() -> None:
    scores = [[0.1, None, 0.8, 0.7], [0.1, 0.8, 0.8, 0.9], [0.1, 0.2, 0.3, 0.79]]
    runs = [run(one, {"seed": seed}, virtual_seconds=[5, 6, 7, 8]) for seed, one in enumerate(scores)]
    found = compare_runs(runs, target=0.8)
    [row] = found.rows
    expected = {"round": 2.5, "samples": 25, "megabytes": 0.0025, "virtual_seconds": 14.5}
    assert row.reached == 2 and {key: cost.mean for key, cost in row.costs.items()} == expected
    assert "2.50 ± 0.71 (2 of 3)" in " ".join(rendered(found).split())
    found = compare_runs(runs, metric="test_loss", target=0.75)
    [row] = found.rows
    assert row.reached == 3 and row.costs["round"].mean == pytest.approx((3 + 2 + 3) / 3), "losses fall to a target"
    assert row.best is not None and row.best.mean == pytest.approx((0.2 + 0.1 + 0.21) / 3)
    assert row.final.mean == pytest.approx((0.3 + 0.1 + 0.21) / 3)
    found = compare_runs(runs, target=0.95)
    assert found.rows[0].reached == 0 and not found.rows[0].costs and "not reached" in rendered(found)
    own = [run(table={"seed": seed, "evaluation.target_accuracy": 0.5 - seed / 10}) for seed in (0, 1)]
    assert compare_runs(own[:1]).target == 0.5 and compare_runs(own).target is None
    assert compare_runs(own[:1], metric="test_loss").target is None, "an accuracy is no target of a loss"


def of_configs(*tables: Table) -> list[OneRun]:
    """Runs with all keys of their configurations; None leaves one out."""
    given = [{key: value for key, value in ({"preset": "fedavg"} | one).items() if value is not None} for one in tables]
    return [replace(run(), table=flat_table(Config(**nested(table)))) for table in given]


SWEPT = [
    run(
        [0.5 + lr + mu / 10 + seed / 100 + mu * seed / 100],
        {"seed": seed, "local.lr": lr, "local.proximal_mu": mu},
        labels,
    )
    for seed in (0, 1, 2)
    for name, lr, mu in (
        ("Fed Avg", 0.1, 0),
        ("Fed Avg", 0.2, 0),
        ("Prox", 0.1, 0.5),
        ("Prox", 0.2, 0.5),
        ("X", 0.3, 0),
    )
    for labels in [{"run": name, "seed": seed, "local.lr": lr} | ({"local.proximal_mu": mu} if name == "Prox" else {})]
]
"""Two methods with two rates each; the second has a further key. One method has another rate."""
LABELS: dict[str, tuple[list[OneRun], Sequence[str], list[str]]] = {
    "what a sweep varied for each": (
        [
            run(table={"local.lr": 0.1 + 0.1 * number}, labels=one)
            for number, one in enumerate(
                [
                    {"run": "a", "local.lr": 0.1},
                    {"run": "a", "local.lr": 0.2},
                    {"run": "b", "x": "c"},
                    {"run": "b", "x": "d"},
                ]
            )
        ],
        (),
        ["a, lr = 0.1", "a, lr = 0.2", "b, c", "b, d"],
    ),
    "a sweep and other runs": ([run(labels={"run": "a"}), run(table={"local.lr": 0.5})], (), ["a", "lr = 0.5"]),
    "as few keys as suffice": (
        [
            run(table={"preset": preset, "local.lr": lr, "clients.count": number})
            for number, (preset, lr) in enumerate((("fedavg", 0.1), ("fedavg", 0.2), ("fedadam", 0.1)))
        ],
        (),
        ["fedavg, lr = 0.1", "fedavg, lr = 0.2", "fedadam, lr = 0.1"],
    ),
    "given keys": (
        [run([0.1] * (number + 1), {"local.lr": 0.5}, {"run": "ab"[number]}) for number in range(2)],
        ("run", "rounds", "local.lr"),
        ["a, rounds = 1, lr = 0.5", "b, rounds = 2, lr = 0.5"],
    ),
    "keys that end alike": (
        [run(table={"local.lr": 0.2, "server.optimizer.lr": rate}) for rate in (0.3, 0.4)],
        ("local.lr", "server.optimizer.lr"),
        [f"local.lr = 0.2, server.optimizer.lr = {rate}" for rate in (0.3, 0.4)],
    ),
    "other sources": ([run(table={"plugins": digest}) for digest in "ab"], (), ["plugins = a", "plugins = b"]),
    "a key that one preset has": (
        of_configs({}, {"preset": "fedsampling", "clients.sampler": "all", "samples.budget": 99}),
        (),
        ["fedavg", "fedsampling"],
    ),
    "epochs and steps": (of_configs({"local.epochs": 1}, {"local.steps": 5}), (), ["epochs = 1", "steps = 5"]),
    "no preset": (of_configs({}, {"preset": None, "clients.count": 3}), (), ["fedavg", "count = 3"]),
    "no low-rank matrices": (of_configs({}, {"model.lora": {"rank": 2}}), (), ["without model.lora.rank", "rank = 2"]),
}


@pytest.mark.parametrize("case", LABELS)
def test_every_group_is_named_by_what_distinguishes_it(case: str) -> None:
    runs, by, labels = LABELS[case]
    assert [group.label for group in grouped(runs, by)] == labels


REFERENCES: dict[str, tuple[list[OneRun], str | None, list[str]]] = {
    "the one whose rate is the same": (SWEPT, "fed avg", ["Fed Avg, lr = 0.1", "Fed Avg, lr = 0.2"] * 2 + [""]),
    "the first": (SWEPT, None, ["Fed Avg, lr = 0.1"] * 5),
    "a whole name": (SWEPT, "X,lr=0.3", ["X, lr = 0.3"] * 5),
    "the most similar": (
        [
            run(table={"local.lr": lr, "mu": mu}, labels={"run": name, **own})
            for lr, own in ((1, {}), (2, {"local.lr": 2}))
            for name, mu in (("Avg", 0), ("Prox", 1))
        ],
        "Avg",
        ["Avg", "Avg", "Avg, lr = 2", "Avg, lr = 2"],
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_each_group_is_compared_with_its_like(case: str) -> None:
    runs, name, expected = REFERENCES[case]
    rows = compare_runs(runs, reference=name).rows
    assert [row.reference.label if row.reference else "" for row in rows] == expected


def test_the_table_shows_differences_to_the_requested_reference() -> None:
    found = compare_runs(SWEPT, reference="fed avg")
    assert [np.mean(row.differences) for row in found.rows[2:4]] == pytest.approx([0.055] * 2)
    text = " ".join(rendered(found).split())
    assert "difference to fed avg" in text and "+5.5 [+4.3, +6.7] significant" in text
    assert "no row named fed avg is otherwise as X, lr = 0.3: no difference is shown" in text


ERRORS: dict[str, tuple[list[OneRun], dict[str, Any], str]] = {
    "nothing is finished": ([replace(METHODS[0], summary={})], {}, r"no run is finished: run\d+ \(3 of 3 rounds\)"),
    "no such metric": (METHODS, {"metric": "test_acuracy"}, "test_acuracy.*test_accuracy, test_loss"),
    "not finite in the end": ([run([0.1, 0.2], test_loss=[0.5, None])], {"metric": "test_loss"}, "a number test_loss"),
    "a table": ([run(rebalancing=[{"mode": "virtual"}])], {"metric": "rebalancing.mode"}, "a number rebalancing.mode"),
    "no such reference": (SWEPT, {"reference": "FedSGD"}, "--reference FedSGD: .*: Fed Avg, lr = 0.1;"),
    "different runs together": (METHODS, {"by": ["rounds"]}, "--by rounds .*differ in preset, local.proximal_mu"),
    "no such key": (METHODS, {"by": ["presett"]}, "presett in --by; did you mean preset"),
    "a run twice": ([run(), run()], {}, r"run\d+ and run\d+ are the same run, seed 0 included"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_compared_is_rejected(case: str) -> None:
    runs, options, words = ERRORS[case]
    with pytest.raises(UserError, match=words):
        compare_runs(runs, **options)


def test_runs_on_other_data_or_evaluated_otherwise_are_not_compared() -> None:
    runs = [
        run(table={"preset": preset, "data.source": data}) for preset in "ab" for data in ("shards/one", "shards/two")
    ]
    found = compare_runs([*runs, run(table={"data.source": "shards/one", "evaluation.on": "both"})])
    assert {data: [row.group.label for row in rows] for data, rows in found.tables.items()} == {
        "data.source = shards/one": ["a", "b"],
        "data.source = shards/two": ["a", "b"],
        "data.source = shards/one, evaluation.on = both": ["fedavg"],
    }
    assert "are not compared" in rendered(found)


def test_runs_that_end_early_otherwise_are_rows_of_their_own() -> None:
    runs = [run(table={"evaluation.patience": patience, "seed": seed}) for patience in (1, 3) for seed in (0, 1)]
    assert [row.group.label for row in compare_runs(runs).rows] == ["patience = 1", "patience = 3"]


DATA = {
    "a partition for each seed": ([("mnist-dir0.1-0", "", 0), ("mnist-dir0.1-1", "", 1)], ["mnist-dir0.1-{seed}"]),
    "one folder of several seeds": ([("mnist10", "", 10), ("mnist10", "", 0), ("mnist", "", 0)], ["mnist10", "mnist"]),
    "a copy": ([("here", "abc", 0), ("there", "abc", 1)], ["here"]),
    "prepared again": ([("here", "abc", 0), ("here", "def", 1)], ["here (sha256 abc)", "here (sha256 def)"]),
}


@pytest.mark.parametrize("case", DATA)
def test_data_are_the_same_by_checksum_or_by_name_without_the_seed(case: str) -> None:
    made, names = DATA[case]
    runs = [replace(run(table={"data.source": source, "seed": seed}), data=data) for source, data, seed in made]
    groups = grouped(runs)
    assert [group.data.removeprefix("data.source = ") for group in groups] == (names if len(names) > 1 else [""])
    assert {group.runs[seed].table["data.source"] for group in groups for seed in group.runs} == set(names)


def test_facts_that_would_be_overlooked_are_noted() -> None:
    runs = [run([0.1, 0.6, 0.7]), run([0.1, 0.6], {"preset": "fedadam", "evaluation.every": 2})]
    runs += [replace(run([0.1], {"rounds": 9, "seed": 1}), summary={}), run([None, None], {"seed": 3})]
    text = rendered(compare_runs(runs))
    for words in (
        "evaluation.every differs (1, 2): ",
        "rounds differs (3, 2): ",
        f"left out, not finished: {runs[2].folder} (1 of 9 rounds)",
        f"left out, without test_accuracy in the end: {runs[3].folder} (2 of 2 rounds)",
    ):
        assert words in text


def test_a_loss_that_is_no_number_in_the_end_is_not_that_of_an_earlier_round() -> None:
    runs = [run([0.1, 0.2], {"seed": seed}, test_loss=[0.5, None if seed else 0.4]) for seed in range(3)]
    [row] = compare_runs(runs, metric="test_loss").rows
    assert list(row.group.runs) == [0] and row.final.mean == 0.4
    assert compare_runs(runs).rows[0].final.n == 3, "its accuracy is a number"


def test_few_seeds_and_like_differences_give_no_interval() -> None:
    runs = [run([0.1 + 0.4 * seed], {"seed": seed}) for seed in (0, 1)]
    runs += [run([0.3 + 0.4 * seed], {"seed": seed, "preset": "fedadam"}) for seed in (0, 1)]
    runs += [run([0.4], {"seed": 1, "preset": "fedyogi"}), run([0.4], {"seed": 7, "preset": "fedprox"})]
    found = compare_runs(runs)
    text = rendered(found)
    assert not any(row.interval for row in found.rows) and "In brackets" not in text
    for words in ("+20 (n = 2 alike: no interval)", "-10 (n = 1: no interval)", "no seed in common"):
        assert words in text


@pytest.mark.parametrize(
    ("gains", "significant"),
    [
        pytest.param([0.021], [True], id="one comparison keeps its 95 % interval"),
        pytest.param([0.021, 0.0, 0.001, -0.002], [False] * 4, id="the same difference among four"),
        pytest.param([0.021, 0.021, 0.021, 0.021], [True] * 4, id="four such differences support one another"),
        pytest.param([0.3, 0.021, 0.0], [True, False, False], id="one large, one small"),
    ],
)
def test_intervals_are_corrected_for_the_comparisons_of_the_table(gains: list[float], significant: list[bool]) -> None:
    noise = np.array([-0.01, 0.01, -0.01, 0.01])  # a gain of 0.021 has p = 0.036
    found = compare_runs(
        [
            run([level], {"seed": seed, "mu": number}, {"run": f"Method {number}"})
            for number, gain in enumerate((0.0, *gains))
            for seed, level in enumerate(0.5 + gain + noise * (number > 0))
        ]
    )
    reference, *lines = lines_of(found)
    assert reference["significant"] == ""
    assert [line["significant"] for line in lines] == [str(one) for one in significant]
    assert [float(line["low"]) > 0 for line in lines] == significant
    level = 1 - max(sum(significant), 1) * 0.05 / len(gains)
    half = stats.t.ppf((1 + level) / 2, 3) * noise.std(ddof=1) / 2
    assert [float(line["high"]) - gain for line, gain in zip(lines, gains, strict=True)] == pytest.approx(
        [half] * len(gains)
    )
    assert {line["level"] for line in lines} == {str(level)}
    shown, latex = " ".join(rendered(found).split()), as_latex(found)
    assert all(f"{len(gains)} comparison" in text and "over 4 seeds" in text for text in (shown, latex))
    assert shown.count("] significant") == latex.count("]* ") == sum(significant)


def test_the_best_of_a_divergence_is_the_least_and_of_a_count_there_is_none() -> None:
    columns = {"size_epsilon_max": [3.0, 6.0, 9.0], "participants": [5, 9, 7], "client_accuracy_jain": [0.5, 0.9, 0.7]}
    runs = [run([0.1, 0.2, 0.15], {"seed": one}, kl_mean=[0.4, 0.1 + one, 2.0], **columns) for one in (0, 1)]
    expected = {"kl_mean": 0.25, "size_epsilon_max": 3, "participants": None, "client_accuracy_jain": 0.9}
    for metric, best in (expected | {"test_loss": 0.8, "test_accuracy": 0.2}).items():
        found = compare_runs(runs, metric=metric)
        [line] = lines_of(found)
        assert float(line["best_mean"] or "nan") == pytest.approx(best or math.nan, nan_ok=True)
        assert ("best" in rendered(found).split("\n")[1]) == (best is not None)


def test_numbers_in_a_table_of_a_record_are_compared_too() -> None:
    runs = [
        run([0.5, 0.6], {"preset": preset, "seed": seed}, rebalancing=[{"overhead": share + seed}, {}])
        for preset, share in (("fedavg", 0.25), ("fedprox", 0.5))
        for seed in (0, 1)
    ]
    assert [row.final.mean for row in compare_runs(runs, metric="rebalancing.overhead").rows] == [0.75, 1.0]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_fit_the_terminal_and_lose_no_number(columns: int) -> None:
    found = compare_runs(METHODS, target=0.5)
    table = [line for line in rendered(found, columns).splitlines() if line.startswith(("│", "┃"))]
    assert table and max(map(len, table)) <= columns
    shown = " ".join(table)
    for row in found.rows:
        assert row.best is not None
        for text in (row.final.text(100), row.best.text(100), row.costs["samples"].text()):
            assert " ".join(text.split()) in shown
    assert "…" not in shown


def test_csv_has_all_digits_and_latex_is_escaped() -> None:
    found = compare_runs(METHODS, target=0.5)
    lines, (_, row) = lines_of(found), found.rows
    for line, one in zip(lines, found.rows, strict=True):
        assert line["group"] == line["preset"] == one.group.label and line["n"] == "4"
        assert float(line["mean"]) == one.final.mean and float(line["round_mean"]) == one.costs["round"].mean
    assert row.interval is not None and float(lines[1]["low"]) == row.interval.low and lines[0]["low"] == ""
    assert float(lines[1]["difference"]) == pytest.approx(row.interval.mean) and lines[1]["pairs"] == "3"
    assert lines[1]["reference"] == "fedavg"
    assert r"test accuracy, \%" in as_latex(found) and as_latex(found).count(" & 4 & ") == 2
    names, sources = ("100 %\n&", "a_b"), ("c", "a\\input{b}\nc")
    odd = [run(table={"lr": n, "data.source": s}, labels={"run": n}) for n in names for s in sources]
    text = as_latex(compare_runs(odd))
    assert text.count(r"100 \% \& & 1") == text.count(r"a\_b & 1") == 2 and text.count("{") == text.count("}")
    assert all(one[:1] in ("", "\\", "%", "1", "a", " ") for one in text.splitlines())


def test_time_is_summed_only_if_it_was_simulated_from_the_first_round() -> None:
    records = [{"round": t, "samples": 10, "seconds": 0.5, "bytes_mediator_down": 10**6 * t or None} for t in range(3)]
    expected = {"round": [1, 2, 3], "samples": [10, 20, 30], "megabytes": [0, 1, 3], "seconds": [0.5, 1, 1.5]}
    assert {axis: x.tolist() for axis, x in spent(records).items()} == expected
    timed = [{**record, "virtual_seconds": 2.0} for record in records]
    assert spent(timed)["virtual_seconds"].tolist() == [2, 4, 6]
    assert "virtual_seconds" not in spent([*timed[:1], *records[1:]])
    assert judged([{"round": 0}, {"test_accuracy": 1}]) == "test_accuracy" and judged([{}]) == "val_accuracy"


def test_values_that_are_equal_except_for_rounding_have_no_spread() -> None:
    assert Spread.of([971.7, 971.7 * (1 + 2e-16), 971.7]) == Spread(3, pytest.approx(971.7), 0.0)
    assert Spread.of([1.0]) == Spread(1, 1.0, None) and Spread.of([]) is None
    assert Spread.of([1.0, 2.0]) == Spread(2, 1.5, 0.5**0.5)
    texts = [Spread(2, mean, deviation).text() for mean, deviation in ((0.5, 0.0123), (12_345.6, 0), (8, 2e9))]
    assert [" ".join(text.split()) for text in texts] == ["0.500 ± 0.012", "12,346", "8 ± 2,000,000,000"]


def test_keys_that_differ_are_listed_before_the_sources_of_components() -> None:
    tables = [{"plugins": "a", "rounds": 1, "seed": 0}, {"plugins": "b", "rounds": 2, "seed": 0, "preset": "fedavg"}]
    assert differing(tables) == ["rounds", "preset", "plugins"]


def test_runs_are_found_by_name_and_below_folders_once_each_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["deep/epochs=1", "deep/epochs=5", "deep/epochs=20", "lr=1e-05", "lr=0.01", "lr=1e+16", "t=07", "t=7"]
    for name in (*reversed(names), "t=7/plugins/own"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "figures").mkdir()
    (tmp_path / "sweep.toml").touch()
    assert [str(one.folder.relative_to(tmp_path)) for one in read_runs([tmp_path])] == names
    assert [one.name for one in read_runs([tmp_path / "t=7", f"{tmp_path}/*t=*"])] == ["t=7", "t=07"]
    for name in ("none", "figures"):
        with pytest.raises(UserError, match=f"{name} holds a run"):
            read_runs([tmp_path / name])
