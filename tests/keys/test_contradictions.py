"""Choices that cannot go together are rejected with their keys, and not where one of them is another.

A row contains the keys, settings over FedAvg that are rejected, and valid settings near them: no part of a condition
can be missing, and none be one too many.
"""

from __future__ import annotations

import re

import pytest

from fedmpi import ComponentFailure, Config, UserError
from fedmpi.config import load_config
from fedmpi.config.checks import weighs_twice
from tests.keys.contrary import WholeBatches

BASE = "preset=fedavg clients.count=4"
DRAWN = "preset=fedsampling samples.budget=50 clients.sampler=uniform"
ALL = "preset=fedavg clients.sampler=all"
RELAYS = "topology=mediators topology.clients_per_mediator=2"
FLYING = "preset=fedbuff"
STRATA = "clients.sampler=stratified clients.sampler.strata=3"
CLIPPED = "server.weights=uniform privacy.clip_norm=1"
NOISED = f"{CLIPPED} privacy.noise_multiplier=1"
MEDIAN = "server.aggregator=median"
LEARNS = "server.weights=q-ffl"
ATTACK = "clients.attack_fraction=0.2 attack"
RESIDUALS = "compression=int8 compression.error_feedback=true"
PARTLY = "samples.budget=50 samples.sampler"
INTERVALS = "clients.availability=intervals clients.availability.file=unread.csv"
RATIO = "samples.sampler=ratio samples.sampler.ratio=0.5"
PRIVATE = "samples.size.estimate=randomized-response"
UNBIASED = "server.weights=unbiased clients.availability"
OWN = "tests.keys.contrary"
SAMPLER = f"clients.sampler={OWN}"
HISTOGRAM = "clients.sampler.features=label-histogram"

REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "clients.sampler": (
        [DRAWN, f"{SAMPLER}:by_seconds", f"{SAMPLER}:SecondsOnTrial"],
        [
            f"{DRAWN} clients.count=3",
            f"{DRAWN} clients.fraction=0.5",
            "preset=fedsampling",
            f"{SAMPLER}:by_seconds devices=true",
            f"{SAMPLER}:by_norms",
        ],
    ),
    "topology": ([f"{FLYING} devices=false"], [FLYING, "preset=fedasync"]),
    "topology.buffer, topology.period": (
        [f"{FLYING} topology.buffer=3 topology.period=9"],
        [f"{FLYING} topology.period=9", f"{FLYING} topology.buffer=3"],
    ),
    **{
        f"topology, {key}": ([f"{FLYING} {setting}" for setting in refused], [f"{FLYING} {one}" for one in fine])
        for key, (refused, fine) in {
            "clients.sampler": (
                [
                    "clients.sampler=all",
                    "clients.sampler=shuffled",
                    f"{SAMPLER}:by_norms",
                    f"{SAMPLER}:SecondsOnTrial",
                    "clients.sampler=power-of-choice",
                    STRATA,
                ],
                ["clients.sampler=weighted", "clients.sampler=ucb", f"{SAMPLER}:by_seconds"],
            ),
            "clients.over_selection": (["clients.over_selection=1.5"], ["clients.over_selection=1"]),
            "samples.sampler": ([RATIO, f"{PARTLY}=exact", f"samples.sampler={OWN}:own_rows"], []),
            "server.weights": (
                [f"server.weights={name}" for name in ("normalized", "unbiased", "literal", "q-ffl")],
                ["server.weights=samples", "server.weights=docs.examples.weights:power"],
            ),
            "privacy.clip_norm": (["privacy.clip_norm=1"], []),
            "logging.diagnostics": (["logging.diagnostics=true"], []),
            "compression.error_feedback": ([RESIDUALS], ["compression=int8", f"{ATTACK}=noise", MEDIAN]),
            "devices.late": (["devices.deadline=5 devices.late=partial"], ["devices.deadline=5 devices.power=true"]),
            "local.personal": (['local.personal=["*weight"]'], []),
            "model.copies": (["model.copies=2"], []),
            "local.algorithm": (["local.algorithm=scaffold", "local.algorithm=fednova"], ["local.proximal_mu=1"]),
        }.items()
    },
    "clients.count, clients.fraction": (["clients.fraction=0.5"], []),
    "local.epochs, local.steps": (["local.epochs=1 local.steps=1"], ["local.steps=1"]),
    "samples.sampler": (
        [
            "samples.sampler=bernoulli",
            "samples.sampler=exact",
            f"samples.sampler={OWN}:WholeBatches local.batch_size=1",
            f"samples.sampler={OWN}:WholeBatches samples.sampler.least=9 local.batch_size=8",
        ],
        [f"{PARTLY}=exact", f"samples.sampler={OWN}:WholeBatches local.batch_size=all", "local.batch_size=1"],
    ),
    "server.weights, clients.sampler": (["server.weights=stratified"], [f"{STRATA} server.weights=stratified"]),
    "server.weights, clients.availability": (
        [
            f"{UNBIASED}=label-group clients.availability.by_label=[0.5,0,1]",
            f"server.weights=unbiased devices=true {INTERVALS}",
        ],
        [
            f"{UNBIASED}=label-group clients.availability.by_label=[0.5,1,1]",
            "server.weights=normalized clients.availability=label-group clients.availability.by_label=[0.5,0,1]",
            "server.weights=unbiased",
        ],
    ),
    "clients.availability": ([INTERVALS], [f"devices=true {INTERVALS}"]),
    "server.weights, devices.deadline": (
        ["server.weights=unbiased devices.deadline=9"],
        ["server.weights=normalized devices.deadline=9", "server.weights=unbiased devices=true"],
    ),
    **{
        f"{key}, {other}": ([f"{settings} {those}"], [settings])
        for key, settings in {
            "devices.deadline": "devices.deadline=9",
            "devices.power": "devices.power=true",
            "clients.availability": f"devices=true {INTERVALS}",
        }.items()
        for other, those in {"samples.sampler": "samples.sampler=fedbalancer", "topology": RELAYS}.items()
    },
    "topology.regroup, clients.sampler": (
        [f"{RELAYS} topology.regroup=once"],
        [f"{RELAYS} topology.regroup=every-round", "preset=astraea topology.regroup=once clients.sampler=all"],
    ),
    "cluster.placement, topology": (
        ["cluster.placement=mediator", f"{RELAYS} cluster.placement=shared"],
        [f"{RELAYS} cluster.placement=mediator", "cluster.placement=shared", f"{RELAYS} cluster.placement=owner"],
    ),
    "cluster.server_trains, topology": (
        [f"{RELAYS} cluster.server_trains=always"],
        ["cluster.server_trains=always", f"{RELAYS} cluster.server_trains=never"],
    ),
    "clients.over_selection, clients.sampler": (
        [f"{ALL} devices=true clients.over_selection=1.5"],
        ["devices=true clients.over_selection=1.5", f"{ALL} devices=true"],
    ),
    "clients.over_selection, topology": (
        [f"{RELAYS} devices=true clients.over_selection=1.5"],
        [f"{RELAYS} devices=true clients.over_selection=1"],
    ),
    "clients.sampler, clients.sampler.features": (
        [f"{STRATA} clients.sampler.within_stratum=importance {HISTOGRAM}", f"clients.sampler=importance {HISTOGRAM}"],
        [
            f"{STRATA} clients.sampler.within_stratum=uniform {HISTOGRAM}",
            f"{STRATA} clients.sampler.within_stratum=importance clients.sampler.features=full-gradient",
            f"{SAMPLER}:by_strata {HISTOGRAM} clients.sampler.strata=3",
        ],
    ),
    **{
        f"{key}, topology": ([f"{RELAYS} {setting}" for setting in settings], settings)
        for key, settings in {
            "privacy.clip_norm": [CLIPPED],
            "logging.diagnostics": ["logging.diagnostics=true"],
            "compression": ["compression=int8"],
            "server.aggregator": [MEDIAN],
            "server.weights": [LEARNS],
            "attack": [f"{ATTACK}=sign-flip", f"{ATTACK}=noise"],
            "clients.sampler": [f"{SAMPLER}:by_norms"],
        }.items()
    },
    **{
        f"local.schedule_unit, {key}": ([f"{settings} local.schedule_unit=step"], [settings])
        for key, settings in {
            "topology": RELAYS,
            "server.weights": LEARNS,
            "local.algorithm": "preset=scaffold clients.count=4",
        }.items()
    },
    **{
        f"local.personal, {key}": ([f'{settings} local.personal=["a.*"]'], [settings])
        for key, settings in {
            "topology": RELAYS,
            "privacy.clip_norm": CLIPPED,
            "clients.sampler": STRATA,
            "samples.sampler": "samples.sampler=fedbalancer",
            "server.weights": LEARNS,
            "logging.diagnostics": "logging.diagnostics=true",
        }.items()
    },
    **{
        f"model.copies, {key}": ([f"{settings} model.copies=2"], [settings])
        for key, settings in {
            "local.personal": 'local.personal=["output.*"]',
            "local.algorithm": "local.algorithm=scaffold",
            "model.lora": "model.lora={rank=2}",
            "compression": "compression=int8",
            "attack": f"{ATTACK}=noise",
            "server.aggregator": MEDIAN,
            "server.weights": "server.weights=literal",
            "topology": RELAYS,
        }.items()
    },
    "cluster.placement, compression.error_feedback": (
        [f"{RESIDUALS} cluster.placement=shared"],
        [f"{RESIDUALS} cluster.placement=owner", "compression=int8 cluster.placement=shared"],
    ),
    "cluster.balance, compression.error_feedback": ([f"{RESIDUALS} cluster.balance=measured"], []),
    "privacy.clip_norm, server.weights": (
        [f"privacy.clip_norm=1 server.weights={name}" for name in ("samples", "normalized")],
        ["server.weights=normalized"],
    ),
    "clients.over_selection, samples.sampler": (
        ["devices=true clients.over_selection=1.5 samples.sampler=fedbalancer"],
        ["devices=true clients.over_selection=1.5", f"devices=true samples.sampler={OWN}:own_rows"],
    ),
    "clients.sampler, samples.sampler": (
        [
            f"{SAMPLER}:SecondsOnTrial devices=true {PARTLY}=exact",
            f"{SAMPLER}:SecondsOnTrial devices=true samples.sampler={OWN}:own_rows",
            f"{SAMPLER}:SecondsOnTrial devices=true {PARTLY}=bernoulli samples.size.query=selected",
        ],
        [
            f"{SAMPLER}:SecondsOnTrial devices=true {PARTLY}=bernoulli",
            f"{SAMPLER}:SecondsOnTrial devices=true {RATIO}",
            f"{SAMPLER}:by_seconds devices=true {PARTLY}=exact",
            f"{SAMPLER}:by_norms {RATIO}",
        ],
    ),
    "privacy.clip_norm, server.aggregator": ([f"{CLIPPED} {MEDIAN}"], []),
    "server.aggregator, server.weights": (
        [f"{MEDIAN} server.weights=literal", f"{MEDIAN} {LEARNS}"],
        ["server.weights=literal"],
    ),
    "logging.diagnostics, server.weights": ([f"{LEARNS} logging.diagnostics=true"], []),
    "server.weights": (
        [f"{LEARNS} local.optimizer=adam", f"{LEARNS} local.optimizer=torch.optim:AdamW"],
        [f"{LEARNS} local.optimizer=adam server.weights.lipschitz=5"],
    ),
    "clients.sampler, privacy.noise_multiplier": (
        [f"{NOISED} clients.sampler=weighted", f"{NOISED} {STRATA}", f"{NOISED} {SAMPLER}:by_norms"],
        [NOISED, f"{ALL} {NOISED}", f"{CLIPPED} clients.sampler=weighted"],
    ),
    "privacy.noise, clients.sampler": (
        [f"{NOISED} privacy.noise=tree"],
        [f"{NOISED} clients.sampler=shuffled privacy.noise=tree", f"{NOISED} clients.sampler=shuffled"],
    ),
    "privacy.noise, clients.over_selection": (
        [f"{NOISED} clients.sampler=shuffled privacy.noise=tree devices=true clients.over_selection=2"],
        [f"{NOISED} clients.sampler=shuffled devices=true clients.over_selection=2"],
    ),
    "privacy.noise, privacy.adaptive_clip": (
        [f"{NOISED} clients.sampler=shuffled privacy.noise=tree privacy.adaptive_clip=true"],
        [f"{NOISED} privacy.adaptive_clip=true"],
    ),
    "clients.availability, privacy.noise_multiplier": (
        [f"{NOISED} clients.availability={OWN}:larger_half", f"{NOISED} devices=true {INTERVALS}"],
        [f"{NOISED} clients.availability=bernoulli", f"{CLIPPED} clients.availability={OWN}:larger_half"],
    ),
    "samples.sampler, privacy.noise_multiplier": (
        [f"{NOISED} {PARTLY}=exact", f"{NOISED} samples.sampler={OWN}:pooled_rows"],
        [f"{NOISED} {RATIO}", f"{CLIPPED} {PARTLY}=exact", f"{NOISED} samples.sampler={OWN}:own_rows"],
    ),
    "samples.size.estimate, privacy.noise_multiplier": (
        [f"{NOISED} {PARTLY}=bernoulli samples.size.estimate=exact"],
        [f"{NOISED} {PARTLY}=bernoulli {PRIVATE}", f"{CLIPPED} {PARTLY}=bernoulli"],
    ),
    "samples.budget, privacy.noise_multiplier": (
        [f"{NOISED} {PARTLY}={OWN}:own_rows", f"{NOISED} {PARTLY}=sample-importance"],
        [f"{CLIPPED} {PARTLY}={OWN}:own_rows", f"{CLIPPED} {PARTLY}=sample-importance"],
    ),
    "samples.size.clip, privacy.noise_multiplier": (
        [f"{NOISED} {PARTLY}=bernoulli {PRIVATE} samples.size.clip=false"],
        [f"{CLIPPED} {PARTLY}=bernoulli {PRIVATE} samples.size.clip=false"],
    ),
    "rebalance, privacy.noise_multiplier": ([f"{NOISED} rebalance=true"], [f"{CLIPPED} rebalance=true"]),
    "evaluation.target_accuracy, task.kind": (
        ["task.kind=regression evaluation.target_accuracy=0.5"],
        ["evaluation.target_accuracy=0.5", "task.kind=tokens evaluation.target_accuracy=0.5"],
    ),
    "clients.sampler.features, task.kind": (
        [f"task.kind=tokens {STRATA} clients.sampler.within_stratum=uniform {HISTOGRAM}"],
        [f"task.kind=tokens {STRATA}"],
    ),
    "rebalance, task.kind": (["task.kind=multilabel rebalance=true"], ["task.kind=multilabel"]),
    "topology, task.kind": (["task.kind=tokens topology=mediators"], []),
    "task.loss.class_weights, task.kind": (
        ["task.kind=tokens task.loss=cross-entropy task.loss.class_weights=balanced"],
        ["task.loss.class_weights=[1,2]"],
    ),
    "task.loss.class_weights, privacy.noise_multiplier": (
        [f"{NOISED} task.loss.class_weights=balanced"],
        [f"{NOISED} task.loss.class_weights=[1,2]", f"{CLIPPED} task.loss.class_weights=balanced"],
    ),
    "attack, task.kind": (
        [f"task.kind=tokens {ATTACK}=label-flip"],
        [f"task.kind=tokens {ATTACK}=noise", f"{RELAYS} {ATTACK}=label-flip"],
    ),
}


def configured(settings: str):
    return load_config(None, (settings if settings.startswith("preset=") else f"{BASE} {settings}").split())


@pytest.mark.parametrize(
    ("keys", "settings"), [(keys, settings) for keys, (refused, _) in REFUSED.items() for settings in refused]
)
def test_what_contradicts_is_rejected_with_its_keys(keys: str, settings: str):
    with pytest.raises(UserError) as caught:
        configured(settings)
    said = str(caught.value).partition(" (preset")[0]
    place, reason = re.sub(r' = ("[^"]*"|[^\s:]+)', "", re.sub(OWN, "own", said)).split(": ", 1)
    assert place == keys.replace(", ", " does not go with ") and reason and "\n" not in said


@pytest.mark.parametrize("settings", sorted({settings for _, near in REFUSED.values() for settings in near}))
def test_what_is_near_a_contradiction_is_not_rejected(settings: str):
    configured(settings)


def test_a_component_says_itself_what_it_rejects():
    with pytest.raises(UserError, match="WholeBatches.*: batches of 4 rows are too small for it"):
        Config(samples={"sampler": WholeBatches(least=5)}, local={"batch_size": 4}, clients={"count": 4})
    with pytest.raises(ComponentFailure, match=f"the data sampler {OWN}:Fails .*contrary.py.*AttributeError"):
        configured(f"samples.sampler={OWN}:Fails")
    assert configured(f"local.optimizer={OWN}:Refusing"), "a class that is called itself"


@pytest.mark.parametrize(
    ("clients", "weights", "warned"),
    [("weighted", "samples", True), ("weighted", "uniform", False), ("uniform", "samples", False)],
)
def test_sizes_that_draw_and_weigh_are_warned_of(clients: str, weights: str, warned: bool):
    said = weighs_twice(configured(f"clients.sampler={clients} server.weights={weights}"))
    assert (said is not None) == warned
    assert said is None or clients in said
