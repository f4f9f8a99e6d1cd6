"""The page of a report: its numbers are those of the records, it contains all it needs, and bad input is rejected."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.records.history import clients_from_text
from fedmpi.records.tables import ClientTable, read_clients
from fedmpi.report import curves as panels
from fedmpi.report.curves import MOST_ROUNDS, Configuration, completed, configurations, curves, thinned
from fedmpi.report.page import page_contents, render_page, write_report
from fedmpi.results.loading import OneRun, find_runs, read_runs

SMALL: dict[str, Any] = {
    "rounds": 3,
    "logging.participants": True,
    "logging.tensorboard": False,
    "cluster.threads": 1,
    "checkpoint.every": 0,
}
STRATA = {"clients.sampler.strata": 4, "clients.count": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one configuration, and one run of another."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        fedmpi.run("fedavg", SMALL | {"seed": seed}, out=folder / f"plain-{seed}")
    fedmpi.run("fedstas-dp", SMALL | STRATA | {"evaluation.clients": "all"}, out=folder / "strata")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[OneRun]:
    return read_runs(find_runs([folder]))


@pytest.fixture(scope="module")
def shown(runs: list[OneRun]) -> dict[str, Any]:
    return json.loads(json.dumps(page_contents(runs, "all <three> of them")))


def of(runs: list[OneRun], preset: str) -> list[OneRun]:
    return [run for run in runs if run.table["preset"] == preset]


def test_curves_are_mean_and_deviation_of_the_records_over_seeds(runs: list[OneRun], shown: dict[str, Any]) -> None:
    group = next(group for group in shown["configurations"] if group["label"] == "fedavg")
    both = of(runs, "fedavg")
    assert group["seeds"] == [0, 1] and group["rounds"] == 3
    for key in ("test_accuracy", "train_loss", "samples"):
        values = np.array([[record[key] for record in run.records] for run in both])
        assert group["y"][key]["mean"] == pytest.approx(values.mean(axis=0), rel=1e-4)
        assert group["y"][key]["deviation"] == pytest.approx(values.std(axis=0, ddof=1), rel=1e-4, abs=1e-9)
        assert group["y"][key]["n"] == [2, 2, 2]
    samples = np.array([[record["samples"] for record in run.records] for run in both]).cumsum(axis=1)
    megabytes = np.array([[r["bytes_client_up"] + r["bytes_client_down"] for r in run.records] for run in both]) / 1e6
    assert group["x"]["round"] == [1, 2, 3]
    assert group["x"]["samples"] == pytest.approx(samples.mean(axis=0), rel=1e-4)
    assert group["x"]["megabytes"] == pytest.approx(megabytes.cumsum(axis=1).mean(axis=0), rel=1e-4)
    last = [run.records[-1]["test_accuracy"] for run in both]
    assert group["final"]["test_accuracy"] == pytest.approx([np.mean(last), np.std(last, ddof=1)], rel=1e-4)
    assert group["best"]["test_accuracy"][0] == pytest.approx(
        np.mean([max(record["test_accuracy"] for record in run.records) for run in both]), rel=1e-4
    )
    sent = [group["totals"][f"MB {way} clients"] for way in ("from", "to")]
    assert sum(sent) == pytest.approx(megabytes.sum(axis=1).mean(), rel=1e-4)
    trained = np.mean([record["phase_seconds"]["train"] for run in both for record in run.records])
    assert group["totals"]["ms to train"] == pytest.approx(1000 * trained, rel=1e-4)


def test_settings_are_different_or_common(shown: dict[str, Any]) -> None:
    differences, common = {row[0]: row[1:] for row in shown["differences"]}, dict(shown["common"])
    assert differences["preset"] == ["fedavg", "fedstas-dp"]
    assert differences["samples.size.epsilon"][0] == "\u2013" and "seed" not in differences | common
    assert common["rounds"] == "3" and not differences.keys() & common.keys()


def test_selected_clients_strata_and_sizes_are_those_of_the_records(runs: list[OneRun], shown: dict[str, Any]) -> None:
    (run,) = of(runs, "fedstas-dp")
    drawn = next(one for one in shown["runs"] if one["name"] == "strata")
    there = np.zeros((20, 3), int)
    for record in run.records:
        there[clients_from_text(record["clients"]), record["round"]] = 1
    assert drawn["participation"]["counts"] == there.tolist()
    assert drawn["participation"]["rounds"] == [1, 2, 3, 4]
    assert drawn["participation"]["evenness"]["used"] == pytest.approx((there.sum(axis=1) > 0).mean())
    cells = [
        [record["round"] + 1, h + 1, size, taken]
        for record in run.records
        for h, (size, taken) in enumerate(zip(record["stratum_sizes"], record["allocation"], strict=True))
    ]
    assert drawn["strata"] == cells
    ratio = [record["size_estimate"] / record["size_true"] for record in run.records]
    group = shown["configurations"][drawn["configuration"]]
    assert group["y"]["size_ratio"]["mean"] == pytest.approx(ratio, rel=1e-4)
    assert "deviation" not in group["y"]["size_ratio"]


def test_a_round_without_allocation_draws_from_no_stratum() -> None:
    rounds = [{"round": 0, "stratum_sizes": [4, 5]}, {"round": 1, "stratum_sizes": [3, 6], "allocation": [1, 2]}]
    assert panels.strata(OneRun(Path("x"), {}, rounds, {}, "")) == [[2, 1, 3, 1], [2, 2, 6, 2]]


def test_many_clients_and_rounds_share_cells_and_none_is_lost() -> None:
    cohorts = [np.arange(t, 10_000, 7) for t in range(333)]
    records = [{"round": t, "clients": " ".join(map(str, cohort))} for t, cohort in enumerate(cohorts)]
    run = OneRun(Path("many"), {}, records, {"clients": 10_000}, "finished")
    found = panels.participation(run)
    assert found is not None
    counts = np.array(found["counts"])
    assert counts.sum() == sum(map(len, cohorts))
    assert counts.shape[0] <= panels.MOST_ROWS and counts.shape[1] <= panels.MOST_COLUMNS
    rows, columns = found["clients"], found["rounds"]
    inside = [cohort[(cohort >= rows[2]) & (cohort < rows[3])] for cohort in cohorts[columns[1] - 1 : columns[2] - 1]]
    assert counts[2, 1] == sum(map(len, inside))


def test_scores_of_single_clients_are_those_of_the_last_evaluation(runs: list[OneRun], shown: dict[str, Any]) -> None:
    (run,) = of(runs, "fedstas-dp")
    view, table = next(one for one in shown["runs"] if one["name"] == "strata")["view"], read_clients(run.folder)
    assert view["round"] == 3 and sorted(view["client"]) == table["client"].tolist()
    assert view["accuracy"] == sorted(view["accuracy"])
    for place, client in enumerate(view["client"]):
        for name in ("accuracy", "loss", "samples", "training_samples", "times_used", "label_distance"):
            assert view[name][place] == pytest.approx(table[name][client], rel=1e-4, abs=1e-9)
    assert not any("view" in one for one in shown["runs"] if one["name"] != "strata")
    group = next(group for group in shown["configurations"] if group["label"] == "fedstas-dp")
    assert group["final"]["client_accuracy_mean"][0] == pytest.approx(table["accuracy"].mean(), rel=1e-4)
    assert shown["metrics"]["client_accuracy_worst10"] == "client accuracy worst10"


def test_of_many_clients_some_are_shown_the_worst_and_the_best_among_them(tmp_path: Path) -> None:
    table = ClientTable(tmp_path)
    accuracy = np.random.default_rng(0).permutation(10_000) / 9_999
    columns = {"round": np.zeros(10_000, int), "client": np.arange(10_000), "samples": np.ones(10_000, int)}
    table.add(columns | {"accuracy": accuracy, "loss": 1 - accuracy})
    table.write(table.take(), 1)
    found = panels.view(OneRun(tmp_path, {}, [], {}, ""))
    assert found is not None and len(found["client"]) == panels.MOST_POINTS
    assert (found["accuracy"][0], found["accuracy"][-1]) == (0, 1) and np.diff(found["accuracy"]).max() < 0.01


@pytest.mark.parametrize(("rounds", "evaluated"), [(5_000, 10), (1_000, 500)])
def test_of_many_rounds_some_are_drawn_evaluated_ones_first(rounds: int, evaluated: int) -> None:
    records = [{"round": t, "train_loss": 1.0, "clients": "0-4"} for t in range(rounds)]
    for record in records[evaluated - 1 :: evaluated]:
        record["test_accuracy"] = 0.5
    made = completed(OneRun(Path("many"), {}, records, {"clients": 20}, "finished"))
    found = curves([made, made])
    drawn = found["x"]["round"]
    assert MOST_ROUNDS - 2 <= len(drawn) <= MOST_ROUNDS and drawn[-1] == rounds
    scores = [value for value in found["y"]["test_accuracy"]["mean"] if value is not None]
    assert scores == [0.5] * min(rounds // evaluated, MOST_ROUNDS)
    assert set(found["y"]["clients_used"]["mean"]) == {0.25}, "fairness counts rounds that are not drawn"
    assert thinned(range(10), 4) == [0, 3, 6, 9]


def test_participation_fairness_needs_all_rounds() -> None:
    records = [{"round": t, "clients": "0-4"} for t in range(3)]
    for known, expected in ((records, 0.25), (records[:1] + [{"round": 1}], None)):
        run = OneRun(Path(""), {}, known, {"clients": 20}, "")
        found = panels.participation(run)
        assert found is not None and (found["evenness"] or {"used": None})["used"] == expected
        assert any("clients_used" in one for one in completed(run)) == (expected is not None)


def test_what_is_not_finished_or_not_finite_is_reported_and_not_replaced(tmp_path: Path) -> None:
    table = {"preset": "fedavg", "rounds": 3}
    records = [{"round": t, "test_accuracy": 0.1, "test_loss": 0.5, "clients": "0-4"} for t in range(3)]
    whole, lost = {"clients": 20}, {**records[2], "test_loss": None}
    made = page_contents(
        [
            OneRun(tmp_path / "whole", table, records, whole, "finished"),
            OneRun(tmp_path / "half", table | {"seed": 1}, records[:2], {}, "stopped"),
            OneRun(tmp_path / "lost", table | {"seed": 2}, [*records[:2], lost], whole, "finished"),
        ]
    )
    assert made["notes"] == [
        "rounds differs (3, 2): final values are from different rounds",
        "partial results of unfinished runs: half (2 of 3 rounds)",
        "the last test loss is not finite in lost",
    ]
    assert panels.scores([*records[:2], lost]) == {"test_accuracy": 0.1}
    evenness = [run["participation"]["evenness"] for run in made["runs"]]
    assert evenness[0]["used"] == evenness[2]["used"] == 0.25 and evenness[1] is None
    [group] = made["configurations"]
    assert group["y"]["clients_used"] == {"mean": [0.25] * 3, "deviation": [0, 0, 0], "n": [2, 2, 2]}


def test_balance_of_ranks_traffic_and_warnings_are_shown(tmp_path: Path) -> None:
    said = b"2026-01-01 10:00:00,1 WARNING slow disk\n2026-01-01 10:00:01,1 INFO fine: \xff\n"
    (tmp_path / "run.log").write_bytes(said * 2)
    records = [{"round": t, "busy_seconds": [0.0, 1.0, 3.0], "bytes_client_up": [None, 10**6][t]} for t in range(2)]
    run = OneRun(tmp_path, {}, records, {}, "stopped")
    assert curves([completed(run)])["y"]["rank_balance"]["mean"] == [0.66667, 0.66667]
    assert panels.warnings([run]) == [{"text": "slow disk", "times": 2, "runs": [run.name]}]
    assert panels.totals(Configuration("", {}, (run,))) == {"MB from clients": 1.0}


def test_failed_runs_are_named_and_odd_folder_names_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / os.fsdecode(b"run-\xff"), tmp_path / "bad"
    for folder in (good, bad):
        folder.mkdir()
        (folder / "config.toml").write_text('preset = "fedavg"\nrounds = 9\n')
    (good / "metrics.jsonl").write_text('{"round": 0, "samples": 9, "seconds": 0.1}\n')
    monkeypatch.setattr("fedmpi.report.page.drawing_library", lambda: "")
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "they have no record of a round: bad</li>" in page and '"name":"run-?"' in page


def test_the_page_holds_its_data_and_asks_for_nothing(shown: dict[str, Any]) -> None:
    page = render_page(shown, "/* </script> */")
    assert "<title>all &lt;three&gt; of them" in page and "@@" not in page
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    data = json.loads(held[1]) if held else {}
    assert data["datasets"]["configurations"] == shown["configurations"]
    wanted = {"curve", "loss", "participation", "strata", "view-distribution", "time", "privacy"}
    assert wanted <= data["figures"].keys() and page.count("<figure") == len(data["figures"])
    assert page.count("</script>") == 3, "neither data nor library end a script early"
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page


def test_tables_hold_means_and_deviations_and_no_markup_of_names(shown: dict[str, Any]) -> None:
    page = render_page(shown | {"notes": ["a <note>"]}, "")
    mean, deviation = next(one for one in shown["configurations"] if one["label"] == "fedavg")["final"]["test_accuracy"]
    digits = 1 - math.floor(math.log10(deviation))
    assert f"<td>{mean:.{digits}f}\xa0±\xa0{deviation:.{digits}f}</td>" in page and "<li>a &lt;note&gt;</li>" in page
    assert "<td>samples.size.epsilon</td>" in page
    [link] = re.findall(r'download="results.csv" href="data:text/csv;base64,([^"]+)"', page)
    rows = {row["configuration"]: row for row in csv.DictReader(base64.b64decode(link).decode().splitlines())}
    assert float(rows["fedavg"]["test accuracy"]) == mean
    assert float(rows["fedavg"]["test accuracy, standard deviation"]) == deviation


def test_the_main_finding_is_one_sentence_on_top(runs: list[OneRun], shown: dict[str, Any]) -> None:
    def group(preset: str, *scores: float) -> list[OneRun]:
        table = {"preset": preset, "rounds": 1}
        records = [[{"round": 0, "test_accuracy": score, "samples": 9}] for score in scores]
        return [
            OneRun(Path(f"{preset}-{seed}"), table | {"seed": seed}, one, {"clients": 9}, "finished")
            for seed, one in enumerate(records)
        ]

    plain, same, better = group("a", 0.5, 0.52, 0.51), group("b", 0.53, 0.49, 0.51), group("c", 0.6, 0.61, 0.62)
    contents = page_contents(plain + same + better)
    found, against = contents["finding"], contents["against"]
    assert found.startswith(
        "c ends with a test accuracy of 61.0\xa0±\xa01.0 %, 10.0 [6.4, 13.6] points more than a (3 seeds"
    )
    assert against["configuration"] == ["b", "c"] and against["reference"] == ["a", "a"]
    assert against["difference in test accuracy (points)"][1] == "10.0 [6.4, 13.6]"
    assert against["significant"] == ["no", "yes"]
    assert "10.0 [6.4, 13.6]</td>" in render_page(contents, "")
    worse = page_contents(plain + group("d", 0.4, 0.43, 0.41))["finding"]
    low, high = map(float, re.findall(r"\[(.*), (.*)\] points less than a", worse)[0])
    assert 0 < low < 100 * (0.51 - 1.24 / 3) < high
    assert "which is not significantly different" in page_contents(plain + same)["finding"]
    assert page_contents(plain[:1])["finding"] == "a ends with a test accuracy of 50 % (1 seed)."
    assert page_contents(plain[:1] + better[:1])["finding"].startswith("c ends with a test accuracy of 60 %")
    assert page_contents([OneRun(Path("x"), {}, [{"round": 0}], {}, "stopped")])["finding"] == ""
    assert f"<p>{shown['finding']}" in render_page(shown, "")


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text('preset = "fedavg"\n')
    with pytest.raises(UserError, match="record of a round yet"):
        write_report([tmp_path / "begun"], tmp_path / "page.html")
    os.mkfifo(tmp_path / "fifo")
    for out in (tmp_path / "none" / "page.html", tmp_path, tmp_path / "fifo"):
        with pytest.raises(UserError, match="existing folder"):
            write_report([folder], out)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[report\]'"):
        write_report([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("tables", "labels", "seeds"),
    [
        (
            [{"data.source": f"s/{data}-seed{seed}", "seed": seed} for data in ("mnist", "cifar") for seed in (0, 1)],
            ["fedavg, data.source = s/mnist-seed{seed}", "fedavg, data.source = s/cifar-seed{seed}"],
            [[0, 1], [0, 1]],
        ),
        (
            [{"local.lr": 0.1}, {"preset": "fedprox", "local.lr": 0.1}, {"preset": "fedprox", "local.lr": 0.5}],
            ["fedavg, lr = 0.1", "fedprox, lr = 0.1", "fedprox, lr = 0.5"],
            [[0], [0], [0]],
        ),
    ],
)
def test_labels_distinguish_configurations_and_seeds_do_not(
    tables: list[dict[str, Any]], labels: list[str], seeds: list[list[int]]
) -> None:
    runs = [OneRun(Path(str(i)), {"preset": "fedavg", "seed": 0} | table, [], {}, "") for i, table in enumerate(tables)]
    found, _ = configurations(runs)
    assert [group.label for group in found] == labels and [[run.seed for run in one.runs] for one in found] == seeds


def best_of(key: str, **curves: list[Any]) -> list[Configuration]:
    records = {label: [{"round": t, key: value} for t, value in enumerate(curve)] for label, curve in curves.items()}
    return [Configuration(label, {}, (OneRun(Path(label), {}, one, {}, ""),)) for label, one in records.items()]


def test_costs_are_those_up_to_the_users_target_or_the_best_that_half_of_the_runs_reach() -> None:
    groups = best_of("test_accuracy", bad=[0.05, 0.1], good=[0.4, 0.8], better=[0.45, 0.9], best=[0.5, 0.9496])
    assert panels.target(groups) == ("test_accuracy", 0.8), "two of four reach more"
    groups[3].runs[0].table["evaluation.target_accuracy"] = 0.97
    assert panels.target(groups) == ("test_accuracy", 0.97)
    assert panels.target(best_of("test_accuracy", none=[0.0])) is None
    groups = best_of("test_loss", good=[2.0, 1.0, 0.5], bad=[4.0, None, 3.0], worse=[None, 3.5, 3.25])
    assert panels.target(groups) == ("test_loss", 3.0), "two of three reach it"
    rounds = [panels.costs(group, "test_loss", 3.0)["round"] for group in groups]
    assert [cost and cost.mean for cost in rounds] == [1, 3, None]
    assert panels.target(best_of("test_loss", lost=[None, None])) is None
