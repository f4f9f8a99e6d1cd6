"""A key without effect under the chosen values is rejected with the condition that it needs."""

from __future__ import annotations

import re

import pytest

from fedmpi import Config, UserError
from fedmpi.config import load_config
from fedmpi.config.loading import assignments, given_config
from tests.keys.worlds import ALL, ASKED, CLASSES, CLOCK, COPIES, DRAWN, MEDIATED, OPTICS, PRIVATE, SOME, STRATA

HISTOGRAM = f"{DRAWN} clients.sampler.features=label-histogram clients.sampler.within_stratum=uniform"
FLYING = "topology=async topology.in_flight=4 devices=true"
NOWHERE: dict[str, list[str]] = {
    "clients.count=3": [ALL, FLYING],
    "clients.fraction=0.5": [ALL, FLYING],
    "topology.in_flight=3": [SOME],
    "topology.staleness.b=3": [FLYING],
    "clients.sampler.features.codebook_size=5": [STRATA, SOME],
    "clients.sampler.features.decompress=false": [STRATA, SOME],
    "clients.sampler.features.probe=sample": [HISTOGRAM, SOME],
    "clients.sampler.refresh_clients=selected": [HISTOGRAM, f"{STRATA} clients.sampler.refresh=0"],
    "clients.sampler.strata=3": [OPTICS, SOME],
    "clients.sampler.clustering.min_samples=3": [STRATA, SOME],
    "clients.sampler.clustering.xi=0.1": [STRATA, SOME],
    "clients.sampler.clustering.outliers=drop": [STRATA, SOME],
    "clients.sampler.projection_above=9": [HISTOGRAM, SOME],
    "clients.sampler.spread=pairwise": [f"{STRATA} clients.sampler.allocation=equal", SOME],
    "clients.sampler.every_stratum=false": [f"{STRATA} clients.sampler.allocation=equal", SOME],
    "clients.sampler.design=sequential": [f"{STRATA} clients.sampler.within_stratum=uniform", SOME],
    "samples.budget=50": [SOME, f"{SOME} samples.sampler=ratio samples.sampler.ratio=0.5"],
    "samples.size.estimate=duchi": [f"{SOME} samples.sampler=exact samples.budget=50"],
    "samples.size.query=selected": [f"{SOME} samples.sampler=exact samples.budget=50"],
    "samples.size.epsilon=1": [SOME, ASKED],
    "samples.size.max_size=50": [SOME, ASKED],
    "samples.size.clip=false": [ASKED, PRIVATE.replace("randomized-response", "duchi")],
    "samples.size.reuse_reports=true": [SOME, ASKED],
    "local.schedule.every=3": [f"{SOME} local.schedule=cosine"],
    "local.schedule.factor=0.5": [f"{SOME} local.schedule=inverse"],
    "local.warmup_from=0.5": [SOME],
    "local.optimizer.nesterov=true": [f"{SOME} local.optimizer.weight_decay=0.1"],
    "topology.clients_per_mediator=3": [SOME],
    "topology.epochs=2": [SOME],
    "topology.regroup=every-round": [SOME],
    "topology.scheduling=random": [SOME],
    "topology.target=test": [SOME, f"{MEDIATED} topology.scheduling=random"],
    "cluster.balance=measured": [MEDIATED, f"{SOME} cluster.placement=owner"],
    "topology.keep_optimizer=true": [MEDIATED, f"{SOME} local.optimizer=adam"],
    "rebalance.weights=original": [f"{COPIES} server.weights=uniform"],
    **{
        f"rebalance.{key}": [f"{COPIES} rebalance.mode=stored"]
        for key in ("rotation=1", "shear=1", "shift=0", "zoom=0")
    },
    "clients.attack_fraction=0.5": [SOME],
    "attack.scale=2": [SOME, f"{SOME} attack=label-flip"],
    "clients.over_selection=2": [SOME],
    "devices.late=partial": [CLOCK, SOME],
    "clients.availability.period=9": [SOME],
    "devices.speed.median=9": [f"{CLASSES} devices.speed.rates=[1] devices.speed.shares=[1]"],
    "devices.speed.sigma=2": [SOME, CLOCK],
    "devices.speed.rates=[1]": [SOME, CLOCK],
    "devices.speed.shares=[1]": [SOME, CLOCK],
    "devices.upload.sigma=1": [CLOCK],
    "evaluation.clients_every=3": [SOME],
    "evaluation.fine_tune=1": [SOME],
    "evaluation.min_delta=0.1": [SOME],
    "compression.fraction=0.5": [SOME, f"{SOME} compression=int8"],
    "compression.error_feedback=true": [SOME],
    "privacy.noise_multiplier=1": [SOME],
    "privacy.delta=0.1": [SOME],
    "privacy.adaptive_clip=true": [SOME],
    "privacy.noise=tree": [SOME],
}


@pytest.mark.parametrize("setting", NOWHERE)
def test_it_is_rejected_however_it_is_set(setting: str):
    key = setting.partition("=")[0]
    named = "|".join(map(re.escape, (key, key.rpartition(".")[0])))  # a table that the sampler lacks is named itself
    for base in NOWHERE[setting]:
        load_config(None, base.split())
        with pytest.raises(UserError, match=rf"^({named}) .*has no effect here: it needs .+"):
            load_config(None, [*base.split(), setting])
        with pytest.raises(UserError, match=rf"^({named}) .*has no effect here: it needs .+"):
            Config(**assignments([*base.split(), setting]))


def test_a_custom_sampler_may_have_a_sample_budget():
    own = "samples.sampler=tests.end_to_end.own_sums:rare_first samples.budget=50"
    assert load_config(None, [*SOME.split(), *own.split()]).samples.budget == 50


def test_a_condition_on_an_option_that_the_choice_does_not_have_is_none():
    """Draws by importance do not depend on earlier strata."""
    before = load_config(None, f"{STRATA} clients.sampler.within_stratum=uniform".split())
    after = {"clients.sampler": "importance", "clients.sampler.design": "sequential", "server.weights": "samples"}
    assert given_config(before, after).clients.sampler.options["design"] == "sequential"
