"""Mean against worst tenth of a sweep's runs: finished ones alone, by system, and a picture of them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.studies.clients_served import draw, served


def run(folder: Path, scores: list[float], finished: bool = True) -> None:
    folder.mkdir()
    names = ("client_accuracy_mean", "client_accuracy_worst10", "client_tuned_accuracy_mean")
    records = [{"round": 0}, {"round": 1, **dict(zip(names, scores, strict=False))}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    if finished:
        (folder / "summary.json").write_text("{}")


def test_the_last_scores_of_finished_runs_are_gathered_by_system(tmp_path: Path) -> None:
    run(tmp_path / "A,seed=0", [0.5, 0.25, 0.75])
    run(tmp_path / "A,seed=1", [0.6, 0.35, 0.85])
    run(tmp_path / "B,seed=0", [0.1, 0.0])
    run(tmp_path / "B,seed=1", [0.1, 0.0], finished=False)
    run(tmp_path / "C,seed=0", [])
    found = served(tmp_path)
    assert [row[:3] for row in found["A"]] == [[0.5, 0.25, 0.75], [0.6, 0.35, 0.85]]
    assert list(found) == ["A", "B"] and len(found["B"]) == 1 and found["B"][0][:2] == [0.1, 0.0]
    draw(found, tmp_path / "served.png")
    assert (tmp_path / "served.png").stat().st_size > 5000
