"""A key that would do nothing under the chosen values is refused, with what would have to be chosen for it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedmpi import Config, UserError
from fedmpi.config import load_config
from fedmpi.config.keys import conditions, tables_by_name
from fedmpi.config.layers import assignments, nested
from fedmpi.config.loading import given_config
from tests.keys.entries import ALL, ASKED, CLASSES, CLOCK, COPIES, DRAWN, MEDIATED, OPTICS, PRIVATE, SOME, STRATA

HISTOGRAM = f"{DRAWN} participation.features=label-histogram participation.draw=uniform"
NOWHERE: dict[str, list[str]] = {
    "participation.count=3": [ALL],
    "participation.fraction=0.5": [ALL],
    "participation.levels=5": [STRATA, SOME],
    "participation.restore=false": [STRATA, SOME],
    "participation.probe=sample": [HISTOGRAM, SOME],
    "participation.refresh_who=participants": [HISTOGRAM, f"{STRATA} participation.refresh=0"],
    "participation.strata=3": [OPTICS, SOME],
    "participation.min_samples=3": [STRATA, SOME],
    "participation.xi=0.1": [STRATA, SOME],
    "participation.noise=drop": [STRATA, SOME],
    "participation.projection_above=9": [HISTOGRAM, SOME],
    "participation.spread=pairwise": [f"{STRATA} participation.allocation=equal", SOME],
    "participation.every_stratum=false": [f"{STRATA} participation.allocation=equal", SOME],
    "participation.design=sequential": [f"{STRATA} participation.draw=uniform", SOME],
    "samples.wanted=50": [SOME, f"{SOME} samples.rule=ratio samples.ratio=0.5"],
    "samples.size_estimate=duchi": [f"{SOME} samples.rule=exact samples.wanted=50"],
    "samples.asked=participants": [f"{SOME} samples.rule=exact samples.wanted=50"],
    "samples.epsilon=1": [SOME, ASKED],
    "samples.threshold=50": [SOME, ASKED],
    "samples.clip=false": [ASKED, PRIVATE.replace("randomised-response", "duchi")],
    "samples.memoise=true": [SOME, ASKED],
    "local.lr_every=3": [f"{SOME} local.lr_schedule=cosine"],
    "local.lr_factor=0.5": [f"{SOME} local.lr_schedule=inverse"],
    "topology.clients_per_mediator=3": [SOME],
    "topology.mediator_epochs=2": [SOME],
    "topology.reschedule=every-round": [SOME],
    "topology.scheduling=random": [SOME],
    "topology.target=test": [SOME, f"{MEDIATED} topology.scheduling=random"],
    "topology.balance=measured": [
        MEDIATED,
        f"{SOME} topology.placement=owner",
        f"{SOME} transport.kind=int8 transport.error_feedback=true",
    ],
    "topology.keep_optimizer=true": [MEDIATED, f"{SOME} local.optimizer=adam"],
    "rebalance.alpha=1": [SOME],
    "rebalance.copies=ratio": [SOME],
    "rebalance.mode=stored": [SOME],
    "rebalance.weights=original": [
        SOME,
        f"{COPIES} aggregation.weights=uniform",
        f"{COPIES} aggregation.weights=normalised aggregation.population=clients",
    ],
    **{
        f"rebalance.{key}": [SOME, f"{COPIES} rebalance.mode=stored"]
        for key in ("rotation=1", "shear=1", "shift=0", "zoom=0")
    },
    "attack.fraction=0.5": [SOME],
    "attack.scale=2": [SOME, f"{SOME} attack.kind=label-flip"],
    "system.over_selection=2": [SOME],
    "system.speed=lognormal": [SOME],
    "system.speed_median=9": [SOME, f"{CLASSES} system.speed_rates=[1] system.speed_shares=[1]"],
    "system.speed_sigma=2": [SOME, CLOCK],
    "system.speed_rates=[1]": [SOME, CLOCK],
    "system.speed_shares=[1]": [SOME, CLOCK],
    "system.upload=9": [SOME],
    "system.download=9": [SOME],
    "system.bandwidth_sigma=1": [SOME],
    "evaluation.clients_every=3": [SOME],
    "evaluation.fine_tune=1": [SOME],
    "transport.fraction=0.5": [SOME, f"{SOME} transport.kind=int8"],
    "transport.error_feedback=true": [SOME],
    "privacy.noise_multiplier=1": [SOME],
    "privacy.delta=0.1": [SOME],
}


def test_every_condition_is_tried():
    assert {setting.partition("=")[0] for setting in NOWHERE} == set(conditions())


@pytest.mark.parametrize("setting", NOWHERE)
def test_it_is_refused_where_it_would_do_nothing(setting: str):
    key = setting.partition("=")[0]
    for base in NOWHERE[setting]:
        load_config(None, base.split())
        with pytest.raises(
            UserError, match=rf"^{re.escape(key)} .*means nothing here: it needs .+: remove it or change"
        ):
            load_config(None, [*base.split(), setting])


@pytest.mark.parametrize("setting", NOWHERE)
def test_a_config_refuses_it_too_unless_its_value_is_the_default(setting: str):
    key = setting.partition("=")[0]
    for base in NOWHERE[setting]:
        whole = nested(assignments([*base.split(), setting]), "settings")
        table, _, name = key.partition(".")
        default = tables_by_name()[table].model_fields[name].default
        if whole[table][name] != default:
            with pytest.raises(UserError, match=rf"^{re.escape(key)} \(from Config\) means nothing here: it needs "):
                Config(**whole)
        whole[table][name] = default
        Config(**whole)


@pytest.mark.parametrize("other", [{}, {"samples": {"rule": "all"}}, {"data": {"shards": "elsewhere"}}])
@pytest.mark.parametrize("preset", ["fedavg", "fedsso", "fedstas", "astraea"])
def test_all_that_a_config_holds_makes_it_again(preset: str, other: dict[str, Any]):
    config = Config(preset=preset, **other)
    assert Config(**config.model_dump()) == Config.model_validate_json(config.model_dump_json()) == config


def test_a_rule_of_ones_own_may_want_a_number_of_samples():
    own = "samples.rule=tests.end_to_end.own_sums:rare_first samples.wanted=50"
    assert load_config(None, [*SOME.split(), *own.split()]).samples.wanted == 50


def test_a_condition_on_an_option_that_the_choice_does_not_have_is_none():
    """Draws by importance are such whatever strata were drawn by before."""
    before = load_config(None, f"{STRATA} participation.draw=uniform".split())
    after = {
        "participation.clients": "importance",
        "participation.design": "sequential",
        "aggregation.weights": "samples",
    }
    assert given_config(before, after).participation.design == "sequential"
