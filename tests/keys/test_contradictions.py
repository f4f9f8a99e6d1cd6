"""Choices that cannot go together are rejected with the reason, and not where one of them is another.

A row contains a part of the sentence, settings over FedAvg with which it is said, and valid settings near them:
no part of a condition can be missing, and none be one too many.
"""

from __future__ import annotations

import pytest

from fedmpi import ComponentFailure, Config, UserError
from fedmpi.config import load_config
from fedmpi.config.checks import weighs_twice
from tests.keys.contrary import WholeBatches

BASE = "preset=fedavg clients.count=4"
DRAWN = "preset=fedsampling samples.budget=50 clients.sampler=uniform"
ALL = "clients.sampler=all"
RELAYS = "topology=mediators topology.clients_per_mediator=2"
STRATA = "clients.sampler=stratified clients.sampler.strata=3"
SAME = "server.weights=uniform"
NOISED = f"{SAME} privacy.clip_norm=1 privacy.noise_multiplier=1"
CLIPPED = f"{SAME} privacy.clip_norm=1"
MERGED = "local.engine=merged local.steps=1"
MEDIAN = "server.aggregator=median"
LEARNS = "server.weights=q-ffl"
ATTACKERS = "clients.attack_fraction=0.2 attack"
INT8 = "compression=int8"
RESIDUALS = f"{INT8} compression.error_feedback=true"
WEIGHTED = "clients.sampler=weighted"
STEPS = "local.schedule=step local.schedule.every"
PARTLY = "samples.budget=50 samples.sampler"
COPIES = "rebalance=true"
OWN = "tests.keys.contrary"

REFUSED: list[tuple[str, list[str], list[str]]] = [
    (
        "needs to know how many",
        [DRAWN],
        [
            "",
            f"{DRAWN} clients.count=3",
            f"{DRAWN} clients.fraction=0.5",
            "preset=fedsampling",
        ],
    ),
    ("needs samples.budget", ["samples.sampler=bernoulli", "samples.sampler=exact"], [f"{PARTLY}=exact"]),
    (
        "leaves the range of single precision",
        [
            f"local.lr=0.1 local.schedule.factor=0.1 {STEPS}=1 rounds=31",
            f"local.lr=0.1 local.schedule.factor=1e-16 {STEPS}=5 rounds=11",
            f"local.lr=1 local.schedule.factor=10 {STEPS}=1 rounds=32",
            f"local.lr=1 local.schedule.factor=1e30 {STEPS}=1 rounds=99999999",
        ],
        [
            f"local.lr=0.1 local.schedule.factor=0.1 {STEPS}=1 rounds=29",
            f"local.lr=0.1 local.schedule.factor=1e-16 {STEPS}=5 rounds=10",
            f"local.lr=1 local.schedule.factor=10 {STEPS}=1 rounds=31",
            "local.lr=1e-30",
            "local.lr=1e30",
            "local.schedule=cosine",
        ],
    ),
    (
        "takes one SGD step from the same model",
        [f"{MERGED} local.optimizer=adam", f"{MERGED} {RELAYS}"],
        [MERGED, "local.optimizer=adam", RELAYS],
    ),
    (
        'which local.engine = "merged" never forms',
        [f"{MERGED} {more}" for more in ("server.exact=true", CLIPPED, "logging.diagnostics=true", INT8)],
        ["server.exact=true", CLIPPED, "logging.diagnostics=true", INT8],
    ),
    (
        'needs clients.sampler = "stratified"',
        ["server.weights=stratified"],
        [f"{STRATA} server.weights=stratified"],
    ),
    (
        "divides by the probability of being there",
        [
            "server.weights=unbiased clients.availability=label-group "
            "clients.availability.by_label=[0.5,0,1,1,1,1,1,1,1,1]",
        ],
        [
            "server.weights=unbiased clients.availability=label-group "
            "clients.availability.by_label=[0.5,1,1,1,1,1,1,1,1,1]",
            "server.weights=normalized clients.availability=label-group clients.availability.by_label=[0,1]",
            "server.weights=unbiased",
        ],
    ),
    (
        "groups all clients once",
        [f"{RELAYS} topology.regroup=once"],
        [
            f"{RELAYS} topology.regroup=every-round",
            "preset=astraea topology.regroup=once clients.sampler=all",
        ],
    ),
    ('needs topology = "mediators"', ["cluster.placement=mediator"], [f"{RELAYS} cluster.placement=mediator"]),
    (
        "is for a star",
        [f"{RELAYS} cluster.placement=shared"],
        ["cluster.placement=shared", f"{RELAYS} cluster.placement=owner"],
    ),
    (
        "asks all of them",
        [f"preset=fedavg {ALL} devices=true clients.over_selection=1.5"],
        ["devices=true clients.over_selection=1.5", f"preset=fedavg {ALL} devices=true"],
    ),
    (
        "takes the first updates to arrive",
        [f"{RELAYS} devices=true clients.over_selection=1.5"],
        [f"{RELAYS} devices=true", f"{RELAYS} devices=true clients.over_selection=1"],
    ),
    (
        "rank 0 runs no relays",
        [f"{RELAYS} cluster.server_trains=always"],
        ["cluster.server_trains=always", f"{RELAYS} cluster.server_trains=never"],
    ),
    (
        "importance draws need the norms of gradients",
        [
            f"{STRATA} clients.sampler.within_stratum=importance clients.sampler.features=label-histogram",
            "clients.sampler=importance clients.sampler.features=label-histogram",
        ],
        [
            f"{STRATA} clients.sampler.within_stratum=uniform clients.sampler.features=label-histogram",
            f"{STRATA} clients.sampler.within_stratum=importance clients.sampler.features=full-gradient",
            f"clients.sampler={OWN}:by_strata clients.sampler.features=label-histogram clients.sampler.strata=3",
        ],
    ),
    (
        'which topology = "mediators" never forms',
        [
            f"{RELAYS} {more}"
            for more in (
                CLIPPED,
                INT8,
                "local.on_divergence=drop",
                "logging.diagnostics=true",
                MEDIAN,
                LEARNS,
                f"{ATTACKERS}=sign-flip",
                f"{ATTACKERS}=noise",
                f"clients.sampler={OWN}:by_norms",
                f"clients.sampler={OWN}:NormsOnTrial",
            )
        ],
        [
            RELAYS,
            f"{RELAYS} {ATTACKERS}=label-flip",
            f"{RELAYS} local.on_divergence=stop",
            f"{RELAYS} compression=none",
            "local.on_divergence=drop",
            "logging.diagnostics=true",
            CLIPPED,
        ],
    ),
    (
        "residual where its data is",
        [f"{RESIDUALS} cluster.placement=shared"],
        [f"{RESIDUALS} cluster.placement=owner", f"{INT8} cluster.placement=shared"],
    ),
    (
        "by what depends on the clients' data",
        [f"privacy.clip_norm=1 server.weights={name}" for name in ("samples", "normalized")],
        [CLIPPED, "server.weights=samples"],
    ),
    (
        "counts the samples of every selected client before it trains",
        [f"devices=true samples.sampler={OWN}:own_rows"],
        ["devices=true", f"samples.sampler={OWN}:own_rows"],
    ),
    (
        "which are counted only in simulated time",
        [f"clients.sampler={OWN}:by_seconds", f"clients.sampler={OWN}:SecondsOnTrial"],
        [
            f"clients.sampler={OWN}:by_seconds devices=true",
            f"clients.sampler={OWN}:SecondsOnTrial devices=true",
            f"clients.sampler={OWN}:by_norms",
            f"clients.sampler={OWN}:NormsOnTrial",
        ],
    ),
    (
        "measures the seconds of its candidates before it draws",
        [
            f"clients.sampler={OWN}:SecondsOnTrial devices=true {PARTLY}=exact",
            f"clients.sampler={OWN}:SecondsOnTrial devices=true {PARTLY}=bernoulli samples.size.query=selected",
        ],
        [
            f"clients.sampler={OWN}:SecondsOnTrial devices=true {PARTLY}=bernoulli",
            f"clients.sampler={OWN}:SecondsOnTrial devices=true samples.sampler=ratio samples.sampler.ratio=0.5",
            f"clients.sampler={OWN}:by_seconds devices=true {PARTLY}=exact",
        ],
    ),
    (
        "measures the updates of its candidates before it draws",
        [
            f"clients.sampler={OWN}:NormsOnTrial samples.sampler=ratio samples.sampler.ratio=0.5",
            f"clients.sampler={OWN}:NormsOnTrial samples.sampler={OWN}:own_rows",
        ],
        [
            f"clients.sampler={OWN}:NormsOnTrial",
            f"clients.sampler={OWN}:NormsOnTrial {MERGED}",
            f"clients.sampler={OWN}:by_norms samples.sampler=ratio samples.sampler.ratio=0.5",
        ],
    ),
    (
        "(draws by update norms) needs",
        [f"{MERGED} clients.sampler={OWN}:by_norms"],
        [f"clients.sampler={OWN}:by_norms", f"{MERGED} clients.sampler={OWN}:by_seconds devices=true"],
    ),
    (
        "which local.engine",
        [f"{MERGED} {MEDIAN}"],
        [MEDIAN, f"{MERGED} server.aggregator=mean"],
    ),
    ("which local.engine", [f"{MERGED} {LEARNS}"], [LEARNS]),
    (
        "which local.engine",
        [f"{MERGED} {ATTACKERS}=sign-flip", f"{MERGED} {ATTACKERS}=noise"],
        [f"{ATTACKERS}=sign-flip", f"{ATTACKERS}=noise", f"{MERGED} {ATTACKERS}=label-flip"],
    ),
    ("what one client adds to a sum", [f"{CLIPPED} {MEDIAN}"], [CLIPPED, MEDIAN]),
    ("averages models, and", [f"{MEDIAN} server.weights=literal"], ["server.weights=literal", MEDIAN]),
    ("forms no sum: choose one", [f"{MEDIAN} {LEARNS}"], []),
    (
        "takes the Lipschitz constant for 1 / local.lr",
        [f"{LEARNS} local.optimizer=adam", f"{LEARNS} local.optimizer=torch.optim:AdamW"],
        [
            f"{LEARNS} local.optimizer=adam server.weights.lipschitz=5",
            "local.optimizer=adam",
            f"{LEARNS} local.optimizer=sgd",
        ],
    ),
    ("weighs updates as planned", [f"{LEARNS} logging.diagnostics=true"], ["logging.diagnostics=true", LEARNS]),
    (
        "changes which others are selected",
        [f"{NOISED} {WEIGHTED}", f"{NOISED} {STRATA}", f"{NOISED} clients.sampler={OWN}:by_norms"],
        [NOISED, f"preset=fedavg {ALL} {NOISED}", f"{CLIPPED} {WEIGHTED}", f"{WEIGHTED} {SAME}"],
    ),
    (
        "may change which others are there",
        [f"{NOISED} clients.availability={OWN}:larger_half"],
        [f"{NOISED} clients.availability=bernoulli", f"{CLIPPED} clients.availability={OWN}:larger_half"],
    ),
    (
        "depend on the exact sizes of the others",
        [f"{NOISED} {PARTLY}=exact", f"{NOISED} {PARTLY}=bernoulli samples.size.estimate=exact"],
        [
            f"{NOISED} {PARTLY}=bernoulli samples.size.estimate=randomized-response",
            f"{NOISED} samples.sampler=ratio samples.sampler.ratio=0.5",
            f"{CLIPPED} {PARTLY}=exact",
            f"{CLIPPED} {PARTLY}=bernoulli samples.size.estimate=exact",
        ],
    ),
    (
        "sees the sizes of the whole cohort",
        [f"{NOISED} samples.sampler={OWN}:pooled_rows"],
        [NOISED, f"{NOISED} samples.sampler={OWN}:own_rows", f"{CLIPPED} samples.sampler={OWN}:pooled_rows"],
    ),
    (
        "its share of the exact size of the whole cohort",
        [f"{NOISED} {PARTLY}={OWN}:own_rows"],
        [f"{NOISED} samples.sampler={OWN}:own_rows", f"{CLIPPED} {PARTLY}={OWN}:own_rows"],
    ),
    (
        "lets one large client change",
        [f"{NOISED} {PARTLY}=bernoulli samples.size.estimate=randomized-response samples.size.clip=false"],
        [f"{CLIPPED} {PARTLY}=bernoulli samples.size.estimate=randomized-response samples.size.clip=false"],
    ),
    ("copies samples by the class counts", [f"{NOISED} {COPIES}"], [COPIES, f"{CLIPPED} {COPIES}"]),
    (
        f'samples.sampler = "{OWN}:WholeBatches" is not possible here: batches of',
        [
            f"samples.sampler={OWN}:WholeBatches local.batch_size=1",
            f"samples.sampler={OWN}:WholeBatches samples.sampler.least=9 local.batch_size=8",
        ],
        [
            f"samples.sampler={OWN}:WholeBatches samples.sampler.least=9 local.batch_size=9",
            f"samples.sampler={OWN}:WholeBatches local.batch_size=all",
            "local.batch_size=1",
        ],
    ),
    (
        "is called with config, which",
        [f"server.optimizer={OWN}:AsksNothing"],
        [],
    ),
]


def configured(settings: str):
    return load_config(None, (settings if settings.startswith("preset=") else f"{BASE} {settings}").split())


@pytest.mark.parametrize(
    ("words", "settings"), [(words, settings) for words, given, _ in REFUSED for settings in given]
)
def test_what_contradicts_is_rejected_with_the_reason(words: str, settings: str):
    with pytest.raises(UserError) as caught:
        configured(settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", sorted({settings for _, _, near in REFUSED for settings in near}))
def test_what_is_near_a_contradiction_is_not_rejected(settings: str):
    configured(settings)


def test_a_component_that_fails_to_say_what_it_rejects_is_named():
    with pytest.raises(
        ComponentFailure, match=f"^the data sampler {OWN}:Fails .*contrary.py.*AttributeError: .*no_such_table"
    ):
        configured(f"samples.sampler={OWN}:Fails")


def test_a_class_that_is_called_itself_is_not_asked_what_it_rejects():
    assert configured(f"local.optimizer={OWN}:Refusing").local.optimizer.name == f"{OWN}:Refusing"


def test_an_object_says_what_it_rejects_as_its_class_does():
    with pytest.raises(UserError, match="WholeBatches.* is not possible here: batches of 4 rows are too small for it"):
        Config(samples={"sampler": WholeBatches(least=5)}, local={"batch_size": 4}, clients={"count": 4})


@pytest.mark.parametrize(
    ("clients", "weights", "warned"),
    [("weighted", "samples", True), ("weighted", "uniform", False), ("uniform", "samples", False)],
)
def test_sizes_that_draw_and_weigh_are_warned_of(clients: str, weights: str, warned: bool):
    said = weighs_twice(configured(f"clients.sampler={clients} server.weights={weights}"))
    assert (said is not None) == warned
    assert said is None or clients in said
