"""The page of a report: its numbers are those of the records, it contains all it needs, and bad input is rejected."""

from __future__ import annotations

import base64
import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from fedmpi import UserError
from fedmpi.records.history import clients_from_text
from fedmpi.records.tables import read_table
from fedmpi.report import curves as numbers
from fedmpi.report.curves import MOST_ROUNDS, thinned
from fedmpi.report.figures import DASHES, METHODS, Shown, styles
from fedmpi.report.page import Item, as_json, page_contents, render_page, write_report
from fedmpi.results.comparison import Spread
from fedmpi.results.loading import OneRun, read_runs

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
    return read_runs([folder])


@pytest.fixture(scope="module")
def contents(runs: list[OneRun]) -> dict[str, Any]:
    return page_contents(runs, "all <three> of them")


@pytest.fixture(scope="module")
def shown(contents: dict[str, Any]) -> Shown:
    return contents["shown"]


def tables(contents: dict[str, Any]) -> dict[str, Any]:
    items: list[Item] = [item for items in contents["sections"].values() for item in items]
    return {item.name: item.table for item in items if item.table}


def of(runs: list[OneRun], preset: str) -> list[OneRun]:
    return [run for run in runs if run.table["preset"] == preset]


def run_of(records: list[dict[str, Any]], **facts: Any) -> OneRun:
    return OneRun(Path("x"), {"preset": "a", "rounds": len(records)}, records, facts, "finished")


def test_numbers_are_those_of_the_records(runs: list[OneRun], shown: Shown, contents: dict[str, Any]) -> None:
    both, place = of(runs, "fedavg"), shown.labels.index("fedavg")
    work = [
        [sum(record[f"bytes_client_{way}"] for record in run.records) / 1e6 for way in ("up", "down")] for run in both
    ]
    for run, one in zip(both, [one for one in shown.runs if one["label"] == "fedavg"], strict=True):
        assert (one["seed"], one["name"], one["x"]["round"]) == (run.seed, run.name, [1, 2, 3])
        for key in ("test_accuracy", "train_loss", "samples"):
            assert one["y"][key] == [record[key] for record in run.records]
        assert one["x"]["samples"] == np.cumsum(one["y"]["samples"]).tolist()
        assert one["x"]["megabytes"][-1] == pytest.approx(sum(work[run.seed]))
    results = tables(contents)["results"]
    assert results["test accuracy"][place] == Spread.of([run.records[-1]["test_accuracy"] for run in both])
    assert results["samples"][place] == Spread.of([sum(record["samples"] for record in run.records) for run in both])
    for place_of, way in enumerate(("up", "down")):
        assert results[f"MB client {way}"][place] == Spread.of([one[place_of] for one in work])
    assert (results["seeds"][place], results["rounds"][place]) == (2, Spread(2, 3.0, 0.0))
    settings = tables(contents)["differences"]
    apart = dict(zip(settings["key"], settings["fedavg"], strict=True))
    assert (apart["preset"], apart["samples.size.epsilon"]) == ("fedavg", "\u2013") and not {"seed", "rounds"} & {
        *apart
    }


def test_selected_clients_strata_sizes_and_scores_of_clients_are_those_of_the_records(
    runs: list[OneRun], shown: Shown, contents: dict[str, Any]
) -> None:
    (run,) = of(runs, "fedstas-dp")
    drawn = next(one for one in shown.runs if one["name"] == "strata")
    there = np.zeros((20, 3), int)
    for record in run.records:
        there[clients_from_text(record["clients"]), record["round"]] = 1
    assert drawn["participation"]["share"] == there.tolist() and drawn["participation"]["binary"]
    assert drawn["participation"]["rounds"] == drawn["strata"]["rounds"] == [1, 2, 3, 4]
    assert drawn["participation"]["evenness"]["used"] == pytest.approx((there.sum(axis=1) > 0).mean())
    shares = np.array(drawn["strata"]["share"])
    for record in run.records:
        taken = [m / n for m, n in zip(record["allocation"], record["stratum_sizes"], strict=True)]
        assert shares[: len(taken), record["round"]].tolist() == taken
    assert drawn["y"]["size_ratio"] == [record["size_estimate"] / record["size_true"] for record in run.records]
    served = tables(contents)["served"]["client accuracy mean"][shown.labels.index("fedstas-dp")]
    assert served.mean == pytest.approx(read_table(run.folder)["accuracy"].mean())


def test_a_round_without_allocation_draws_from_no_stratum() -> None:
    rounds = [
        {"round": 0, "stratum_sizes": [4, 5]},
        {"round": 1, "stratum_sizes": [4, 8, 0], "allocation": [1, 2, 0]},
        {"round": 2, "stratum_sizes": [1], "allocation": [1]},
    ]
    found = numbers.strata(run_of(rounds))
    assert found is not None and (found["rows"], found["rounds"]) == ([1, 2, 3, 4], [2, 3, 4])
    assert (
        json.loads(as_json(found["share"])) == [[0.25, 1], [0.25, None], [0, None]]
        and numbers.strata(run_of(rounds[:1])) is None
    )


def test_many_clients_and_rounds_share_cells_and_none_is_lost() -> None:
    cohorts = [np.arange(t, 10_000, 7) for t in range(333)]
    records = [{"round": t, "clients": " ".join(map(str, cohort))} for t, cohort in enumerate(cohorts)]
    found = numbers.participation(run_of(records, clients=10_000))
    assert found is not None and not found["binary"]
    few = numbers.participation(run_of([{"round": 0, "clients": "0-9"}], clients=numbers.MOST_ROWS))
    assert few is not None and few["binary"] and len(few["share"]) == numbers.MOST_ROWS
    rows, columns = np.diff(found["rows"]), np.diff(found["rounds"])
    counts = np.array(found["share"]) * np.outer(rows, columns)
    assert counts.sum() == pytest.approx(sum(map(len, cohorts)))
    assert counts.shape[0] <= numbers.MOST_ROWS and counts.shape[1] <= numbers.MOST_COLUMNS
    first, last = found["rows"][2:4]
    some = cohorts[found["rounds"][1] - 1 : found["rounds"][2] - 1]
    assert counts[2, 1] == pytest.approx(sum(((cohort >= first) & (cohort < last)).sum() for cohort in some))


def test_of_many_rounds_evaluated_ones_are_drawn() -> None:
    records: list[dict[str, Any]] = [{"round": t, "train_loss": 1.0} for t in range(5_000)]
    assert len(numbers.drawn_rounds([run_of(records)])) == MOST_ROUNDS
    for record in records[9::10]:
        record["test_accuracy"] = 0.5
    rounds = numbers.drawn_rounds([run_of(records), run_of(records[:90])])
    found = numbers.curves(run_of(records), rounds)
    assert found["y"]["test_accuracy"] == [0.5] * 250
    assert (found["x"]["round"][0], found["x"]["round"][-1]) == (10, 5_000)
    assert thinned(range(10), 4) == [0, 3, 6, 9]


def test_what_is_not_finished_or_not_finite_is_reported_and_not_replaced(tmp_path: Path) -> None:
    table = {"preset": "fedavg", "rounds": 3}
    records = [{"round": t, "test_accuracy": 0.1, "test_loss": 0.5, "clients": "0-4"} for t in range(3)]
    whole, lost = {"clients": 20}, {"round": 2, "test_accuracy": 0.1, "test_loss": None}
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
    evenness = [run["participation"]["evenness"] for run in made["shown"].runs]
    assert evenness[0]["used"] == 0.25 and evenness[1:] == [None, None], "all rounds have to be known"
    assert tables(made)["results"]["test loss"] == [Spread(2, 0.5, 0.0)]
    assert [run["y"]["test_loss"][-1] for run in made["shown"].runs] == [0.5, 0.5, None]


def test_a_figure_is_there_only_if_there_are_numbers_for_it(contents: dict[str, Any]) -> None:
    drawn = {item.name for items in contents["sections"].values() for item in items if item.figure}
    assert drawn == {"curve", "loss", "participation", "strata", "size-ratio", "time", "privacy"}
    made = page_contents([run_of([{"round": 0, "samples": 9}])])
    assert {item.name for items in made["sections"].values() for item in items if item.figure} == {"curve"}
    assert made["sections"]["Participation"][0].note and "Clients" not in made["sections"]


def test_a_method_has_one_color_and_its_variants_have_other_dashes() -> None:
    colors, dashes = styles(["FedAvg, lr = 0.1", "mine", "fedavg, lr = 0.2", "FedSTaS", "other"])
    assert colors[0] == colors[2] == METHODS["fedavg"] and colors[3] == METHODS["fedstas"]
    assert len(set(colors)) == 4 and dashes == [DASHES[0], DASHES[0], DASHES[1], DASHES[0], DASHES[0]]
    colors, dashes = styles([f"lr = {rate}" for rate in range(16)])
    assert len({*zip(colors, map(tuple, dashes), strict=True)}) == 16


def test_the_page_holds_its_data_and_asks_for_nothing(contents: dict[str, Any], shown: Shown) -> None:
    page = render_page(contents | {"notes": ["a <note>"]}, "/* </script> */")
    assert "<title>all &lt;three&gt; of them" in page and "@@" not in page and "<li>a &lt;note&gt;</li>" in page
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    data = json.loads(held[1]) if held else {}
    assert data["datasets"]["runs"] == json.loads(as_json(shown.runs))
    assert page.count("<figure") == len(data["figures"]) and page.count("</script>") == 3
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page) and "default-src 'none'" in page
    text = tables(contents)["results"]["test accuracy"][shown.labels.index("fedavg")].text()
    assert f"<td>{text}</td>" in page and "<td>samples.size.epsilon</td>" in page
    [link] = re.findall(r'download="results.csv" href="data:text/csv;base64,([^"]+)"', page)
    rows = {row["configuration"]: row for row in csv.DictReader(base64.b64decode(link).decode().splitlines())}
    assert rows["fedavg"]["test accuracy"] == text


def group(preset: str, *scores: float, key: str = "test_accuracy", **table: Any) -> list[OneRun]:
    table = {"preset": preset, "rounds": 1} | table
    return [
        OneRun(Path(f"{preset}-{seed}"), table | {"seed": seed}, [{"round": 0, key: score, "samples": 9}], {"n": 9}, "")
        for seed, score in enumerate(scores)
    ]


def test_the_main_finding_is_one_sentence_on_top(runs: list[OneRun]) -> None:
    plain, same, better = group("a", 0.5, 0.52, 0.51), group("b", 0.53, 0.49, 0.51), group("c", 0.6, 0.61, 0.62)
    contents = page_contents(plain + same + better)
    found, table = contents["finding"], tables(contents)["comparison-0"]
    assert found.startswith(
        "c ends with a test accuracy of 61.0\xa0±\xa01.0 %, 10.0 [6.4, 13.6] points more than a (3 seeds"
    )
    assert table["configuration"] == ["a", "b", "c"]
    assert [text.endswith("significant") for text in table["difference to a"]] == [False, False, True]
    assert f"{table['difference to a'][2]}</td>" in render_page(contents, "")
    assert page_contents(plain + better + group("e", 0.95, 0.2, 0.95))["finding"].startswith("c "), "not significant"
    worse = page_contents(plain + group("d", 0.4, 0.43, 0.41))["finding"]
    low, high = map(float, re.findall(r"\[(.*), (.*)\] points less than a", worse)[0])
    assert 0 < low < 100 * (0.51 - 1.24 / 3) < high
    assert "which is not significantly different" in page_contents(plain + same)["finding"]
    assert page_contents(plain[:1])["finding"] == "a ends with a test accuracy of 50 % (1 seed)."
    assert page_contents([run_of([{"round": 0, "samples": 9}])])["finding"] == ""


def test_costs_are_those_up_to_the_users_target_or_the_best_that_half_of_the_configurations_reach() -> None:
    groups = [group(name, score) for name, score in (("a", 0.1), ("b", 0.8), ("c", 0.9), ("d", 0.95))]
    made = page_contents(sum(groups, []))
    assert tables(made)["comparison-0"]["samples to 80 %"] == ["not reached", "9", "9", "9"]
    given = [group(name, score, **{"evaluation.target_accuracy": 0.85}) for name, score in (("a", 0.1), ("b", 0.8))]
    assert "rounds to 85 %" in tables(page_contents(sum(given, [])))["comparison-0"]
    losses = [group(name, score, key="test_loss") for name, score in (("a", 0.5), ("b", 3.0), ("c", 3.25))]
    assert "samples to 3" in tables(page_contents(sum(losses, [])))["comparison-0"]


def test_bad_input_is_rejected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('preset = "fedavg"\nrounds = 9\n')
    for given, out, words in (
        (folder, tmp_path / "none" / "page.html", "existing folder"),
        (folder, tmp_path, "existing folder"),
        (tmp_path, tmp_path / "page.html", "no run has a record of a round yet"),
    ):
        with pytest.raises(UserError, match=words):
            write_report([given], out)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"fedmpi\[report\]"):
        write_report([folder], tmp_path / "page.html")
