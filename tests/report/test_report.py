"""The page of a report: its numbers are those of the records, it holds all it needs, and bad input is one sentence."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.records.client_table import ClientTable, read_clients
from fedmpi.records.history import clients_from_text
from fedmpi.report import curves as panels
from fedmpi.report.curves import MOST_ROUNDS, Configuration, completed, configurations, curves, targets, thinned
from fedmpi.report.page import drawing_library, page_contents, render_page, write_report
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
    assert group["traffic"]["links"].keys() == {"client_up", "client_down"}
    assert sum(group["traffic"]["links"].values()) == pytest.approx(megabytes.sum(axis=1).mean(), rel=1e-4)
    trained = np.mean([record["phase_seconds"]["train"] for run in both for record in run.records])
    assert group["phases"]["train"] == pytest.approx(trained, rel=1e-4)


def test_what_differs_is_listed_by_key_and_what_does_not_is_common(shown: dict[str, Any]) -> None:
    differences, common = {row[0]: row[1:] for row in shown["differences"]}, dict(shown["common"])
    assert differences["preset"] == ["fedavg", "fedstas-dp"]
    assert differences["samples.size.epsilon"][0] == "\u2013" and "seed" not in differences | common
    assert common["rounds"] == "3" and not differences.keys() & common.keys()


def test_costs_of_an_accuracy_are_those_of_the_first_round_that_reached_it(
    runs: list[OneRun], shown: dict[str, Any]
) -> None:
    found = shown["targets"]
    assert found["key"] == "test_accuracy" and found["default"] in found["levels"]
    for level, mean, n in zip(
        found["levels"], found["costs"][0]["round"]["mean"], found["costs"][0]["round"]["n"], strict=True
    ):
        rounds = [
            next((r["round"] + 1 for r in run.records if r["test_accuracy"] >= level), None)
            for run in of(runs, "fedavg")
        ]
        reached = [t for t in rounds if t is not None]
        assert n == len(reached) and mean == (pytest.approx(np.mean(reached), rel=1e-4) if reached else None)


def test_who_took_part_strata_and_sizes_are_those_of_the_records(runs: list[OneRun], shown: dict[str, Any]) -> None:
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


def test_a_round_in_which_all_clients_take_part_draws_from_no_stratum(tmp_path: Path) -> None:
    """FedSSO begins with one."""
    fedmpi.run("fedsso", SMALL, out=tmp_path / "run")
    [run] = read_runs([tmp_path / "run"])
    opening, second, _ = run.records
    assert opening["stratum_sizes"] and "allocation" not in opening
    cells = panels.strata(run)
    assert cells is not None and {cell[0] for cell in cells} == {2, 3}
    drawn = [cell[2:] for cell in cells if cell[0] == 2]
    assert drawn == [list(pair) for pair in zip(second["stratum_sizes"], second["allocation"], strict=True)]


def test_many_clients_and_rounds_share_cells_and_none_is_lost() -> None:
    cohorts = [np.arange(t, 10_000, 7) for t in range(333)]
    records = [{"round": t, "clients": " ".join(map(str, cohort))} for t, cohort in enumerate(cohorts)]
    run = OneRun(Path("many"), {}, records, {"clients": 10_000}, "finished")
    found = panels.participation(run, runs=15)
    assert found is not None
    counts = np.array(found["counts"])
    assert counts.sum() == sum(map(len, cohorts))
    assert counts.shape[0] <= panels.MOST_ROWS and counts.shape[1] <= panels.MOST_COLUMNS
    assert 15 * counts.size <= panels.CELLS
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
    assert shown["metrics"]["client_accuracy_worst10"] == "clients' accuracy, worst 10 %"


def test_of_many_clients_some_are_shown_the_worst_and_the_best_among_them(tmp_path: Path) -> None:
    table = ClientTable(tmp_path)
    accuracy = np.random.default_rng(0).permutation(10_000) / 9_999
    columns = {"round": np.zeros(10_000, int), "client": np.arange(10_000), "samples": np.ones(10_000, int)}
    table.add(columns | {"accuracy": accuracy, "loss": 1 - accuracy})
    table.write(table.take())
    found = panels.view(OneRun(tmp_path, {}, [], {}, ""), runs=80)
    assert found is not None and len(found["client"]) == panels.POINTS // 80
    assert (found["accuracy"][0], found["accuracy"][-1]) == (0, 1) and np.diff(found["accuracy"]).max() < 0.01


def test_of_very_many_rounds_some_are_drawn_the_evaluated_ones_first() -> None:
    records = [{"round": t, "samples": 1, "train_loss": 1.0} for t in range(5_000)]
    for record in records[9::10]:
        record["test_accuracy"] = 0.5
    found = curves([records])
    rounds = found["x"]["round"]
    assert len(rounds) == MOST_ROUNDS and all(t % 10 == 0 for t in rounds) and rounds[-1] == 5_000
    assert found["y"]["test_accuracy"]["mean"] == [0.5] * MOST_ROUNDS
    assert thinned(range(10), 4) == [0, 3, 6, 9]


def test_of_very_many_rounds_that_were_seldom_evaluated_others_are_drawn_too() -> None:
    records = [{"round": t, "train_loss": 1.0, "clients": "0-4"} for t in range(1_000)]
    for record in records[499::500]:
        record["test_accuracy"] = 0.5
    made = completed(OneRun(Path("many"), {}, records, {"clients": 20}, "finished"))
    found = curves([made, made])
    assert MOST_ROUNDS - 2 <= len(found["x"]["round"]) <= MOST_ROUNDS and {500, 1_000} <= set(found["x"]["round"])
    assert [value for value in found["y"]["test_accuracy"]["mean"] if value is not None] == [0.5, 0.5]
    assert set(found["y"]["clients_used"]["mean"]) == {0.25}, "evenness is told of every round that is drawn"
    whole = panels.participation(OneRun(Path(""), {}, records, {"clients": 20}, ""))
    assert whole is not None and whole["evenness"]["used"] == 0.25
    del records[0]["clients"]
    part = panels.participation(OneRun(Path(""), {}, records, {"clients": 20}, ""))
    assert part is not None and part["evenness"] is None, "of some rounds only"
    assert not any("clients_used" in one for one in completed(OneRun(Path(""), {}, records, {"clients": 20}, "")))


def test_what_is_not_finished_or_not_finite_is_said_and_nothing_is_made_up_for_it(tmp_path: Path) -> None:
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
        "rounds differs (3, 2): finals are those of unlike rounds",
        "not finished, but shown and averaged as far as they are: half (2 of 3 rounds)",
        "test loss in the end is no finite number of lost",
    ]
    assert panels.scores([*records[:2], lost]) == {"test_accuracy": 0.1}
    evenness = [run["participation"]["evenness"] for run in made["runs"]]
    assert evenness[0]["used"] == evenness[2]["used"] == 0.25 and evenness[1] is None
    [group] = made["configurations"]
    assert group["y"]["clients_used"] == {"mean": [0.25] * 3, "deviation": [0, 0, 0], "n": [2, 2, 2]}


def test_nobody_waits_for_a_log_that_is_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.log")
    assert panels.warnings([OneRun(tmp_path, {}, [], {}, "stopped")]) == []


def test_balance_of_ranks_traffic_and_warnings_are_shown(tmp_path: Path) -> None:
    said = b"2026-01-01 10:00:00,1 WARNING slow disk\n2026-01-01 10:00:01,1 INFO fine: \xff\n"
    (tmp_path / "run.log").write_bytes(said * 2)
    records = [{"round": t, "busy_seconds": [0.0, 1.0, 3.0], "bytes_client_up": [None, 10**6][t]} for t in range(2)]
    run = OneRun(tmp_path, {}, records, {}, "stopped")
    assert curves([completed(run)])["y"]["rank_balance"]["mean"] == [0.66667, 0.66667]
    assert panels.warnings([run]) == [{"text": "slow disk", "times": 2, "runs": [run.name]}]
    assert panels.traffic(Configuration("", {}, (run,)))["links"] == {"client_up": 1.0}


def test_the_engine_that_auto_chose_is_shown_without_its_counts() -> None:
    def choice_text(engine: str) -> str:
        run = OneRun(Path("run"), {}, [{"round": 0}], {"engine": engine}, "finished")
        return str(page_contents([run])["runs"][0]["engine"])

    chosen = "auto: one-step clients are merged, the others batched (trial: sequential 18, batched 13 ms a client)"
    assert choice_text(f"{chosen}; so far 0 merged and 40 others on this rank") == chosen
    assert choice_text("sequential: one client after another") == "sequential"


def test_runs_that_failed_before_their_first_round_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text('preset = "fedavg"\nrounds = 9\n')
    (tmp_path / "good" / "metrics.jsonl").write_text('{"round": 0, "samples": 9, "seconds": 0.1}\n')
    (tmp_path / "bad" / "sweep.json").write_text('{"labels": {}, "failure": "the loss is nan"}')
    monkeypatch.setattr("fedmpi.report.page.drawing_library", lambda: "")
    write_report([tmp_path], tmp_path / "report.html")
    said = "not shown, without a record of a round: bad (failed: the loss is nan)"
    assert said in (tmp_path / "report.html").read_text()


def test_the_page_holds_its_data_and_asks_for_nothing(shown: dict[str, Any]) -> None:
    page = render_page(shown, "/* </script> */")
    assert "<title>all &lt;three&gt; of them" in page and "@@" not in page
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    data = json.loads(held[1]) if held else {}
    assert data["datasets"]["configurations"] == shown["configurations"]
    wanted = {"curve", "loss", "target", "participation", "strata", "view-distribution", "traffic", "phases", "privacy"}
    assert wanted <= data["figures"].keys() and page.count("<figure") == len(data["figures"])
    assert page.count("</script>") == 3, "neither data nor library end a script early"
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page


def test_tables_hold_means_and_deviations_and_no_markup_of_names(shown: dict[str, Any]) -> None:
    page = render_page(shown | {"notes": ["a <note>"]}, "")
    mean, deviation = next(one for one in shown["configurations"] if one["label"] == "fedavg")["final"]["test_accuracy"]
    assert f"<td>{mean:.4g} ± {deviation:.2g}</td>" in page and "Mind: a &lt;note&gt;." in page
    assert "<td>samples.size.epsilon</td>" in page and '<td class="text">' in page


def test_the_library_that_draws_comes_from_the_installed_package() -> None:
    pytest.importorskip("vl_convert", reason="the extra `report` is not installed")
    library = drawing_library()
    assert "window.vegaEmbed" in library and len(library) < 1_500_000


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text('preset = "fedavg"\n')
    with pytest.raises(UserError, match="no record of a round yet"):
        write_report([tmp_path / "begun"], tmp_path / "page.html")
    with pytest.raises(UserError, match="in a folder that is there"):
        write_report([folder], tmp_path / "none" / "page.html")
    with pytest.raises(UserError, match="in a folder that is there"):
        write_report([folder], tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="in a folder that is there"):
        write_report([folder], tmp_path / "fifo")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[report\]'"):
        write_report([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_seeds_on_partitions_of_their_own_are_one_configuration_and_other_data_another() -> None:
    runs = [
        OneRun(
            Path(f"{data}-{seed}"),
            {"preset": "fedavg", "seed": seed, "data.source": f"s/{data}-seed{seed}"},
            [],
            {},
            "",
        )
        for data in ("mnist", "cifar")
        for seed in (0, 1)
    ]
    found, _ = configurations(runs)
    assert [[run.seed for run in group.runs] for group in found] == [[0, 1], [0, 1]]
    assert len({group.label for group in found}) == 2 and "mnist" in found[0].label


def test_labels_say_no_more_than_tells_configurations_apart() -> None:
    tables = [
        {"preset": "fedavg", "seed": 0, "local.lr": 0.1},
        {"preset": "fedprox", "seed": 0, "local.lr": 0.1},
        {"preset": "fedprox", "seed": 0, "local.lr": 0.5},
    ]
    found, _ = configurations([OneRun(Path(str(i)), table, [], {}, "") for i, table in enumerate(tables)])
    assert [group.label for group in found] == ["fedavg", "fedprox, lr = 0.1", "fedprox, lr = 0.5"]


def test_the_accuracy_shown_first_is_ones_target_or_one_that_half_of_the_runs_reach() -> None:
    def group(label: str, best: float, **table: Any) -> Configuration:
        records = [{"round": 0, "test_accuracy": best / 2}, {"round": 1, "test_accuracy": best}]
        return Configuration(label, table, (OneRun(Path(label), table, records, {}, ""),))

    groups = [group("bad", 0.1), group("good", 0.8), group("better", 0.9)]
    assert targets(groups)["default"] == pytest.approx(0.8, abs=0.9 / 40)
    wanted = targets([*groups, group("wanted", 0.5, **{"evaluation.target_accuracy": 0.95})])
    assert wanted["default"] == 0.95 and wanted["levels"][-1] == 0.95
    assert wanted["costs"][1]["round"]["n"][-1] == 0
    assert targets([group("none", 0.0)]) == {}


def test_of_a_task_without_accuracy_the_cost_of_a_loss_is_that_of_coming_down_to_it() -> None:
    def group(label: str, *losses: float | None) -> Configuration:
        records = [{"round": t, "test_loss": loss} for t, loss in enumerate(losses)]
        return Configuration(label, {}, (OneRun(Path(label), {}, records, {}, ""),))

    found = targets([group("good", 2.0, 1.0, 0.5), group("bad", 4.0, None, 3.0), group("worse", None, 3.5, 3.25)])
    assert (found["key"], found["rises"], found["levels"][0]) == ("test_loss", False, 0.5)
    assert found["levels"] == sorted(found["levels"]) and found["levels"][-1] == pytest.approx(4 - 3.5 / 40, rel=1e-4)
    assert found["default"] == pytest.approx(3.0, abs=3.5 / 40) and found["default"] >= 3.0, "two of three reach it"
    rounds = {label: cost["round"] for label, cost in zip(("good", "bad", "worse"), found["costs"], strict=True)}
    place = found["levels"].index(found["default"])
    assert [rounds[label]["mean"][place] for label in rounds] == [1, 3, None]
    assert (rounds["good"]["mean"][0], rounds["bad"]["n"][0]) == (3, 0)
    assert targets([group("lost", None, None)]) == {}


def test_a_folder_whose_name_is_no_utf8_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmpi.report.page.drawing_library", lambda: "")
    odd = tmp_path / os.fsdecode(b"run-\xff")
    odd.mkdir()
    (odd / "config.toml").write_text('preset = "fedavg"\nrounds = 1\n')
    (odd / "metrics.jsonl").write_text('{"round": 0, "samples": 9, "seconds": 0.1, "test_accuracy": 0.5}\n')
    write_report([tmp_path], tmp_path / "page.html")
    assert '"name":"run-?"' in (tmp_path / "page.html").read_text(encoding="utf-8")
