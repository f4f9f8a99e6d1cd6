"""Objects given from Python: the run's folder contains their name and options, or a note that it cannot."""

from __future__ import annotations

import linecache
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedmpi
from fedmpi import Cohort, LocalAlgorithm, client_sampler, weights
from fedmpi.common.imports import holds_values
from fedmpi.config.loading import dotted, read_toml

FEW = {"rounds": 2, "clients.count": 4, "local.engine": "sequential"}


@client_sampler
class FirstOnes:
    """The same few clients, kept under another name than the option's."""

    def __init__(self, *, most: int = 3):
        self.indices = np.arange(most)
        self.drawn = 0

    def draw(self, view: Any) -> Cohort:
        self.drawn += 1
        return Cohort(self.indices)


class Damped(LocalAlgorithm):
    """Gradients of the client's last drift are added."""

    client_state = ("drift",)

    def __init__(self, *, share: float = 0.1):
        self.share = share

    def correction(self, client: Any, server: Any, generator: Any) -> torch.Tensor:
        return self.share * client.drift

    def finish(self, client: Any, server: Any, work: Any, generator: Any) -> None:
        client.drift = work.delta


class Scaled:
    """Cross-entropy, many times."""

    def __init__(self, *, factor: float = 1.0):
        self.factor = factor

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, reduction="none") * self.factor


def slow(parameters: Any, *, lr: float, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=lr / 2, momentum=momentum)


class CountsOnce:
    """Return the number of samples; the test sees the arguments."""

    def __init__(self, *, weight: float = 1.0):
        self.weight = weight

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"seen_{self.weight:g}": torch.tensor(len(targets) * self.weight)}


@weights(per_sample=False, normalized=True)
def powers(cohort: Cohort, sizes: Any, *, exponent: Any = 0.5) -> Any:
    return sizes[cohort.clients].astype(float) ** np.asarray(exponent)


def net(description: Any, width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, description.classes))


def scaled_within(factor: float) -> Callable[..., torch.Tensor]:
    def scaled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs, targets, reduction="none") * factor

    return scaled


HERE = __name__


def values(run: fedmpi.Run) -> bytes:
    return b"".join(value.numpy().tobytes() for value in run.model.state_dict().values())


def stored(run: fedmpi.Run, key: str) -> Any:
    assert run.folder is not None
    return dotted(read_toml(run.folder / "config.toml")).get(key)


@pytest.mark.parametrize(
    ("key", "given", "option"),
    [
        ("clients.sampler", FirstOnes, {"most": 5}),
        ("local.algorithm", Damped, {"share": 0.5}),
        ("server.weights", powers, {"exponent": 2.0}),
        ("model", net, {"width": 5}),
        ("local.optimizer", slow, {"momentum": 0.5}),
    ],
)
def test_a_runs_own_configuration_repeats_what_an_object_with_options_did(
    key: str, given: Any, option: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = {key: {"name": given, **option}}
    run = fedmpi.run("fedavg", {**FEW, **table}, out=tmp_path / "run")
    assert stored(run, key) == f"{HERE}:{given.__qualname__}"
    assert {inner: stored(run, f"{key}.{inner}") for inner in option} == option
    again = fedmpi.run(tmp_path / "run" / "config.toml")
    plain = fedmpi.run("fedavg", {**FEW, key: f"{HERE}:{given.__qualname__}"})
    assert values(again) == values(run) != values(plain)
    assert "repeat this run" not in caplog.text


def test_an_object_has_no_options_of_its_class() -> None:
    with pytest.raises(fedmpi.UserError, match=r"clients\.sampler\.most .*it has no options"):
        fedmpi.Config(clients={"sampler": FirstOnes(most=5), "sampler.most": 2, "count": 2})


@pytest.mark.parametrize(
    ("key", "given", "name"),
    [
        ("task.loss", Scaled(factor=2.0), "Scaled(...)"),
        ("task.loss", scaled_within(2.0), "scaled_within.<locals>.scaled(...)"),
    ],
)
def test_objects_without_a_file_are_reported_and_no_folder_repeats_them_as_something_else(
    key: str, given: Any, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedmpi"):
        run = fedmpi.run("fedavg", {**FEW, key: given}, out=tmp_path / "run")
    sentence = f"{key} is '{HERE}:{name}' in config.toml"
    assert caplog.text.count(sentence) == 1 and sentence in (tmp_path / "run" / "run.log").read_text()
    assert stored(run, key) == f"{HERE}:{name}"
    with pytest.raises(fedmpi.UserError, match=rf"{key} = .*\(\.\.\.\)' names an object that Python code gave"):
        fedmpi.run(tmp_path / "run" / "config.toml")
    assert len(fedmpi.run("fedavg", {**FEW, "rounds": 3, key: given}, out=tmp_path / "run", resume=True).records) == 3
    assert len(fedmpi.load_run(tmp_path / "run").records) == 3


def by_share(view: Any, *, count: int = 3) -> Cohort:
    return Cohort(view.available[:count])


def test_an_option_with_the_name_of_another_key_belongs_to_its_component_alone(tmp_path: Path) -> None:
    given = {"rounds": 1, "clients.sampler": by_share, "clients.count": 2}
    run = fedmpi.run("fedavg", given, out=tmp_path / "run")
    assert run.records[0]["participants"] == 3
    assert (stored(run, "clients.count"), stored(run, "clients.sampler.count")) == (2, 3)
    assert fedmpi.run(tmp_path / "run" / "config.toml").records[0]["participants"] == 3
    assert fedmpi.run("fedavg", {**given, "clients.sampler.count": 4}).records[0]["participants"] == 4


def test_a_partial_is_rejected_with_the_table_that_says_the_same() -> None:
    with pytest.raises(fedmpi.UserError, match=r"server\.weights = .*give a table"):
        fedmpi.run("fedavg", {**FEW, "server.weights": partial(powers, exponent=2.0)})


def test_options_that_a_file_cannot_hold_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = {"server.weights": powers, "server.weights.exponent": np.array(2.0)}
    run = fedmpi.run("fedavg", {**FEW, **own}, out=tmp_path / "array")
    assert "server.weights.exponent is 'numpy:ndarray(...)' in config.toml" in caplog.text
    caplog.clear()
    own["server.weights.exponent"] = np.int64(2)
    run = fedmpi.run("fedavg", {**FEW, **own}, out=tmp_path / "number")
    assert stored(run, "server.weights.exponent") == 2 and "repeat this run" not in caplog.text


def test_each_of_several_metrics_has_its_own_options(tmp_path: Path) -> None:
    metrics = [{"name": CountsOnce, "weight": weight} for weight in (2.0, 3.0)] + ["top-k"]
    run = fedmpi.run("fedavg", {**FEW, "task.metrics": metrics}, out=tmp_path / "run")
    assert {"test_seen_2", "test_seen_3"} <= run.records[-1].keys()
    named = [{"name": f"{HERE}:CountsOnce", "weight": weight} for weight in (2.0, 3.0)]
    assert stored(run, "task.metrics") == [*named, "top-k"]
    again = fedmpi.run(tmp_path / "run" / "config.toml").records[-1]
    assert again["test_seen_3"] == run.records[-1]["test_seen_3"]
    objects = {**FEW, "task.metrics": [CountsOnce(weight=2.0), CountsOnce(weight=3.0)]}
    given = fedmpi.run("fedavg", objects, out=tmp_path / "given")
    assert {"test_seen_2", "test_seen_3"} <= given.records[-1].keys()
    assert stored(given, "task.metrics") == [f"{HERE}:CountsOnce(...)"] * 2
    with pytest.raises(fedmpi.UserError, match="listed twice"):
        fedmpi.Config(preset="fedavg", task={"metrics": ["top-k", "top-k"]})


def test_names_bring_back_functions_and_classes_and_nothing_else() -> None:
    assert not any(map(holds_values, (net, Scaled, FirstOnes.draw, torch.optim.AdamW, cross_entropy, np.add, len)))
    assert all(map(holds_values, (Scaled(), scaled_within(1.0), Scaled().__call__, lambda x, y: x)))


def _typed_in(text: str, file: str = "<typed in>") -> dict[str, Any]:
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec(compile(text, file, "exec"), names)
    return names


def test_the_model_of_a_run_is_built_again_where_its_other_components_are_not_found(tmp_path: Path) -> None:
    few = _typed_in("from fedmpi import Cohort\ndef few(view):\n    return Cohort(view.available[:3])\n")["few"]
    settings = {**FEW, "clients.sampler": fedmpi.client_sampler(few)}
    run = fedmpi.run("fedavg", settings, data="digits:clients=5", out=tmp_path)
    found = fedmpi.load_run(tmp_path)
    values = zip(found.model.parameters(), run.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in values)
    with pytest.raises(fedmpi.UserError, match="typed_in"):
        _ = found.config


@pytest.mark.parametrize("file", ["<ipython-input-3>", "/tmp/ipykernel_77/1234567.py"])
def test_the_line_of_a_cell_is_named(file: str) -> None:
    sampler = _typed_in("def few(view):\n    return view.none_of_this\n", file)["few"]
    with pytest.raises(fedmpi.ComponentFailure, match=rf"typed_in:few\(\.\.\.\) \({file}:2\) failed in round 0"):
        fedmpi.run("fedavg", {**FEW, "clients.sampler": fedmpi.client_sampler(sampler)})
