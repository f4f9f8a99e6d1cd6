"""Components in a configuration: a name or an object, with options in the component's own table."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import fedmpi
from fedmpi import Cohort, Config, UserError, client_sampler
from fedmpi.config import build_config, config_toml, load_config
from fedmpi.config.loading import given_config
from fedmpi.config.writing import flat_table, not_repeatable

HERE = "tests.test_components"
BASE = {"preset": "fedavg", "clients.count": 3}


@client_sampler(needs=("strata",))
def by_strata(view: Any, *, strength: float = 0.5, order: Literal["first", "last"] = "first") -> Cohort:
    """Select the first or the last clients of the strata.

    Parameters
    ----------
    view : View
    strength : float
        Strength.
    order : str
        Order.
    """
    return Cohort(view.available[: view.count] if order == "first" else view.available[-view.count :])


class Counting:
    """Sampler with state that only its object has."""

    def __init__(self, start: int = 0) -> None:
        self.rounds = start

    def draw(self, view: Any) -> Cohort:
        self.rounds += 1
        return Cohort(np.arange(self.rounds % 3, self.rounds % 3 + 2))


WAYS = {
    "flat": {
        **BASE,
        "clients.sampler": f"{HERE}:by_strata",
        "clients.sampler.strength": 1,
        "clients.sampler.strata": 4,
    },
    "a table": {**BASE, "clients.sampler": {"name": f"{HERE}:by_strata", "strength": 1.0, "strata": 4}},
    "an object": {**BASE, "clients": {"count": 3, "sampler": {"name": by_strata, "strength": 1, "strata": 4}}},
}
del WAYS["an object"]["clients.count"]


@pytest.mark.parametrize("way", WAYS)
def test_a_component_and_its_options_mean_the_same_however_they_are_written(way: str) -> None:
    config = given_config(WAYS[way], {})
    sampler = config.clients.sampler
    assert sampler.options == {"strength": 1.0, "order": "first"}
    assert (sampler.services.strata, sampler.services.features.name) == (4, "compressed-gradient")
    flat = flat_table(config)
    assert (flat["clients.sampler"], flat["clients.sampler.strength"]) == (f"{HERE}:by_strata", 1.0)
    assert flat_table(build_config([("file", tomllib.loads(config_toml(config)))])) == flat
    assert not not_repeatable(config)


def test_settings_of_the_command_line_are_one_layer_in_any_order() -> None:
    settings = ["preset=fedavg", "clients.count=3", f"clients.sampler={HERE}:by_strata", "clients.sampler.order=last"]
    for given in (settings, settings[::-1]):
        assert load_config(None, given).clients.sampler.options["order"] == "last"
    inline = load_config(None, ["preset=fedavg", 'clients.sampler={name="oort-loss", explore=0.5}', "clients.count=3"])
    assert inline.clients.sampler.options["explore"] == 0.5


def test_another_name_drops_the_options_of_the_component_before_it() -> None:
    before = given_config("fedstas", {})
    after = given_config(before, {"clients.sampler": "oort-loss", "server.weights": "samples"})
    assert after.clients.sampler.services is None and "clients.sampler.strata" not in flat_table(after)
    again = given_config(before, {"clients.sampler": "stratified"})
    assert again == before, "the same name keeps them"
    nested = given_config(
        before, {"clients.sampler.features": "label-histogram", "clients.sampler.within_stratum": "uniform"}
    )
    assert "clients.sampler.features.codebook_size" not in flat_table(nested)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strenght": 1}, r"clients\.sampler\.strenght is unknown to .*by_strata: did you mean strength\?"),
        ({"strength": "much"}, r"clients\.sampler\.strength = 'much' does not suit .*valid number"),
        ({"order": "middle"}, r"clients\.sampler\.order = 'middle' .*'first' or 'last'"),
        ({"view": 1}, r"clients\.sampler\.view is no option of .*put a star before"),
        ({"explore": 1}, r'clients\.sampler\.explore has no effect here: it needs .* = "oort-loss" or "oort"'),
        ({"features": {"name": "full-gradient", "codebook_size": 3}}, r'it needs .*features = "compressed-gradient"'),
        ({"clustering": {"name": "optics", "xi": 2}}, r"clients\.sampler\.clustering\.xi = 2 .*less than 1"),
        ({"clustering": "median"}, r"clients\.sampler\.clustering = .*'kmeans', 'optics'"),
    ],
)
def test_a_wrong_option_is_named_with_the_right_one(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        given_config({**BASE, "clients.sampler": {"name": f"{HERE}:by_strata", **options}}, {})


def test_an_object_is_copied_for_each_run_and_recorded_by_its_class() -> None:
    sampler = Counting()
    runs = [fedmpi.run("fedavg", {"rounds": 3, "clients.sampler": sampler, "logging.participants": True}) for _ in "12"]
    assert [r["clients"] for r in runs[0].records] == [r["clients"] for r in runs[1].records] == ["1-2", "2-3", "0-1"]
    assert sampler.rounds == 0
    [sentence] = not_repeatable(runs[0].config)
    assert "clients.sampler" in sentence and f"{HERE}:Counting(...)" in sentence


def test_a_custom_schedule_sets_the_rate_of_each_round() -> None:
    run = fedmpi.run(
        "fedavg", {"rounds": 3, "local.lr": 0.1, "local.schedule": lambda lr, round, rounds: lr / 2**round}
    )
    assert [record["lr"] for record in run.records] == [0.1, 0.05, 0.025]
    with pytest.raises(fedmpi.ComponentFailure, match="returned -0.1. Return a learning rate of at least 0"):
        fedmpi.run("fedavg", {"rounds": 1, "local.lr": 0.1, "local.schedule": lambda lr, round, rounds: -lr})


@pytest.mark.parametrize("switch", [True, {}])
def test_an_optional_table_is_on_with_its_defaults(switch: Any) -> None:
    config = Config(preset="fedavg", devices=switch, rebalance=switch)
    assert config.devices is not None and config.rebalance is not None and config.rebalance.alpha == 0.67
    off = given_config(config, {"devices": False, "rebalance": False})
    assert off.devices is None and off.rebalance is None
    assert "devices" not in config_toml(off)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('preset = "fedstas"\n[clients]\nsampler = "oort-loss"', r"\(preset fedstas sets server\.weights\)"),
        (
            '[clients]\nsampler = "oort-loss"\n[clients.sampler]\nexplore = 0.5',
            r'as \{ name = "power-of-choice", candidates = 20 \}',
        ),
        ('preset = "fedstas"\n[clients.sampler]\nnam = "oort"', r"did you mean name\?"),
    ],
)
def test_a_file_with_a_common_mistake_is_rejected_with_the_way_out(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_config(tmp_path / "run.toml")


def test_a_wrong_value_is_named_with_the_one_setting_that_gives_it() -> None:
    with pytest.raises(UserError, match=r"\(from --set rounds=many\)") as caught:
        load_config(None, ["preset=fedavg", "rounds=many", "local.lr=0.1"])
    assert caught.value.__cause__ is None
