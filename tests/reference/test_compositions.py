"""Parts that are right alone are right together: chosen compositions agree with the plain loop."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedmpi.config import config_toml, load_config
from tests.reference.compare import differences
from tests.reference.program import traced

QUIET = ["logging.tensorboard=false", "cluster.threads=1", "checkpoint.every=0", "rounds=3", "local.lr=0.02"]
UNEVEN, EVEN = "data.source=digits:clients=14,alpha=0.4", "data.source=digits:clients=9,partition=iid"
SMALL = ["model.hidden=[8]"]
UNEVEN_SMALL = [UNEVEN, *SMALL]
DROPPING = ["model.hidden=[10]", "model.dropout=0.3"]
ONE_STEP = ["local.steps=1", "local.batch_size=all"]
SAMPLED = ["samples.sampler=bernoulli", "samples.budget=200"]
AWAY = ["clients.availability=bernoulli", "clients.availability.probability=0.6", "clients.failure_rate=0.3"]
BY_SIZE = ["clients.sampler=weighted", "clients.count=9"]
CLOCK = ["devices=true", "devices.speed=lognormal", "clients.sampler=uniform", "clients.count=5"]
PRIVATE = ["samples.size.estimate=randomized-response", "clients.sampler=all"]
AUGMENTED = ["rebalance=true", "rebalance.weights=original", "clients.sampler=uniform"]
STRATA = [
    "clients.sampler=stratified",
    "clients.count=6",
    "clients.sampler.strata=3",
    "clients.sampler.within_stratum=uniform",
]
BATCH_NORM = "model.name=tests.reference.batch_norm:batch_norm_mlp"

COMPOSITIONS = {
    "a client drawn twice counts twice in the gradient sum": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, *ONE_STEP, "server.weights=gradient-sum"),
    ],
    "and where its work is not merged": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, "local.epochs=2", "server.weights=gradient-sum"),
    ],
    "a client's samples count squared in the sum of the published code": [
        *(UNEVEN, *SMALL, *SAMPLED, *ONE_STEP, "clients.sampler=all", "server.weights=gradient-sum-squared"),
    ],
    "and where a client's work is not merged": [
        *(UNEVEN, *SMALL, *BY_SIZE, *SAMPLED, "local.epochs=2", "server.weights=gradient-sum-squared"),
    ],
    "a client drawn twice counts twice in the mean by samples": [UNEVEN, *SMALL, *BY_SIZE, "local.epochs=1"],
    "merged work draws other masks in every round": [UNEVEN, *DROPPING, *ONE_STEP, "clients.sampler=all"],
    "merged rows draw other masks in every round": [
        *(UNEVEN, *DROPPING, *SAMPLED, *ONE_STEP, "clients.sampler=all", "server.weights=gradient-sum"),
    ],
    "one step on sampled rows takes no more than a batch of them": [
        *(UNEVEN, *SMALL, "samples.sampler=ratio", "samples.sampler.ratio=0.7", "local.steps=1", "local.batch_size=8"),
        *("clients.sampler=uniform", "clients.count=5"),
    ],
    "rows are expected from the samples of all who are there": [
        *(UNEVEN, *SMALL, *CLOCK, *SAMPLED, *AWAY, "clients.over_selection=1.6", "samples.size.query=all"),
    ],
    "rows are expected from the samples of those who are asked": [
        *(UNEVEN, *SMALL, *CLOCK, *SAMPLED, *AWAY, "clients.over_selection=1.6", "samples.size.query=selected"),
    ],
    "exactly K rows are expected from the participants": [
        *(UNEVEN, *SMALL, *CLOCK, *AWAY, "samples.sampler=exact", "samples.budget=90", "local.epochs=2"),
    ],
    "clients that hold M samples are clipped": [
        EVEN,
        *SMALL,
        *PRIVATE,
        *SAMPLED,
        *ONE_STEP,
        "samples.size.max_size=160",
    ],
    "clients that hold M − 1 samples are not": [
        EVEN,
        *SMALL,
        *PRIVATE,
        *SAMPLED,
        *ONE_STEP,
        "samples.size.max_size=161",
    ],
    "clients that hold M samples and do not clip are exposed": [
        *(EVEN, *SMALL, *PRIVATE, *SAMPLED, *ONE_STEP, "samples.size.max_size=161", "samples.size.clip=false"),
        "server.weights=uniform",
    ],
    "running statistics are averaged, and moved by no server optimizer": [
        *(EVEN, BATCH_NORM, "clients.sampler=uniform", "clients.count=4", "local.batch_size=20"),
        *("server.optimizer=adam", "server.optimizer.lr=0.05", "local.steps=3"),
    ],
    "any of those who arrive together are taken": [
        *(EVEN, *SMALL, "clients.sampler=uniform", "clients.count=3", "clients.over_selection=2"),
        *("devices=true", "local.steps=2", "samples.sampler=ratio", "samples.sampler.ratio=0.9"),
    ],
}
COMPOSITIONS |= {
    f"copies do not weigh with {weights} weights": [
        *(UNEVEN, *SMALL, *AUGMENTED, *AWAY, "clients.count=6", f"server.weights={weights}"),
    ]
    for weights in ("normalized", "unbiased", "literal", "samples")
}
COMPOSITIONS |= {
    f"sampled copies do not weigh with {weights} weights, {'merged' if steps is ONE_STEP else 'alone'}": [
        *(UNEVEN, *SMALL, *AUGMENTED, "clients.count=6", f"server.weights={weights}", *steps),
        *("samples.sampler=ratio", "samples.sampler.ratio=0.8"),
    ]
    for weights, steps in (("samples", ONE_STEP), ("samples", ["local.epochs=1"]))
}
COMPOSITIONS |= {
    f"strata whose clients are away keep their share: {weights}, {allocation}, m = {count}": [
        *(UNEVEN, *SMALL, *STRATA, *AWAY, f"server.weights={weights}", f"clients.count={count}"),
        *(f"clients.sampler.allocation={allocation}", "clients.sampler.features=label-histogram"),
    ]
    for weights, allocation, count in (
        ("stratified", "proportional", 2),
        ("stratified", "neyman", 6),
        ("normalized", "proportional", 6),
        ("unbiased", "equal", 2),
        ("literal", "proportional", 6),
    )
}


COMPOSITIONS |= {
    f"participants without a sampled row change nothing: m = {count}, {allocation}": [
        *(*UNEVEN_SMALL, *STRATA, "samples.sampler=bernoulli", "samples.budget=6", "samples.size.query=selected"),
        *("server.weights=stratified", f"clients.count={count}", f"clients.sampler.allocation={allocation}"),
    ]
    for count, allocation in ((6, "neyman"), (6, "equal"), (2, "neyman"), (14, "proportional"))
}
ALL = ["clients.sampler=all"]
SOME = ["clients.sampler=uniform", "clients.count=9"]
LIES = {"sign-flip": ["attack=sign-flip", "attack.scale=3"], "label-flip": ["attack=label-flip"]}
RULES = {
    "the median": ["server.aggregator=median"],
    "clipped norms": ["server.aggregator=norm-clip", "server.aggregator.bound=0.15"],
}
COMPOSITIONS |= {
    "lies are compressed like updates, and clipped": [
        *(*UNEVEN_SMALL, *ALL, *LIES["sign-flip"], "compression=int8", "privacy.clip_norm=0.2"),
        "server.weights=uniform",
    ],
    "flipped labels are trained on in merged rows": [*UNEVEN_SMALL, *ALL, *LIES["label-flip"], *SAMPLED, *ONE_STEP],
    "the median of sampled rows, after drop-outs, moved by Adam": [
        *(*UNEVEN_SMALL, *ALL, *SAMPLED, *AWAY, *RULES["the median"], "server.optimizer=adam"),
        "server.optimizer.lr=0.05",
    ],
    "clipped norms of updates in eight bits": [*UNEVEN_SMALL, *SOME, *RULES["clipped norms"], "compression=int8"],
    "vectors of an algorithm go to those who drop out, and do not come back": [
        *(*UNEVEN_SMALL, *SOME, "local.algorithm=scaffold", "clients.failure_rate=0.4"),
    ],
    "an opening step on a batch lasts as long as a batch": [
        *(
            *UNEVEN_SMALL,
            *STRATA,
            *CLOCK[:2],
            "clients.sampler.initial_step=true",
            "clients.sampler.features.probe=batch",
        ),
        *("local.batch_size=8", "devices.speed.median=5.0"),
    ],
    "models after one step spread as far as that step goes": [
        *(*UNEVEN_SMALL, *STRATA, "clients.sampler.features=one-step-change", "clients.sampler.allocation=neyman"),
        "logging.diagnostics=true",
    ],
    "FedNova's second vector takes its time on the way up": [
        *(*UNEVEN_SMALL, *CLOCK, "local.algorithm=fednova", "devices.upload.median=5e3"),
    ],
    "noise is shared out among those who are wanted": [
        *(*UNEVEN_SMALL, *SOME, "server.weights=uniform", "privacy.clip_norm=0.2", "privacy.noise_multiplier=1"),
    ],
    "the median of the opening step": [
        *UNEVEN_SMALL,
        *STRATA,
        *RULES["the median"],
        "clients.sampler.initial_step=true",
    ],
    "q-FFL with q = 0.3 and a constant of its own": [
        *(*UNEVEN_SMALL, *BY_SIZE, "server.weights=q-ffl", "server.weights.q=0.3", "server.weights.lipschitz=7.0"),
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
