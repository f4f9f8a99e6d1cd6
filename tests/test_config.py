"""The configuration rejects what it cannot do, in one clear sentence, and survives a round trip through TOML."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi import UserError, presets
from fedmpi.config import build_config, config_toml, key_descriptions, load_config
from fedmpi.config.keys import components_of
from fedmpi.config.loading import given_config, remarks
from fedmpi.config.writing import differences, flat_table


def from_settings(*settings: str):
    return load_config(None, settings)


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name)
def test_every_preset_names_its_paper_and_its_complete_configuration_can_be_loaded_again(preset: Any):
    assert preset.paper and preset.title and preset.example.startswith("fedmpi train")
    config = from_settings(f"preset={preset.name}", "seed=7", "model.hidden=[32]")
    again = build_config([("config.toml", tomllib.loads(config_toml(config)))])
    assert again == config and config.preset == preset.name
    assert config_toml(again) == config_toml(config)


def test_the_file_overrides_the_preset_and_settings_override_the_file(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "fedavg"\nrounds = 7\n[local]\nlr = 0.5\nbatch_size = 3\n')
    config = load_config(path, ["local.lr=0.25"])
    assert (config.rounds, config.local.lr, config.local.batch_size) == (7, 0.25, 3)
    assert config.clients.fraction == 0.1


def test_a_preset_has_other_values_on_the_digits_and_those_of_its_paper_elsewhere():
    on_digits, elsewhere = from_settings("preset=fedsso"), from_settings("preset=fedsso", "data.source=shards/mine")
    assert (on_digits.local.lr, elsewhere.local.lr) == (0.2, 0.01)
    assert (
        fedmpi.Config(preset="fedsso").local.lr == from_settings("preset=fedsso", "data.source=digits:alpha=9").local.lr
    )
    assert "local.lr = 0.2" in remarks(flat_table(on_digits))[0]
    assert remarks(flat_table(elsewhere)) == []
    assert from_settings("preset=fedsso", "local.lr=0.05").local.lr == 0.05


def test_overrides_of_a_configuration_count_as_those_of_what_it_was_made_from():
    before = fedmpi.Config(preset="astraea", clients={"availability": "bernoulli", "availability.probability": 0.5})
    assert before.clients.count == 10
    after = given_config(before, {"data.source": "shards/mine", "clients.availability.probability": 0.7})
    assert (after.clients.count, after.clients.availability.options) == (50, {"probability": 0.7})
    assert given_config(after, {"preset": "fedavg"}).clients.fraction == 0.1
    assert before != after and before == given_config(before, {}) and {before: 1}[given_config(before, {})]


def test_a_count_replaces_the_fraction_of_the_preset():
    with pytest.raises(UserError, match="clients.count = 4 does not go with clients.fraction = 0.1"):
        given_config({"preset": "fedavg", "clients.count": 4, "clients.fraction": 0.1}, {})
    complete = tomllib.loads(config_toml(from_settings("preset=fedavg")))
    for config in (from_settings("preset=fedavg", "clients.count=4"), given_config(complete, {"clients.count": 4})):
        assert (config.clients.count, config.clients.fraction) == (4, None)


def test_the_values_of_a_preset_that_lose_their_meaning_are_dropped():
    config = from_settings("preset=fedsampling", "samples.sampler=all")
    assert config.samples.budget is None
    assert "budget" not in config_toml(config)


def slow_server(w: torch.Tensor, update: torch.Tensor, *, lr: float = 0.125, tau: float = 2.0) -> None:
    """A custom server optimizer with options that those of presets have too."""
    w.add_(update, alpha=lr)


def rate(config: fedmpi.Config) -> float:
    return config.server.optimizer.options["lr"]


@pytest.mark.parametrize("preset", ["fedavg", "fedadam"])
def test_a_custom_component_keeps_its_defaults_where_it_replaces_that_of_a_preset(preset: str):
    own = "server.optimizer=tests.test_config:slow_server"
    config = from_settings(f"preset={preset}", own)
    assert config.server.optimizer.options == {"lr": 0.125, "tau": 2.0}
    assert rate(build_config([("config.toml", tomllib.loads(config_toml(config)))])) == 0.125
    assert rate(given_config(fedmpi.Config(preset=preset), {"server.optimizer": slow_server})) == 0.125
    assert rate(from_settings(f"preset={preset}", own, "server.optimizer.lr=0.5")) == 0.5


@pytest.mark.parametrize("other", ["sgd", "momentum", "yogi"])
def test_another_component_drops_the_options_of_the_replaced_one(other: str):
    config = from_settings("preset=fedadam", f"server.optimizer={other}")
    table = {"name": other}
    assert rate(config) == 1.0 and given_config("fedadam", {"server.optimizer": other}) == config
    assert rate(fedmpi.Config(preset="fedadam", server={"optimizer": table})) == 1.0
    assert rate(given_config(fedmpi.Config(preset="fedadam"), {"server": {"optimizer": table}})) == 1.0
    assert rate(from_settings("preset=fedadam", "server.optimizer.lr=0.02", f"server.optimizer={other}")) == 0.02
    assert rate(from_settings("preset=fedadam", "server.optimizer=adam")) == 0.01, "the same component"


def test_a_run_of_a_configuration_made_in_python_is_resumed_from_its_folder(tmp_path: Path):
    config, asked = fedmpi.Config(rounds=2, clients={"count": 3, "sampler": "oort-loss"}), iter(range(9))
    assert fedmpi.run(config, out=tmp_path, stop=lambda: next(asked) >= 0).ending == "stopped"
    path = tmp_path / "config.toml"
    assert fedmpi.run(path, out=tmp_path, resume=True).ending == "finished"
    written = tomllib.loads(path.read_text())
    assert differences(written, config) == []
    other = given_config(config, {"clients.sampler.explore": 1, "evaluation.target_accuracy": 0.5})
    found = {key: values for key, *values in differences(written, other)}
    assert found == {"clients.sampler.explore": ["0.9", "1.0"], "evaluation.target_accuracy": ["unset", "0.5"]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["preset=fedavgg"], "did you mean fedavg?"),
        (["preset=fedavg", "clients.cuont=3"], "did you mean clients.count?"),
        (["preset=fedavg", "rouns=3"], "did you mean rounds?"),
        (["preset=fedavg", "lr=0.1"], "did you mean local.lr?"),
        (["preset=fedavg", "local.lr=-1"], "greater than 0"),
        (["preset=fedavg", "local.lr=fast"], "valid number"),
        (["preset=fedavg", "local.lr=-1", "rounds=0"], "rounds = 0 (from --set"),
        (
            ["preset=fedavg", "devices.speed=classes", "devices.speed.rates=['x']", "devices.speed.shares=[1]"],
            "devices.speed.rates",
        ),
        (["preset=fedavg", "local=3"], "table of keys"),
        (["preset=fedavg", "noequals"], "Write table.key=value"),
        (["preset=fedavg", "samples.sampler.ratio=0.1"], 'needs samples.sampler = "ratio"'),
        (
            ["preset=fedavg", "cluster.placement=owner", "cluster.balance=measured"],
            'needs cluster.placement = "auto" or "shared"',
        ),
        (["preset=astraea", "cluster.balance=measured"], 'needs topology = "star"'),
    ],
)
def test_wrong_input_gets_one_sentence(settings: list[str], message: str):
    with pytest.raises(UserError) as caught:
        from_settings(*settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rejected_value_is_named_with_its_key_and_where_it_comes_from(tmp_path: Path):
    wrong, path = "local.lr = -1{}: input should be greater than 0", tmp_path / "run.toml"
    path.write_text('preset = "fedavg"\n[local]\nlr = -1\n')
    for call, origin in (
        (lambda: load_config(path), f" (from {path})"),
        (lambda: from_settings("preset=fedavg", "local.lr=-1"), " (from --set local.lr=-1)"),
        (lambda: given_config("fedavg", {"local.lr": -1}), " (from the overrides)"),
        (lambda: fedmpi.Config(preset="fedavg", local={"lr": -1}), " (from Config)"),
    ):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == wrong.format(origin)


def test_a_missing_and_a_malformed_file_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere.toml"):
        load_config(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3\n")
    with pytest.raises(UserError, match=r"broken.toml is not valid TOML.*line 1"):
        load_config(broken)


def test_every_chosen_component_is_found_with_its_key():
    metrics = [{"name": "top-k", "k": 2}, {"name": "top-k", "k": 3}]
    chosen = [*components_of(fedmpi.Config(task={"metrics": metrics}, clients={"count": 2}, topology="mediators"))]
    assert [one.name for key, one in chosen if key == "task.metrics"] == ["top-k", "top-k"]
    assert {("topology.scheduling", "greedy"), ("data.source", "digits")} <= {(key, one.name) for key, one in chosen}


def test_every_key_is_described():
    assert all(description for _, _, description in key_descriptions())
    defaults = {key: default for key, default, _ in key_descriptions()}
    texts = {key: text for key, _, text in key_descriptions()}
    assert texts["clients.sampler.strata"].endswith(
        'Needs clients.sampler.clustering = "kmeans". Option of stratified.'
    )
    assert (defaults["local.lr"], defaults["devices.speed.rates"]) == ("0.05", "required")


@pytest.mark.parametrize(
    ("key", "value"), [("rounds", True), ("local.batch_size", True), ("server.optimizer.lr", True), ("data.verify", 1)]
)
def test_true_is_no_number_and_no_number_is_true(key: str, value: Any) -> None:
    words = "give a number, not true or false" if isinstance(value, bool) else "give true or false, not a number"
    for call in (
        lambda: given_config("fedavg", {key: value}),
        lambda: load_config(None, ["preset=fedavg", f"{key}={json.dumps(value)}"]),
    ):
        with pytest.raises(UserError, match=rf"^{key} = .*: {words}$"):
            call()


def test_whole_numbers_may_be_written_as_others_and_truth_be_numpys() -> None:
    config = given_config("fedavg", {"rounds": 5.0, "local.epochs": np.int64(2), "data.verify": np.True_})
    assert (config.rounds, config.local.epochs, config.data.verify) == (5, 2, True)


@pytest.mark.parametrize(("key", "word"), [("evaluation.batch_size", "auto"), ("local.batch_size", "all")])
def test_a_word_that_a_number_may_be_replaced_by_is_named(key: str, word: str) -> None:
    with pytest.raises(UserError, match=f"{key} = 'some' .*integer.*, or give '{word}'"):
        load_config(None, ["preset=fedavg", f"{key}=some"])
    assert load_config(None, ["preset=fedavg", f"{key}={word}"])
