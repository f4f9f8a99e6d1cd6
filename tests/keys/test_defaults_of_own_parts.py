"""Defaults of the user's own parts, None, and what no file holds, in a configuration made in any way."""

from __future__ import annotations

import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedmpi
from fedmpi import Cohort, Config, LocalAlgorithm, UserError, client_sampler
from fedmpi.config import config_toml
from fedmpi.config.loading import given_config
from fedmpi.config.writing import flat_table
from fedmpi.results.loading import blocks_of, find_runs, read_runs
from fedmpi.sweeps.plan import plan_sweep
from fedmpi.sweeps.run import write_notes
from tests.keys.test_own_options import as_table


class Damped(LocalAlgorithm):
    def __init__(self, *, beta1: float = 0.5, on_divergence: str = "drop"):
        self.given = beta1, on_divergence


class Named(LocalAlgorithm):
    def __init__(self, *, beta1: str = "half"):
        self.given = beta1


def sure(outputs: Tensor, targets: Tensor, *, threshold: float = 0.5) -> dict[str, Tensor]:
    return {"sure": (outputs.softmax(1).max(1).values > threshold).sum()}


def unsure(outputs: Tensor, targets: Tensor, *, threshold: float = 0.2, k: int = 2) -> dict[str, Tensor]:
    return {"unsure": (outputs.softmax(1).max(1).values < threshold).sum()}


@client_sampler
def firsts(view: Any, *, table: Any = 1, strata: Any = 2, **further: Any) -> Cohort:
    return Cohort(view.available[: view.count])


def net(description: Any, *, depth: int | None = 3, width: Any = 4, act: str | None = None) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


HERE = __name__
FEW = {"rounds": 1, "clients.count": 2, "logging.tensorboard": False}


def every_way(keys: dict[str, Any]) -> list[Config]:
    return [given_config("fedavg", keys), Config(**as_table(keys, "fedavg"))]


def test_a_default_for_a_key_that_fedmpi_reads_too_is_the_keys_value_in_every_way() -> None:
    keys = FEW | {"local.algorithm": f"{HERE}:Damped", "local.optimizer": "adam"}
    for config in every_way(keys):
        assert (config.local.beta1, config.local.on_divergence) == (0.5, "drop")
        assert config.local.algorithm.options == {"beta1": 0.5, "on_divergence": "drop"}
        again = Config.exactly(tomllib.loads(config_toml(config)))
        assert (again.local.beta1, again.local.beta2) == (0.5, config.local.beta2)
    for config in every_way(keys | {"local.optimizer.beta1": 0.25, "local.on_divergence": "stop"}):
        assert config.local.algorithm.options == {"beta1": 0.25, "on_divergence": "stop"}
    alone = {key: value for key, value in keys.items() if key != "local.optimizer"}
    for config in every_way(alone):
        assert (config.local.beta1, config.local.on_divergence) == (0.9, "drop"), "without Adam beta1 is its own"


def test_a_default_that_such_a_key_cannot_take_is_refused_in_every_way() -> None:
    keys = FEW | {"local.algorithm": f"{HERE}:Named", "local.optimizer": "adam"}
    sentence = r"local.optimizer.beta1 = 'half': input should be a valid number.*Named has an option of this name, .* another one$"
    for way in (lambda: given_config("fedavg", keys), lambda: Config(**as_table(keys, "fedavg"))):
        with pytest.raises(UserError, match=sentence):
            way()


@pytest.mark.parametrize("chosen", [["sure", "unsure"], ["unsure", "sure"]])
def test_parts_with_an_option_of_one_name_keep_their_own_defaults(chosen: list[str]) -> None:
    names = [f"{HERE}:{name}" for name in chosen] + ["top-k"]
    expected = {f"{HERE}:sure": {"threshold": 0.5}, f"{HERE}:unsure": {"threshold": 0.2, "k": 2}, "top-k": {"k": 5}}
    for config in every_way(FEW | {"task.metrics": names}):
        for again in (config, Config.exactly(tomllib.loads(config_toml(config))), given_config(config, {"seed": 3})):
            for part in all_chosen(again, "metric"):
                defaults = {option.name: option.default for option in part.options}
                assert defaults | options_of_part(again, part) == expected[part.name]
        assert flat_table(config).keys().isdisjoint({"task.threshold", "task.metrics.k_XXX"})
    for config in every_way(FEW | {"task.metrics": names, "task.threshold": 0.4}):
        own = all_chosen(config, "metric")[:2]
        assert [options_of_part(config, part)["threshold"] for part in own] == [0.4, 0.4]
        assert flat_table(config)["task.threshold"] == 0.4


def test_none_for_an_option_stays_where_other_keys_are_overridden() -> None:
    keys = FEW | {"clients.sampler": firsts, "clients.sampler.other": None, "clients.sampler.strata": None}
    for config in every_way(keys | {"model.name": net, "model.depth": None}):
        again = given_config(config, {"rounds": 2})
        assert again == given_config(config, {"rounds": 2}) and again.rounds == 2
        found = again.clients.sampler.options
        assert (found["other"], found["strata"], again.model.options["depth"]) == (None, None, None)
        table = flat_table(again)
        assert table.keys().isdisjoint({"clients.sampler.other", "clients.sampler.strata", "model.depth"})


def test_none_for_an_option_of_a_model_is_reported() -> None:
    def reported(options: dict[str, Any]) -> list[str]:
        return [one.partition(",")[0] for one in not_repeatable(Config(preset="fedavg", model=options))]

    assert reported({"name": net, "depth": None}) == ["model.depth is None"]
    assert reported({"name": net, "act": None}) == [], "its default"
    assert reported({"name": net, "depth": 3}) == reported({"name": "mlp"}) == reported({"name": net}) == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": None}, {"a": "builtins:NoneType(...)"}),
        ([1, [None]], [1, ["builtins:NoneType(...)"]]),
        ({"a": {"b": Path("x")}}, {"a": {"b": f"pathlib:{type(Path()).__name__}(...)"}}),
        ({1: 2}, "builtins:dict(...)"),
        ([time(1, tzinfo=UTC)], ["datetime:time(...)"]),
    ],
)
def test_what_no_file_holds_within_lists_and_tables_is_reported_and_runs(
    value: Any, shown: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = FEW | {"clients.sampler": firsts, "clients.sampler.table": value, "model": {"name": net, "width": value}}
    run = fedmpi.run("fedavg", keys, out=tmp_path / "run")
    assert run.folder is not None
    table = tomllib.loads((run.folder / "config.toml").read_text())
    assert table["participation"]["table"] == table["model"]["width"] == shown
    for key in ("clients.sampler.table", "model.width"):
        assert f"{key} is {shown!r} in config.toml, which holds texts, numbers and lists of them" in caplog.text


def test_dates_are_values_like_others(tmp_path: Path) -> None:
    made = {"clients.sampler": f"{HERE}:firsts", "clients.sampler.table": date(2021, 2, 3)}
    keys = FEW | made | {"clients.sampler.strata": [datetime(2021, 2, 3, 4, 5, 6), time(7, 8)]}
    run = fedmpi.run("fedavg", keys, out=tmp_path / "run")
    assert run.folder is not None
    written = run.folder / "config.toml"
    table = tomllib.loads(written.read_text())["participation"]
    assert (table["table"], table["strata"]) == (made["clients.sampler.table"], keys["clients.sampler.strata"])
    assert not_repeatable(given_config(written, {})) == []
    assert fedmpi.run(written, {"rounds": 2}, out=run.folder, resume=True).records[-1]["round"] == 1
    with pytest.raises(UserError, match=r"clients.sampler.table.*2021, 2, 3.* there, .*2022"):
        fedmpi.run(written, {"rounds": 3, "clients.sampler.table": date(2022, 1, 1)}, out=run.folder, resume=True)
    file = tmp_path / "dates.toml"
    dates = "sweep.participation.table = [2021-01-01, 2022-01-01]"
    file.write_text(f'participation = {{count = 2, clients = "{HERE}:firsts"}}\n{dates}')
    sweep = plan_sweep(file, tmp_path / "sweep")
    write_notes(sweep, sweep.runs)
    assert [run.folder.name for run in sweep.runs] == ["table=2021-01-01", "table=2022-01-01"]
    found = read_runs(find_runs([tmp_path / "sweep"], planned=True))
    assert [group.label for group in blocks_of(found)[0].groups] == ["table = 2021-01-01", "table = 2022-01-01"]
