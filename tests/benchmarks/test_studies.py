"""The studies of published results: closed forms against enumerations, and one small run of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from benchmarks.studies.fedsso_curves import excess, rows
from benchmarks.studies.fedsso_strata import draw, look, plane
from benchmarks.studies.letter_laws import BYMERGE, BYMERGE_STOCK, Population, row
from benchmarks.studies.paper_intervals import correct
from benchmarks.studies.selection import cell, lines_of, passages, scores
from data_prep.partitions.astraea import class_shares
from fedmpi.data.statistics import kl_divergence
from fedmpi.results.loading import OneRun
from tests.data_prep.command import main as prepare


def test_a_runs_clusters_are_found_again_and_drawn(tmp_path: Path) -> None:
    words = "digits --partition shards --classes-per-client 1 --clients 20 --out"
    assert prepare([*words.split(), str(tmp_path / "shards")]) == 0
    settings = {
        "rounds": 1,
        "clients.sampler.clustering.outliers": "drop",
        "model.hidden": [16],
        "logging.tensorboard": False,
    }
    fedmpi.run("fedsso", settings, data=str(tmp_path / "shards"), out=tmp_path / "run")
    found = look(tmp_path / "run")
    assert (found.name, found.recorded, found.clusters, found.alone, found.shared_sets) == ("run", 10, 10, 0, 10)
    draw([found], tmp_path / "plane.png")
    assert (tmp_path / "plane.png").stat().st_size > 1000
    points = np.random.default_rng(0).normal(size=(30, 50)) * np.array([9.0, 4.0] + [0.1] * 48) + 5
    centred = points - points.mean(axis=0)
    expected = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    assert np.allclose(np.abs(plane(points.astype(np.float32))), np.abs(expected), atol=1e-4)


def test_curves_have_means_slopes_and_ratios_to_the_first_row(tmp_path: Path) -> None:
    for name, factor in (("E-1,random", 1.0), ("E-2,random", 3.0)):
        for seed in (0, 1):
            (tmp_path / f"{name},seed={seed}").mkdir()
            records = [
                {"round": t, "test_loss": 1 + factor * (1 + seed) / (int(name[2]) * (t + 1))} for t in range(3000)
            ]
            (tmp_path / f"{name},seed={seed}/metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
            (tmp_path / f"{name},seed={seed}/summary.json").touch()
    names = {f"E-{steps},random": f"E = {steps}" for steps in (1, 2)}
    first, second = rows(tmp_path, names, lambda name, seed, records: excess(records, int(name[2]), 1.0), 2)
    assert first[:5] == ["E = 1", "2", "0.75 ± 0.4", "", "37.5 ± 2e+01"]
    assert second[2:6:3] == ["2.25 ± 1", "1.50 [1.50, 1.50]"] and second[3] == "3.00 [3.00, 3.00]"
    assert second[6].startswith("-1 ")


def test_a_population_has_its_totals_and_the_requested_divergence() -> None:
    population = Population(total=20_000, clients=40, sizes="even", digit_weight=0.25, skew=0.5, clients_kl=0.5)
    held = population.counts(seed=1, concentration=1.0)
    assert held.shape == (40, 47) and set(held.sum(axis=1)) == {500}
    shares = class_shares("letters", 47, BYMERGE, BYMERGE_STOCK, 0.25, 0.5)
    assert np.abs(held.sum(axis=0) - 20_000 * shares).max() < 1
    assert kl_divergence(population.counts(0, population.fitted())).mean() == pytest.approx(0.5, abs=0.01)


def test_a_row_has_the_overheads_of_the_documentation() -> None:
    cells = [float(cell.split(" ± ")[0]) for cell in row(Population(total=20_000, clients=120), seeds=2)]
    pooled, clients, copied, counted = cells[:4]
    assert pooled == pytest.approx(0.277, abs=0.005) and copied < counted < clients
    assert cells[6:] == pytest.approx([37.9, 43.9, 53.2, 12.9, 18.9, 28.2], abs=0.5)


def test_samplers_are_compared_at_equal_bytes_and_after_their_end(tmp_path: Path) -> None:
    def run(bytes_per_round: int, accuracies: list[float]) -> OneRun:
        records: list[dict[str, Any]] = [
            {"round": t, "bytes_client_up": bytes_per_round, "virtual_seconds": 1.0, "phase_seconds": {}}
            | (dict.fromkeys(("test_accuracy", "client_accuracy_worst10"), accuracies[t // 2]) if t % 2 else {})
            for t in range(2 * len(accuracies))
        ]
        return OneRun(tmp_path, {}, records, {}, "finished")

    runs = {
        "uniform": {s: run(10**6, [0.1, 0.2, 0.3 + s / 100]) for s in (0, 1)},
        "dear": {s: run(2 * 10**6, [0.3, 0.4, 0.5]) for s in (0, 1)},
        "cheap": {s: run(10**5, [0.2, 0.3, 0.4]) for s in (0, 1)},
    }
    found = scores(runs, "test_accuracy")
    assert found["uniform", "round"] == ([pytest.approx(30), pytest.approx(31)], False)
    assert found["uniform", "megabytes"] == (
        [pytest.approx(15), pytest.approx(15)],
        False,
    )  # 3 of 6 MB: between 2 and 4
    assert found["dear", "megabytes"] == ([pytest.approx(30)] * 2, False)  # 3 MB are less than the 4 of its first score
    assert found["cheap", "megabytes"] == ([pytest.approx(40)] * 2, True)  # all its rounds take 0.6 MB
    cost = passages(runs)  # of 15 %, which "uniform" has after 3 rounds and 3 MB
    assert cost["uniform", "round"] == ([0.0, 0.0], False)
    assert np.exp(cost["dear", "round"][0]) == pytest.approx([2 / 3] * 2)  # its first score, after 2 rounds
    assert np.exp(cost["dear", "megabytes"][0]) == pytest.approx([4 / 3] * 2)
    runs["never"] = {s: run(10**5 + s, [0.1] * 3) for s in (0, 1)}
    lines = lines_of("toy", runs)
    correct([line for line in lines if line["low"]])
    assert cell(lines, "toy: accuracy at equal", "uniform", "rounds") == "30.50"
    half = 12.706 * 0.5  # of t with one degree of freedom; all comparisons of the table are significant
    shown = f"50.00, **+19.50 [+{19.5 - half:.2f}, +{19.5 + half:.2f}]**"
    assert cell(lines, "toy: accuracy at equal", "dear", "rounds") == shown
    assert cell(lines, "toy: cost of the target in", "dear", "rounds") == "0.67", "equal in all seeds: no interval"
    never = cell(lines, "toy: cost of the target in", "never", "bytes")  # ends below the target: a bound, not a saving
    assert never.startswith("≥ 0.20 [")
