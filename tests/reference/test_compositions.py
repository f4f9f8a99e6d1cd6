"""Parts that are right alone are right together: chosen compositions agree with the plain loop."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedmpi.config import config_toml, load_config
from tests.reference.compare import differences
from tests.reference.program import traced

QUIET = ["logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0", "rounds=3", "local.lr=0.02"]
UNEVEN, EVEN = "data.shards=digits:clients=14,alpha=0.4", "data.shards=digits:clients=9,partition=iid"
SMALL = ["model.hidden=[8]"]
UNEVEN_SMALL = [UNEVEN, *SMALL]
DROPPING = ["model.hidden=[10]", "model.dropout=0.3"]
ONE_STEP = ["local.steps=1", "local.batch_size=all"]
SAMPLED = ["samples.rule=bernoulli", "samples.wanted=200"]
AWAY = ["system.availability=bernoulli", "system.probability=0.6", "system.drop_out=0.3"]
BY_SIZE = ["participation.clients=weighted", "participation.count=9"]
CLOCK = ["system.clock=true", "system.speed=lognormal", "participation.clients=uniform", "participation.count=5"]
PRIVATE = ["samples.size_estimate=randomised-response", "participation.clients=all"]
AUGMENTED = ["rebalance.enabled=true", "rebalance.weights=original", "participation.clients=uniform"]
STRATA = [
    "participation.clients=stratified",
    "participation.count=6",
    "participation.strata=3",
    "participation.draw=uniform",
]
BATCH_NORM = "model.name=tests.reference.batch_norm:batch_norm_mlp"

COMPOSITIONS = {
    "a client drawn twice counts twice in the gradient sum": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, *ONE_STEP, "aggregation.weights=gradient-sum"),
    ],
    "and where its work is not merged": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, "local.epochs=2", "aggregation.weights=gradient-sum"),
    ],
    "a client's samples count squared in the sum of the published code": [
        *(UNEVEN, *SMALL, *SAMPLED, *ONE_STEP, "participation.clients=all", "aggregation.weights=gradient-sum-squared"),
    ],
    "and where a client's work is not merged": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, "local.epochs=2", "aggregation.weights=gradient-sum-squared"),
    ],
    "a client drawn twice counts twice in the mean by samples": [UNEVEN, *SMALL, *BY_SIZE, "local.epochs=1"],
    "merged work draws other masks in every round": [UNEVEN, *DROPPING, *ONE_STEP, "participation.clients=all"],
    "merged rows draw other masks in every round": [
        *(UNEVEN, *DROPPING, *SAMPLED, *ONE_STEP, "participation.clients=all", "aggregation.weights=gradient-sum"),
    ],
    "one step on sampled rows takes no more than a batch of them": [
        *(UNEVEN, *SMALL, "samples.rule=ratio", "samples.ratio=0.7", "local.steps=1", "local.batch_size=8"),
        *("participation.clients=uniform", "participation.count=5"),
    ],
    "rows are expected from the samples of all who are there": [
        *(UNEVEN, *SMALL, *CLOCK, *SAMPLED, *AWAY, "system.over_selection=1.6", "samples.asked=all"),
    ],
    "rows are expected from the samples of those who are asked": [
        *(UNEVEN, *SMALL, *CLOCK, *SAMPLED, *AWAY, "system.over_selection=1.6", "samples.asked=participants"),
    ],
    "exactly K rows are expected from the participants": [
        *(UNEVEN, *SMALL, *CLOCK, *AWAY, "samples.rule=exact", "samples.wanted=90", "local.epochs=2"),
    ],
    "clients that hold M samples are clipped": [EVEN, *SMALL, *PRIVATE, *SAMPLED, *ONE_STEP, "samples.threshold=160"],
    "clients that hold M − 1 samples are not": [EVEN, *SMALL, *PRIVATE, *SAMPLED, *ONE_STEP, "samples.threshold=161"],
    "clients that hold M samples and do not clip are exposed": [
        *(EVEN, *SMALL, *PRIVATE, *SAMPLED, *ONE_STEP, "samples.threshold=161", "samples.clip=false"),
        "aggregation.weights=uniform",
    ],
    "running statistics are averaged, and moved by no server optimizer": [
        *(EVEN, BATCH_NORM, "participation.clients=uniform", "participation.count=4", "local.batch_size=20"),
        *("aggregation.optimizer=adam", "aggregation.lr=0.05", "local.steps=3"),
    ],
    "any of those who arrive together are taken": [
        *(EVEN, *SMALL, "participation.clients=uniform", "participation.count=3", "system.over_selection=2"),
        *("system.clock=true", "local.steps=2", "samples.rule=ratio", "samples.ratio=0.9"),
    ],
}
COMPOSITIONS |= {
    f"copies do not weigh with {weights} weights": [
        *(UNEVEN, *SMALL, *AUGMENTED, *AWAY, "participation.count=6", f"aggregation.weights={weights}"),
    ]
    for weights in ("normalised", "unbiased", "literal", "samples")
}
COMPOSITIONS |= {
    f"sampled copies do not weigh with {weights} weights, {'merged' if steps is ONE_STEP else 'alone'}": [
        *(UNEVEN, *SMALL, *AUGMENTED, "participation.count=6", f"aggregation.weights={weights}", *steps),
        *("samples.rule=ratio", "samples.ratio=0.8"),
    ]
    for weights, steps in (("samples", ONE_STEP), ("samples", ["local.epochs=1"]))
}
COMPOSITIONS |= {
    f"strata whose clients are away keep their share: {weights}, {allocation}, m = {count}": [
        *(UNEVEN, *SMALL, *STRATA, *AWAY, f"aggregation.weights={weights}", f"participation.count={count}"),
        *(f"participation.allocation={allocation}", "participation.features=label-histogram"),
    ]
    for weights, allocation, count in (
        ("stratified", "proportional", 2),
        ("stratified", "neyman", 6),
        ("normalised", "proportional", 6),
        ("unbiased", "equal", 2),
        ("literal", "proportional", 6),
    )
}


COMPOSITIONS |= {
    f"participants without a sampled row change nothing: m = {count}, {allocation}": [
        *(*UNEVEN_SMALL, *STRATA, "samples.rule=bernoulli", "samples.wanted=6", "samples.asked=participants"),
        *("aggregation.weights=stratified", f"participation.count={count}", f"participation.allocation={allocation}"),
    ]
    for count, allocation in ((6, "neyman"), (6, "equal"), (2, "neyman"), (14, "proportional"))
}
ALL = ["participation.clients=all"]
SOME = ["participation.clients=uniform", "participation.count=9"]
LIES = {"sign-flip": ["attack.kind=sign-flip", "attack.scale=3"], "label-flip": ["attack.kind=label-flip"]}
RULES = {
    "the median": ["aggregation.rule=median"],
    "clipped norms": ["aggregation.rule=norm-clip", "aggregation.bound=0.15"],
}
COMPOSITIONS |= {
    "lies are compressed like updates, and clipped": [
        *(*UNEVEN_SMALL, *ALL, *LIES["sign-flip"], "transport.kind=int8", "privacy.clip_norm=0.2"),
        "aggregation.weights=uniform",
    ],
    "flipped labels are trained on in merged rows": [*UNEVEN_SMALL, *ALL, *LIES["label-flip"], *SAMPLED, *ONE_STEP],
    "the median of sampled rows, after drop-outs, moved by Adam": [
        *(*UNEVEN_SMALL, *ALL, *SAMPLED, *AWAY, *RULES["the median"], "aggregation.optimizer=adam"),
        "aggregation.lr=0.05",
    ],
    "clipped norms of updates in eight bits": [*UNEVEN_SMALL, *SOME, *RULES["clipped norms"], "transport.kind=int8"],
    "vectors of an algorithm go to those who drop out, and do not come back": [
        *(*UNEVEN_SMALL, *SOME, "local.algorithm=scaffold", "system.drop_out=0.4"),
    ],
    "an opening step on a batch lasts as long as a batch": [
        *(*UNEVEN_SMALL, *STRATA, *CLOCK[:2], "participation.opening=true", "participation.probe=batch"),
        *("local.batch_size=8", "system.speed_median=5.0"),
    ],
    "models after one step spread as far as that step goes": [
        *(*UNEVEN_SMALL, *STRATA, "participation.features=one-step-change", "participation.allocation=neyman"),
        "logging.diagnostics=true",
    ],
    "FedNova's second vector takes its time on the way up": [
        *(*UNEVEN_SMALL, *CLOCK, "local.algorithm=fednova", "system.upload=5e3"),
    ],
    "noise is shared out among those who are wanted": [
        *(*UNEVEN_SMALL, *SOME, "aggregation.weights=uniform", "privacy.clip_norm=0.2", "privacy.noise_multiplier=1"),
    ],
    "the median of the opening step": [*UNEVEN_SMALL, *STRATA, *RULES["the median"], "participation.opening=true"],
    "q-FFL with q = 0.3 and a constant of its own": [
        *(*UNEVEN_SMALL, *BY_SIZE, "aggregation.weights=q-ffl", "aggregation.q=0.3", "aggregation.lipschitz=7.0"),
    ],
}


@pytest.mark.parametrize("statement", COMPOSITIONS)
def test_a_composition_agrees_with_the_plain_loop(statement: str, tmp_path: Path) -> None:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    config = load_config(None, [*QUIET, *COMPOSITIONS[statement]])
    trace = traced(config, tmp_path / "run")
    assert trace is not None
    found = differences(config, trace)
    assert not found, "\n".join([*found[:10], config_toml(config)])
