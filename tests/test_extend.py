"""docs/howto/write-*.md and docs/examples: every snippet is short, is in a file, runs, and keeps its contract."""

from __future__ import annotations

import re
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedmpi
import fedmpi.testing

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "howto").glob("write-*.md"))}
EXAMPLES = ROOT / "docs" / "examples"
BLOCKS = [block for page in PAGES.values() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
SNIPPETS = [block for block in BLOCKS if "parametrize_with_checks" not in block]
[TESTED] = [block for block in BLOCKS if "parametrize_with_checks" in block]
LONGEST = 30

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sampler:loudest": ("clients.sampler", {"clients.sampler.keep": 0.8}),
    "growing:growing": ("clients.sampler", {"clients.sampler.least": 4}),
    "two_stage_sampler:Steepest": ("clients.sampler", {"clients.sampler.candidates": 7}),
    "steps_by_size:more_for_large": ("clients.sampler", {"clients.sampler.most": 3}),
    "rare_first:rare_first": ("samples.sampler", {"samples.sampler.share": 0.3}),
    "hardest:hardest": ("samples.sampler", {"samples.sampler.share": 0.3}),
    "coin:coin": ("samples.sampler", {"samples.sampler.share": 0.3}),
    "algorithm:Scaffold": ("local.algorithm", {}),
    "local_optimizer:nesterov": ("local.optimizer", {"local.optimizer.momentum": 0.9}),
    "loss:squared": ("task.loss", {}),
    "weights:power": ("server.weights", {"server.weights.exponent": 0.25}),
    "harder:Harder": ("server.weights", {}),
    "easing:Easing": ("server.weights", {}),
    "trust:Trust": ("server.aggregator", {}),
    "signs:signs": ("server.aggregator", {"server.aggregator.length": 0.01}),
    "median_clip:MedianClip": ("server.aggregator", {}),
    "ternary:ternary": ("compression", {"compression.share": 0.5}),
    "server_optimizer:Averaged": ("server.optimizer", {"server.optimizer.beta": 0.3}),
    "availability:in_turns": ("clients.availability", {"clients.availability.others": 0.6}),
    "directions:directions": ("clients.sampler.features", {"clients.sampler.features.last": 20}),
    "speeds:by_size": ("devices.speed", {"devices.speed.sigma": 3.0}),
    "scheduling:spread": ("topology.scheduling", {"topology.scheduling.alternate": False}),
    "model:narrow": ("model.name", {"model.width": 9}),
}
BESIDE: dict[str, dict[str, Any]] = {
    "scheduling:spread": {"topology": "mediators", "topology.clients_per_mediator": 2},
    "directions:directions": {"clients.sampler": "stratified", "clients.sampler.strata": 3},
    "speeds:by_size": {"devices": True, "clients.over_selection": 1.5},
}
"""Settings that a component needs."""
METRICS: dict[str, dict[str, Any]] = {"metric:coverage": {"task.metrics.least": 0.2}, "lowest_recall:LowestRecall": {}}
PREPARED: dict[str, dict[str, Any]] = {"data_set:waves": {"noise": 0.1}, "partition:home_class": {"share": 0.9}}
SOURCES: dict[str, dict[str, Any]] = {"source:clouds": {"data.source.clients": 7}}
KINDS = {
    "data_set:waves": "data set",
    "local_optimizer:nesterov": "local optimizer",
    "loss:squared": "loss",
    "metric:coverage": "metric",
    "lowest_recall:LowestRecall": "metric",
    "scheduling:spread": "scheduling",
    "speeds:by_size": "device rate",
    "partition:home_class": "partition",
    "availability:in_turns": "availability",
    "source:clouds": "data source",
}
SMALL = {"rounds": 3, "data.source": "digits:clients=9,alpha=0.5", "clients.count": 5, "local.engine": "sequential"}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder that contains the files."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_every_snippet_is_short_and_is_a_file_of_the_examples() -> None:
    files = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    parts = (*PARTS, *METRICS, *PREPARED, *SOURCES)
    assert len(SNIPPETS) == len(parts)
    for snippet in SNIPPETS:
        assert len(snippet.splitlines()) < LONGEST, snippet
        assert any(text.endswith(f"\n{snippet}") for text in files.values()), snippet
    for name in parts:
        module, _, thing = name.partition(":")
        assert name in files[module].partition("\n")[0] and re.search(rf"^(def|class) {thing}\b", files[module], re.M)


@cache
def fedavgs_loss() -> float:
    return float(fedmpi.run("fedavg", SMALL).records[-1]["train_loss"])


def last_loss(settings: dict[str, Any]) -> float:
    """Training loss of the last round; FedAvg's own without settings."""
    return fedmpi.run("fedavg", {**SMALL, **settings}).records[-1]["train_loss"] if settings else fedavgs_loss()


@pytest.mark.parametrize("name", PARTS)
def test_a_component_of_the_page_runs_by_its_name_and_changes_the_result(name: str, examples: None) -> None:
    (key, options), beside = PARTS[name], BESIDE.get(name, {})
    own = last_loss({key: name, **beside, **options})
    assert own != last_loss(beside)
    assert not options or own != last_loss({key: name, **beside}), "options change the result"


MADE = METRICS | PREPARED | SOURCES
CHECKED = {name: options for name, (_, options) in PARTS.items() if not name.startswith("model:")} | MADE


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKED)
def test_a_component_of_the_page_keeps_its_contract(name: str, long: bool, examples: None) -> None:
    """Checks of many draws or clients are long."""
    for check in fedmpi.testing.checks(name, CHECKED[name], KINDS.get(name), runs=False):
        if check.name.startswith(("inclusion", "cost")) == long:
            check()


def test_the_pages_metric_is_recorded(examples: None) -> None:
    [sure, surer] = [
        fedmpi.run("fedavg", {**SMALL, "task.metrics": [{"name": "metric:coverage", "least": least}]}).records[-1]
        for least in (0.2, 0.4)
    ]
    assert 1 >= sure["test_sure"] > surer["test_sure"] >= surer["test_sure_and_right"] > 0


def test_the_pages_source_makes_the_data_of_a_run(examples: None) -> None:
    keys = {"rounds": 2, "data.source": "source:clouds", "clients.sampler": "all"}
    runs = [fedmpi.run("fedavg", {**keys, "data.source.clients": clients}) for clients in (7, 9)]
    assert [run.summary["clients"] for run in runs] == [7, 9]
    assert runs[0].records[-1]["test_accuracy"] > 0.5


def test_the_pages_test_has_the_checks_of_its_components(examples: None) -> None:
    names: dict[str, Any] = {}
    exec(TESTED, names)
    [mark] = names["test_my_components"].pytestmark
    assert len(mark.args[1]) > 5
    names["test_my_components"](mark.args[1][0])


@pytest.mark.parametrize("script", ["own_data", "own_sampler"])
def test_a_script_runs(script: str, capsys: pytest.CaptureFixture[str], examples: None) -> None:
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert 0.1 < float(re.findall(r"\b(0\.\d{3})\b", capsys.readouterr().out)[-1]) <= 1


@pytest.mark.slow
def test_five_seeds_draw_curves(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["five_seeds.py", str(tmp_path / "curves.png")])
    runpy.run_path(str(EXAMPLES / "five_seeds.py"), run_name="__main__")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert re.fullmatch(r"(fed\w+ +0\.\d+ ± 0\.\d+ after 15 rounds, 5 seeds\n){2}", capsys.readouterr().out)


@pytest.mark.slow
def test_a_search_with_optuna(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install '.[examples]'")
    monkeypatch.setattr(sys, "argv", ["optuna_search.py", "4"])
    runpy.run_path(str(EXAMPLES / "optuna_search.py"), run_name="__main__")
    assert "accuracy 0." in capsys.readouterr().out
