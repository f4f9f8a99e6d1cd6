"""Values and choices that cannot work are rejected in one sentence that names the key; values at a bound are not."""

from __future__ import annotations

import re

import pytest

from fedmpi import UserError
from fedmpi.config import load_config

OWN, LOSSES, METRICS = "tests.end_to_end.own_sums:", "tests.tasks.own_losses:", "tests.tasks.own_metrics:"
ALL = "clients.sampler=all"
SAMPLED = "samples.sampler=bernoulli samples.budget=50"
SIZES = f"{SAMPLED} samples.size.estimate=duchi"
CLIPPED = "privacy.clip_norm=1 server.weights=uniform"
NOISE = f"{ALL} {CLIPPED} privacy.noise_multiplier=1"
CLOCK = "devices=true devices.speed=lognormal"
REJECTED: dict[str, list[str]] = {
    "samples.size.epsilon": [f"{SIZES} samples.size.epsilon={value}" for value in ("5e-324", "1e-9", "600")],
    "privacy.noise_multiplier": [*(f"{NOISE} privacy.noise_multiplier={value}" for value in ("-1", "1e9", "1e308"))],
    "privacy.delta": [f"{NOISE} privacy.delta=1e-300"],
    "clients.over_selection": [f"{CLOCK} clients.over_selection=1e308"],
    "devices.speed.sigma": [f"{CLOCK} devices.speed.sigma=1e3"],
    "devices.upload.sigma": [f"{CLOCK} devices.upload=lognormal devices.upload.sigma=51"],
    "server.optimizer.tau": [f"server.optimizer=adam server.optimizer.tau={value}" for value in ("1e308", "1e20")],
    "topology.epochs": ["topology=mediators topology.epochs=1_000_000_000_000"],
    "cluster.threads": ["cluster.threads=2000"],
    "cluster.state_memory": ["cluster.state_memory=1e9"],
    "local.steps": ["local.steps=18446744073709551616", "local.steps=1_000_001"],
    "local.epochs": ["local.epochs=100_001"],
    "rounds": ["rounds=1_000_000_000_000"],
    "local.lr": ["local.lr=1e308", "local.lr='''x"],
    "rebalance.rotation": ["rebalance=true rebalance.rotation=1e9"],
    "rebalance.shift": ["rebalance=true rebalance.shift=3"],
    "server.weights.q": ["server.weights=q-ffl server.weights.q=1e6"],
    "seed": ["seed=" + "9" * 5000],
    "data.source": ["data.source=2020-01-01"],
    "a.a": ["a" + ".a" * 3000 + "=1"],
    "server.aggregator": [
        "server.aggregator=median server.aggregator.trim=0.2",
        "server.aggregator=krum",
        "server.aggregator=medain",
    ],
    "samples.sampler.shrae is unknown": [f"samples.sampler={OWN}rare_first samples.sampler.shrae=0.2"],
    "task.kind": [
        "task.kind=regression task.loss=cross-entropy",
        "task.kind=tokens task.loss=bce",
        "task.loss=mse",
        "task.kind=regression task.metrics=perplexity",
        "task.metrics=r2",
    ],
    "task.loss": ["task.loss=cross-entrpy"],
    "task.scale": [f"task.loss={LOSSES}squared task.scale=wide"],
    "task.": ["task.loss=label-smoothing task.smothing=1", "task.loss=cross-entropy task.loss.smoothing=0.1"],
    "task.metrics": ["task.metrics=top-q", 'task.metrics=["top-k","top-k"]', 'task.metrics=[{name="top-k",kk=3}]'],
    "task.metrics.kk": ['task.metrics=[{name="top-k",kk=3}]'],
    "task.of": [f'task.metrics=["{METRICS}Recall"] task.of=x'],
}
ROWS = [(settings, named) for named, rows in REJECTED.items() for settings in rows]


@pytest.mark.parametrize(("settings", "named"), ROWS, ids=[settings[:80] for settings, _ in ROWS])
def test_what_cannot_work_is_rejected_by_name(settings: str, named: str) -> None:
    preset = [] if "preset=" in settings else ["preset=fedavg"]
    with pytest.raises(UserError, match=re.escape(named)) as caught:
        load_config(None, [*preset, *settings.split()])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2100


@pytest.mark.parametrize(
    "settings",
    [
        f"{SIZES} samples.size.epsilon=1e-6",
        f"{SIZES} samples.size.epsilon=500",
        f"{NOISE} privacy.noise_multiplier=0",
        f"{NOISE} privacy.noise_multiplier=1e-6",
        f"{CLOCK} devices.speed.sigma=50",
        "rounds=99_999_999 local.steps=1_000_000",
        "server.optimizer=adam server.optimizer.tau=1e-15",
        "cluster.threads=1024 local.proximal_mu=0",
        f"{ALL} {CLIPPED} samples.sampler=exact samples.budget=9",
        f"{ALL} {CLIPPED} rebalance=true",
    ],
)
def test_the_bounds_themselves_are_allowed(settings: str) -> None:
    load_config(None, ["preset=fedavg", *settings.split()])
