"""Choices that cannot go together are refused with the reason, and not where one of them is another.

A row holds a part of the sentence, settings over FedAvg with which it is said, and settings near them that are right:
no part of a condition can be missing, and none be one too many.
"""

from __future__ import annotations

import pytest

from fedmpi import Config, PartFailure, UserError
from fedmpi.config import load_config
from fedmpi.config.checks import weighs_twice
from fedmpi.config.client_tables import LocalTable, ParticipationTable, SamplesTable
from fedmpi.config.server_tables import TopologyTable
from tests.keys.contrary import WholeBatches

BASE = "preset=fedavg participation.count=4"
DRAWN = "preset=fedsampling samples.wanted=50 participation.clients=uniform"
ALL = "participation.clients=all"
RELAYS = "topology.kind=mediators topology.clients_per_mediator=2"
STRATA = "participation.clients=stratified participation.strata=3"
SAME = "aggregation.weights=uniform"
NOISED = f"{SAME} privacy.clip_norm=1 privacy.noise_multiplier=1"
CLIPPED = f"{SAME} privacy.clip_norm=1"
MERGED = "local.engine=merged local.steps=1"
MEDIAN = "aggregation.rule=median"
LEARNS = "aggregation.weights=q-ffl"
ATTACKERS = "attack.fraction=0.2 attack.kind"
INT8 = "transport.kind=int8"
RESIDUALS = f"{INT8} transport.error_feedback=true"
WEIGHTED = "participation.clients=weighted"
STEPS = "local.lr_schedule=step local.lr_every"
PARTLY = "samples.wanted=50 samples.rule"
COPIES = "rebalance.enabled=true"
OWN = "tests.keys.contrary"

REFUSED: list[tuple[str, list[str], list[str]]] = [
    (
        "needs to know how many",
        [DRAWN],
        [
            "",
            f"{DRAWN} participation.count=3",
            f"{DRAWN} participation.fraction=0.5",
            "preset=fedsampling",
        ],
    ),
    ("needs samples.wanted", ["samples.rule=bernoulli", "samples.rule=exact"], [f"{PARTLY}=exact"]),
    (
        "leaves what single precision can hold",
        [
            f"local.lr=0.1 local.lr_factor=0.1 {STEPS}=1 rounds=31",
            f"local.lr=0.1 local.lr_factor=1e-16 {STEPS}=5 rounds=11",
            f"local.lr=1 local.lr_factor=10 {STEPS}=1 rounds=32",
            f"local.lr=1 local.lr_factor=1e30 {STEPS}=1 rounds=99999999",
        ],
        [
            f"local.lr=0.1 local.lr_factor=0.1 {STEPS}=1 rounds=29",
            f"local.lr=0.1 local.lr_factor=1e-16 {STEPS}=5 rounds=10",
            f"local.lr=1 local.lr_factor=10 {STEPS}=1 rounds=31",
            "local.lr=1e-30",
            "local.lr=1e30",
            "local.lr_schedule=cosine",
        ],
    ),
    (
        "takes one SGD step from the same model",
        [f"{MERGED} local.optimizer=adam", f"{MERGED} {RELAYS}"],
        [MERGED, "local.optimizer=adam", RELAYS],
    ),
    (
        "never forms a client's own update, which aggregation.exact",
        [f"{MERGED} {more}" for more in ("aggregation.exact=true", CLIPPED, "logging.diagnostics=true", INT8)],
        ["aggregation.exact=true", CLIPPED, "logging.diagnostics=true", INT8],
    ),
    (
        'needs participation.clients = "stratified"',
        ["aggregation.weights=stratified"],
        [f"{STRATA} aggregation.weights=stratified"],
    ),
    (
        "divides by the probability of being there",
        [
            "aggregation.weights=unbiased system.availability=time-of-day system.lowest=0",
            "aggregation.weights=unbiased system.availability=label-group system.by_label=[0.5,0,1,1,1,1,1,1,1,1]",
        ],
        [
            "aggregation.weights=unbiased system.availability=time-of-day system.lowest=0.1",
            "aggregation.weights=unbiased system.availability=label-group system.by_label=[0.5,1,1,1,1,1,1,1,1,1]",
            "aggregation.weights=normalised system.availability=time-of-day system.lowest=0",
            "aggregation.weights=unbiased",
        ],
    ),
    (
        "groups all clients once",
        [f"{RELAYS} topology.reschedule=static"],
        [
            f"{RELAYS} topology.reschedule=every-round",
            "preset=astraea topology.reschedule=static participation.clients=all",
        ],
    ),
    ('needs topology.kind = "mediators"', ["topology.placement=mediator"], [f"{RELAYS} topology.placement=mediator"]),
    (
        "is for a star",
        [f"{RELAYS} topology.placement=shared"],
        ["topology.placement=shared", f"{RELAYS} topology.placement=owner"],
    ),
    (
        "asks all of them",
        [f"preset=fedavg {ALL} system.clock=true system.over_selection=1.5"],
        ["system.clock=true system.over_selection=1.5", f"preset=fedavg {ALL} system.clock=true"],
    ),
    (
        "takes the first updates to arrive",
        [f"{RELAYS} system.clock=true system.over_selection=1.5"],
        [f"{RELAYS} system.clock=true", f"{RELAYS} system.clock=true system.over_selection=1"],
    ),
    (
        "rank 0 runs no relays",
        [f"{RELAYS} server.trains=always"],
        ["server.trains=always", f"{RELAYS} server.trains=never"],
    ),
    (
        "importance draws need the norms of gradients",
        [
            f"{STRATA} participation.draw=importance participation.features=label-histogram",
            "participation.clients=importance participation.features=label-histogram",
        ],
        [
            f"{STRATA} participation.draw=uniform participation.features=label-histogram",
            f"{STRATA} participation.draw=importance participation.features=full-gradient",
            f"participation.clients={OWN}:by_strata participation.features=label-histogram participation.strata=3",
        ],
    ),
    (
        'which topology.kind = "mediators" never forms',
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
                f"participation.clients={OWN}:by_norms",
                f"participation.clients={OWN}:NormsOnTrial",
            )
        ],
        [
            RELAYS,
            f"{RELAYS} {ATTACKERS}=label-flip",
            f"{RELAYS} local.on_divergence=stop",
            f"{RELAYS} transport.kind=float32",
            "local.on_divergence=drop",
            "logging.diagnostics=true",
            CLIPPED,
        ],
    ),
    (
        "residual where its data is",
        [f"{RESIDUALS} topology.placement=shared"],
        [f"{RESIDUALS} topology.placement=owner", f"{INT8} topology.placement=shared"],
    ),
    (
        "by what depends on the clients' data",
        [f"privacy.clip_norm=1 aggregation.weights={name}" for name in ("samples", "normalised")],
        [CLIPPED, "aggregation.weights=samples"],
    ),
    (
        "counts the rows of every participant before it trains",
        [f"system.clock=true samples.rule={OWN}:own_rows"],
        ["system.clock=true", f"samples.rule={OWN}:own_rows"],
    ),
    (
        "which nobody counts",
        [f"participation.clients={OWN}:by_seconds", f"participation.clients={OWN}:SecondsOnTrial"],
        [
            f"participation.clients={OWN}:by_seconds system.clock=true",
            f"participation.clients={OWN}:SecondsOnTrial system.clock=true",
            f"participation.clients={OWN}:by_norms",
            f"participation.clients={OWN}:NormsOnTrial",
        ],
    ),
    (
        "measures the seconds of its candidates before it draws",
        [
            f"participation.clients={OWN}:SecondsOnTrial system.clock=true {PARTLY}=exact",
            f"participation.clients={OWN}:SecondsOnTrial system.clock=true {PARTLY}=bernoulli "
            "samples.asked=participants",
        ],
        [
            f"participation.clients={OWN}:SecondsOnTrial system.clock=true {PARTLY}=bernoulli",
            f"participation.clients={OWN}:SecondsOnTrial system.clock=true samples.rule=ratio samples.ratio=0.5",
            f"participation.clients={OWN}:by_seconds system.clock=true {PARTLY}=exact",
        ],
    ),
    (
        "measures the updates of its candidates before it draws",
        [
            f"participation.clients={OWN}:NormsOnTrial samples.rule=ratio samples.ratio=0.5",
            f"participation.clients={OWN}:NormsOnTrial samples.rule={OWN}:own_rows",
        ],
        [
            f"participation.clients={OWN}:NormsOnTrial",
            f"participation.clients={OWN}:NormsOnTrial {MERGED}",
            f"participation.clients={OWN}:by_norms samples.rule=ratio samples.ratio=0.5",
        ],
    ),
    (
        "norms of the clients' own updates, which local.engine",
        [f"{MERGED} participation.clients={OWN}:by_norms"],
        [f"participation.clients={OWN}:by_norms", f"{MERGED} participation.clients={OWN}:by_seconds system.clock=true"],
    ),
    (
        "never forms each client's own update, which aggregation.rule",
        [f"{MERGED} {MEDIAN}"],
        [MEDIAN, f"{MERGED} aggregation.rule=mean"],
    ),
    ("never forms each client's own update, which aggregation.weights", [f"{MERGED} {LEARNS}"], [LEARNS]),
    (
        "never forms each client's own update, which attack.kind",
        [f"{MERGED} {ATTACKERS}=sign-flip", f"{MERGED} {ATTACKERS}=noise"],
        [f"{ATTACKERS}=sign-flip", f"{ATTACKERS}=noise", f"{MERGED} {ATTACKERS}=label-flip"],
    ),
    ("what one client adds to a sum", [f"{CLIPPED} {MEDIAN}"], [CLIPPED, MEDIAN]),
    ("averages models, and", [f"{MEDIAN} aggregation.weights=literal"], ["aggregation.weights=literal", MEDIAN]),
    ("forms no sum: choose one", [f"{MEDIAN} {LEARNS}"], []),
    (
        "takes the Lipschitz constant for 1 / local.lr",
        [f"{LEARNS} local.optimizer=adam", f"{LEARNS} local.optimizer=torch.optim:AdamW"],
        [
            f"{LEARNS} local.optimizer=adam aggregation.lipschitz=5",
            "local.optimizer=adam",
            f"{LEARNS} local.optimizer=sgd",
        ],
    ),
    ("weighs updates as planned", [f"{LEARNS} logging.diagnostics=true"], ["logging.diagnostics=true", LEARNS]),
    (
        "changes who else takes part",
        [f"{NOISED} {WEIGHTED}", f"{NOISED} {STRATA}", f"{NOISED} participation.clients={OWN}:by_norms"],
        [NOISED, f"preset=fedavg {ALL} {NOISED}", f"{CLIPPED} {WEIGHTED}", f"{WEIGHTED} {SAME}"],
    ),
    (
        "may change which others are there",
        [f"{NOISED} system.availability={OWN}:larger_half"],
        [f"{NOISED} system.availability=time-of-day", f"{CLIPPED} system.availability={OWN}:larger_half"],
    ),
    (
        "depend on the exact sizes of the others",
        [f"{NOISED} {PARTLY}=exact", f"{NOISED} {PARTLY}=bernoulli samples.size_estimate=exact"],
        [
            f"{NOISED} {PARTLY}=bernoulli samples.size_estimate=randomised-response",
            f"{NOISED} samples.rule=ratio samples.ratio=0.5",
            f"{CLIPPED} {PARTLY}=exact",
            f"{CLIPPED} {PARTLY}=bernoulli samples.size_estimate=exact",
        ],
    ),
    (
        "sees the sizes of the whole cohort",
        [f"{NOISED} samples.rule={OWN}:pooled_rows"],
        [NOISED, f"{NOISED} samples.rule={OWN}:own_rows", f"{CLIPPED} samples.rule={OWN}:pooled_rows"],
    ),
    (
        "its share of the exact size of the whole cohort",
        [f"{NOISED} {PARTLY}={OWN}:own_rows"],
        [f"{NOISED} samples.rule={OWN}:own_rows", f"{CLIPPED} {PARTLY}={OWN}:own_rows"],
    ),
    (
        "lets one large client change",
        [f"{NOISED} {PARTLY}=bernoulli samples.size_estimate=randomised-response samples.clip=false"],
        [f"{CLIPPED} {PARTLY}=bernoulli samples.size_estimate=randomised-response samples.clip=false"],
    ),
    ("copies samples by the class counts", [f"{NOISED} {COPIES}"], [COPIES, f"{CLIPPED} {COPIES}"]),
    (
        f'samples.rule = "{OWN}:WholeBatches" is not possible here: batches of',
        [
            f"samples.rule={OWN}:WholeBatches local.batch_size=1",
            f"samples.rule={OWN}:WholeBatches samples.least=9 local.batch_size=8",
        ],
        [
            f"samples.rule={OWN}:WholeBatches samples.least=9 local.batch_size=9",
            f"samples.rule={OWN}:WholeBatches local.batch_size=all",
            "local.batch_size=1",
        ],
    ),
    (
        "is called with config, which refuses does not take",
        [f"aggregation.optimizer={OWN}:AsksNothing"],
        [],
    ),
]


def configured(settings: str):
    return load_config(None, (settings if settings.startswith("preset=") else f"{BASE} {settings}").split())


@pytest.mark.parametrize(
    ("words", "settings"), [(words, settings) for words, given, _ in REFUSED for settings in given]
)
def test_what_contradicts_is_refused_with_the_reason(words: str, settings: str):
    with pytest.raises(UserError) as caught:
        configured(settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", sorted({settings for _, _, near in REFUSED for settings in near}))
def test_what_is_near_a_contradiction_is_not_refused(settings: str):
    configured(settings)


def test_a_part_that_fails_to_say_what_it_refuses_is_named():
    with pytest.raises(PartFailure, match=f"^the row rule {OWN}:Fails .*contrary.py.*AttributeError: .*no_such_table"):
        configured(f"samples.rule={OWN}:Fails")


def test_a_part_refuses_in_a_sentence_or_not_at_all():
    configured(f"samples.rule={OWN}:SaysNothing")
    named = f"^the row rule {OWN}:SaysFalse .*contrary.py:[0-9]+.* failed: refuses returned False: return None, or a"
    with pytest.raises(PartFailure, match=named):
        configured(f"samples.rule={OWN}:SaysFalse")


def test_a_class_that_is_called_itself_is_not_asked_what_it_refuses():
    assert configured(f"local.optimizer={OWN}:Refusing").local.optimizer == f"{OWN}:Refusing"


def test_an_object_says_what_it_refuses_as_its_class_does():
    with pytest.raises(UserError, match="WholeBatches.* is not possible here: batches of 4 rows are too small for it"):
        Config(samples={"rule": WholeBatches(least=5)}, local={"batch_size": 4}, participation={"count": 4})


def test_a_table_says_what_it_refuses_whatever_the_others_hold():
    assert "needs to know how many" in (ParticipationTable().refusal() or "")
    assert ParticipationTable(count=3).refusal() is None is ParticipationTable(clients="all").refusal()
    assert "needs samples.wanted" in (SamplesTable(rule="exact").refusal() or "")
    assert "say the same in two ways" in (LocalTable(steps=2, epochs=1).refusal() or "")
    assert "is for a star" in (TopologyTable(kind="mediators", placement="shared").refusal() or "")


@pytest.mark.parametrize(
    ("clients", "weights", "warned"),
    [("weighted", "samples", True), ("weighted", "uniform", False), ("uniform", "samples", False)],
)
def test_sizes_that_draw_and_weigh_are_warned_of(clients: str, weights: str, warned: bool):
    said = weighs_twice(configured(f"participation.clients={clients} aggregation.weights={weights}"))
    assert (said is not None) == warned
    assert said is None or clients in said
