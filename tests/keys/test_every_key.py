"""Every key of the configuration, and every option of a built-in component, changes a run: none is only read."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from fedmpi import Config, components
from fedmpi.common.registry import KINDS
from fedmpi.config import key_descriptions
from fedmpi.data.schema import DataDescription
from fedmpi.models import build
from tests.keys.worlds import (
    ALL,
    ASKED,
    CLASSES,
    CLIPPED,
    CLOCK,
    COPIES,
    DRAWN,
    MEDIATED,
    NOISED,
    OPTICS,
    PRIVATE,
    SOME,
    STRATA,
    Runs,
    S,
)

SAMPLER = f"{S} clients.count=4 clients.sampler"
OORT = f"{SAMPLER}=oort-loss rounds=4"
FEW = (
    f"{SAMPLER}=oort-loss rounds=9 clients.sampler.explore=0.5 clients.sampler.explore_decay=1 "
    "clients.sampler.explore_least=0"
)
FEDCOR = f"{SAMPLER}=fedcor rounds=9 clients.sampler.warmup=2 clients.sampler.interval=4"
TIMED = (
    f"{SAMPLER}=oort rounds=9 devices=true clients.sampler.explore=0.5 clients.sampler.explore_decay=1 "
    "clients.sampler.explore_least=0 clients.sampler.window=2"
)
TIFL = (
    f"{SAMPLER}=tifl rounds=9 devices.speed=lognormal devices.speed.sigma=1 "
    "data.source=fedmpi.testing.runs:synthetic data.source.held_out=true"
)
KRUM = f"{ALL} attack=noise clients.attack_fraction=0.25 rounds=1 server.aggregator=krum"
STEPS = f"{SOME} rounds=4 local.schedule=step"
STILL = f"{COPIES} rebalance.rotation=0 rebalance.shear=0 rebalance.shift=0 rebalance.zoom=0"
FREE = f"{CLOCK} devices.upload.median=1e30 devices.download.median=1e30"
FAST = f"{CLOCK} devices.speed.median=1e30"
SQUEEZED = f"{DRAWN} clients.sampler.strata=3 clients.sampler.features=compressed-gradient"
FLYING = f"{S} topology=async topology.in_flight=4 devices.speed=lognormal rounds=6 topology"
GROUPS = (
    f"{ALL} topology=mediators topology.clients_per_mediator=3 clients.availability=bernoulli "
    "clients.availability.probability=0.7 topology.scheduling=random"
)
EXPLORING = {"clients.sampler.explore": "0 1 clients", "clients.sampler.explore_decay": "0.1 1 clients"}
EXPLOITING = {
    **{f"clients.sampler.{option}": "0 1 clients" for option in ("cutoff", "clip")},
    "clients.sampler.stale": "0 1e9 clients",
    "clients.sampler.exclude_after": "1 9 clients",
}

EFFECTS: dict[str, dict[str, str]] = {
    SOME: {
        "seed": "0 1 clients",
        "rounds": "2 3 clients",
        "data.source": "digits:clients=12,alpha=0.5 digits:clients=7 clients",
        "data.normalize": "true false model",
        "local.algorithm": "plain scaffold model",
        "local.schedule": "constant inverse model",
        "local.lr": "0.2 0.1 model",
        "local.epochs": "1 2 model",
        "local.steps": "2 5 model",
        "local.batch_size": "20 all model",
        "local.drop_last": "false true model",
        "local.proximal_mu": "0 2 model",
        "topology": "star mediators model",
        "server.weights": "samples uniform model",
        "server.aggregator": "mean median model",
        "server.optimizer": "sgd momentum model",
        "server.exact": "false true model",
        "devices": "false true record",
        "compression": "none float16 model",
        "task.loss": "cross-entropy label-smoothing model",
        "task.metrics": '"top-k" ["top-k","perplexity"] record',
        "cluster.device": "cpu cuda:77 rejection",
        "evaluation.every": "1 2 record",
        "evaluation.target_accuracy": "1e-9 1 summary",
        "evaluation.clients": "all participants record",
        "checkpoint.every": "1 0 files",
        "logging.tensorboard": "false true files",
        "logging.diagnostics": "false true record",
        "logging.participants": "false true clients",
    },
    f"{SOME} data.source=digits": {
        "data.source.clients": "9 12 clients",
        "data.source.partition": "iid dirichlet model",
        "data.source.alpha": "0.3 3 model",
        "data.source.seed": "0 1 model",
    },
    f"{SOME} local.lr=0.5 rounds=12": {"evaluation.patience": "1 2 clients"},
    f"{SOME} local.lr=0.5 rounds=12 evaluation.patience=2": {"evaluation.min_delta": "0 1 clients"},
    f"{SOME} data.source={{val}}": {"evaluation.on": "test val record"},
    f"{SOME} data.source={{damaged}}": {"data.verify": "false true rejection"},
    f"{SOME} data.source={{augmented}} rebalance=true": {"rebalance.mode": "stored virtual rejection"},
    f"{SOME} rounds=5": {"logging.interval": "0 1e6 printed"},
    f"{SOME} checkpoint.every=1": {"checkpoint.keep": "1 3 files"},
    f"{SOME} evaluation.clients=all rounds=5": {
        "evaluation.clients_every": "1 2 record",
        "evaluation.fine_tune": "0 2 record",
    },
    f"{SOME} rounds=1 model.hidden=[20]": {"model.lora": "{rank=1} {rank=2} model", "model.copies": "1 2 model"},
    f"{SOME} local.lr=0.01": {"local.optimizer": "sgd adam model"},
    f"{SOME} rounds=3": {"local.warmup": "0 2 model", "local.clip_norm": "0.1 0.2 model"},
    f"{ALL} rounds=3": {"local.personal": '["output.weight"] ["output.*"] model'},
    f"{SOME} local.warmup=2": {"local.warmup_from": "0.1 0.5 model"},
    f"{SOME} local.schedule=cosine": {"local.schedule_unit": "round step model"},
    f"{SOME} samples.budget=100": {"samples.sampler": "bernoulli exact model"},
    f"{SOME} samples.sampler=exact": {"samples.budget": "50 100 model"},
    f"{SOME} samples.sampler=ratio": {"samples.sampler.ratio": "0.25 0.5 model"},
    f"{SOME} samples.sampler=fedbalancer samples.sampler.window=1 rounds=3": {"samples.sampler.step": "0 1 model"},
    f"{SOME} samples.sampler=fedbalancer samples.sampler.step=1 rounds=3": {"samples.sampler.window": "1 2 model"},
    f"{SOME} samples.sampler=fedbalancer samples.sampler.step=1 samples.sampler.window=1 rounds=3": {
        "samples.sampler.under": "0 0.5 model",
        "samples.sampler.noise": "0 1 model",
    },
    f"{SOME} samples.sampler=sample-importance": {
        "samples.sampler.share": "0.2 0.4 model",
        "samples.sampler.threshold": "0 9 model",
        "samples.budget": "50 100 model",
    },
    "clients.sampler=all rounds=1 data.source=digits:clients=9,partition=iid local.batch_size=all": {
        "model": "mlp tests.reference.networks:batch_norm_mlp model"
    },
    f"{S} clients.count=4": {"clients.sampler": "uniform weighted clients", "preset": "fedavg fedprox model"},
    f"{S} clients.sampler=uniform": {"clients.count": "3 5 clients", "clients.fraction": "0.25 0.5 clients"},
    f"{ALL} local.steps=1 local.batch_size=all": {"local.engine": "sequential auto model"},
    ALL: {
        "clients.failure_rate": "0 0.5 clients",
        "clients.availability": "always tests.keys.contrary:larger_half clients",
    },
    f"{ALL} clients.attack_fraction=0.5": {"attack": "sign-flip label-flip model"},
    f"{ALL} attack=sign-flip": {"clients.attack_fraction": "0.25 0.5 model", "attack.scale": "2 1 model"},
    f"{ALL} attack=noise": {"attack.scale": "2 1 model"},
    f"{ALL} clients.availability=bernoulli": {"clients.availability.probability": "0.3 0.9 clients"},
    f"{ALL} clients.availability=label-group": {
        "clients.availability.by_label": "[1,1,1,1,1,0,0,0,0,0] [0,0,0,0,0,1,1,1,1,1] clients"
    },
    DRAWN: {"clients.sampler.strata": "2 4 clients"},
    f"{DRAWN} clients.sampler.strata=3": {"clients.sampler.features": "full-gradient compressed-gradient clients"},
    f"{DRAWN} clients.sampler.features=full-gradient": {"clients.sampler.clustering": "kmeans optics clients"},
    SQUEEZED: {
        "clients.sampler.features.codebook_size": "2 9 clients",
        "clients.sampler.features.decompress": "true false clients",
    },
    STRATA: {
        "clients.sampler.features.probe": "full sample clients",
        "clients.sampler.refresh": "0 1 clients",
        "clients.sampler.refresh_clients": "all selected clients",
        "clients.sampler.projection_above": "20000000 1 clients",
        "clients.sampler.allocation": "equal proportional clients",
        "clients.sampler.every_stratum": "true false clients",
        "clients.sampler.within_stratum": "uniform importance clients",
        "clients.sampler.design": "systematic sequential clients",
    },
    f"{STRATA} clients.sampler.within_stratum=uniform clients.sampler.refresh=0": {
        "clients.sampler.initial_step": "false true clients"
    },
    OPTICS: {
        "clients.sampler.clustering.min_samples": "2 5 clients",
        "clients.sampler.clustering.xi": "0.05 0.5 clients",
        "clients.sampler.clustering.outliers": "singletons drop clients",
    },
    f"{SAMPLER}=weighted clients.count=9": {"clients.sampler.replace": "true false clients"},
    f"{SAMPLER}=importance clients.sampler.features=full-gradient": {
        "clients.sampler.design": "systematic sequential clients"
    },
    f"{SAMPLER}=power-of-choice": {"clients.sampler.candidates": "4 12 clients"},
    f"{SAMPLER}=fedgs": {"clients.sampler.alpha": "0 10 clients"},
    f"{SAMPLER}=fedgs clients.sampler.alpha=10": {
        "clients.sampler.epsilon": "0.1 0.9 clients",
        "clients.sampler.sigma2": "0.01 1 clients",
    },
    f"{SAMPLER}=ucb rounds=9": {
        "clients.sampler.exploration": "0 100 clients",
        "clients.sampler.metric": "train_loss test_accuracy clients",
    },
    f"{SAMPLER}=thompson rounds=5": {
        "clients.sampler.deviation": "0 1 clients",
        "clients.sampler.metric": "train_loss test_accuracy clients",
    },
    f"{SAMPLER}=active rounds=4": {"clients.sampler.alpha1": "0 0.9 clients", "clients.sampler.alpha3": "0 1 clients"},
    f"{SAMPLER}=active rounds=4 clients.sampler.alpha1=0": {"clients.sampler.alpha2": "0 5 clients"},
    f"{SAMPLER}=fedcs devices=true": {
        "clients.sampler.deadline": "180 0.1 clients",
        "clients.sampler.candidates": "4 8 clients",
    },
    f"{SAMPLER}=clustered-similarity rounds=6": {
        "clients.sampler.pool": "9 1 clients",
        "clients.sampler.sketch_size": "64 1 clients",
    },
    f"{SAMPLER}=divfl rounds=4": {
        "clients.sampler.error": "0 0.9 clients",
        "clients.sampler.interval": "1 9 clients",
        "clients.sampler.assigned": "false true model",
        "clients.sampler.pool": "9 3 clients",
        "clients.sampler.sketch_size": "64 1 clients",
    },
    f"{SAMPLER}=hics rounds=9": {
        "clients.sampler.horizon": "1 9 clients",
        "clients.sampler.gamma": "0 9 clients",
        "clients.sampler.temperature": "0.0025 1 clients",
        "clients.sampler.entropy_weight": "0 10 clients",
        "clients.sampler.groups": "1 4 clients",
        "clients.sampler.pool": "9 2 clients",
        "clients.sampler.layers": '["*bias"] ["*weight"] clients',
    },
    f"{S} clients.count=8 clients.sampler=ocs server.weights=unbiased": {
        "clients.sampler.candidates": "5 9 clients",
        "clients.sampler.j_max": "0 1 model",
        "clients.sampler.population": "samples clients clients",
    },
    TIFL: {
        "clients.sampler.tiers": "2 3 clients",
        "clients.sampler.interval": "1 9 clients",
        "clients.sampler.credits": "9 [1,9,9,9,9] clients",
        "clients.sampler.timeout": "100 0.01 clients",
    },
    **{
        f"{base}{more}": keys
        for base in (OORT, f"{SAMPLER}=oort rounds=4 devices=true")
        for more, keys in {
            "": {"clients.sampler.explore_least": "0 1 clients"},
            " clients.sampler.explore_least=0": EXPLORING,
        }.items()
    },
    FEW: EXPLOITING,
    TIMED: {
        **EXPLOITING,
        "clients.sampler.penalty": "0 9 clients",
        "clients.sampler.preferred": "0 1 clients",
        "clients.sampler.pacer": "0 1 clients",
        "clients.sampler.window": "1 9 clients",
    },
    **{
        f"{base} clients.sampler.exclude_after=1": {"clients.sampler.exclude_most": "0 1 clients"}
        for base in (FEW, TIMED)
    },
    f"{SAMPLER}=k-vib rounds=5": {"clients.sampler.bound": "1e-9 1e9 clients"},
    f"{SAMPLER}=k-vib rounds=5 clients.sampler.bound=1e-9": {"clients.sampler.horizon": "1 5000 clients"},
    FEDCOR: {
        "clients.sampler.warmup": "1 5 clients",
        "clients.sampler.interval": "3 4 clients",
        "clients.sampler.anneal": "0 1 clients",
        "clients.sampler.forget": "0.1 1 clients",
        "clients.sampler.memory": "1 9 clients",
        "clients.sampler.dimension": "1 9 clients",
    },
    ASKED: {"samples.size.estimate": "exact duchi model", "samples.size.query": "all selected model"},
    PRIVATE: {
        "samples.size.epsilon": "0.5 4 model",
        "samples.size.max_size": "100 160 model",
        "samples.size.reuse_reports": "false true model",
    },
    f"{PRIVATE} samples.size.max_size=100": {"samples.size.clip": "true false model"},
    f"{SOME} local.optimizer=adam local.lr=0.01": {
        "local.optimizer.beta1": "0.9 0.5 model",
        "local.optimizer.beta2": "0.999 0.9 model",
        "local.optimizer.epsilon": "1e-8 1 model",
    },
    f"{SOME} local.optimizer=sgd": {
        "local.optimizer.momentum": "0 0.9 model",
        "local.optimizer.weight_decay": "0 0.1 model",
    },
    f"{SOME} local.optimizer=sgd local.optimizer.momentum=0.9": {"local.optimizer.nesterov": "false true model"},
    STEPS: {"local.schedule.every": "1 2 model"},
    f"{STEPS} local.schedule.every=1": {"local.schedule.factor": "0.5 0.1 model"},
    f'{SOME} rounds=3 local.algorithm=fedrep local.personal=["output.*"]': {"local.algorithm.head_epochs": "1 3 model"},
    f"{SOME} local.algorithm=ditto evaluation.clients=all": {"local.algorithm.lam": "0.1 5 record"},
    f"{SOME} local.algorithm=per-fedavg": {
        "local.algorithm.alpha": "0.01 0.5 model",
        "local.algorithm.hessian": "false true model",
    },
    f"{SOME} local.algorithm=feddyn server.weights=uniform": {"local.algorithm.alpha": "0.1 1 model"},
    MEDIATED: {"topology.clients_per_mediator": "2 3 model", "topology.epochs": "1 3 model"},
    f"{MEDIATED} topology.clients_per_mediator=2": {
        "topology.scheduling": "greedy random model",
        "topology.target": "uniform test record",
    },
    f"{MEDIATED} local.optimizer=adam local.lr=0.01": {"topology.keep_optimizer": "false true model"},
    GROUPS: {"topology.regroup": "once every-round model"},
    f"{FLYING}.buffer=2": {
        "topology.in_flight": "3 5 clients",
        "topology.buffer": "1 3 clients",
        "topology.average": "updates models model",
        "topology.staleness": "constant polynomial model",
    },
    f"{FLYING}.average=updates": {"topology.period": "0.05 0.2 clients"},
    f"{FLYING}.buffer=2 topology.staleness=polynomial": {"topology.staleness.a": "0.5 2 model"},
    f"{FLYING}.buffer=2 topology.staleness=hinge topology.staleness.b=0": {"topology.staleness.a": "0.5 2 model"},
    f"{FLYING}.buffer=2 topology.staleness=hinge": {"topology.staleness.b": "0 2 model"},
    COPIES: {
        "rebalance": "false true model",
        "rebalance.alpha": "0.5 1.5 model",
        "rebalance.copies": "ratio ratio-minus-one model",
        "rebalance.weights": "augmented original model",
    },
    STILL: {
        **{f"rebalance.{angle}": "0 30 model" for angle in ("rotation", "shear")},
        **{f"rebalance.{share}": "0 0.3 model" for share in ("shift", "zoom")},
    },
    **{
        f"{SOME} server.weights={name}": {"server.weights.population": "samples clients model"}
        for name in ("normalized", "unbiased", "literal")
    },
    f"{SOME} server.weights=q-ffl": {"server.weights.q": "0 5 model", "server.weights.lipschitz": "20 2000 model"},
    f"{ALL} server.aggregator=trimmed-mean": {"server.aggregator.trim": "0 0.4 model"},
    f"{KRUM} server.aggregator.keep=3": {"server.aggregator.byzantine": "0 3 model"},
    f"{KRUM} server.aggregator.byzantine=2": {"server.aggregator.keep": "1 6 model"},
    f"{CLIPPED} server.aggregator=norm-clip": {"server.aggregator.bound": "0.02 0.01 model"},
    **{
        f"{SOME} server.optimizer={name}": {
            f"server.optimizer.{option}": values
            for option, values in {
                "lr": "0.1 0.05 model",
                "beta1": "0.9 0.5 model",
                "tau": "1e-3 1 model",
                "beta2": "0.99 0.5 model",
            }.items()
            if option in own
        }
        for name, own in {
            "sgd": ("lr",),
            "momentum": ("lr", "beta1"),
            "adagrad": ("lr", "beta1", "tau"),
            "adam": ("lr", "beta1", "tau", "beta2"),
            "yogi": ("lr", "beta1", "tau", "beta2"),
        }.items()
    },
    CLOCK: {"devices.speed": "constant lognormal record", "devices.power": "false true record"},
    f"{CLOCK} devices.speed.median=40": {"devices.deadline": "9 3 clients"},
    f"{CLOCK} devices.speed.median=40 devices.deadline=3": {"devices.late": "lost partial clients"},
    f"{CLOCK} clients.availability=intervals": {
        "clients.availability.file": "tests/keys/intervals.csv tests/keys/other_intervals.csv clients"
    },
    f"{CLOCK} rounds=4 devices.speed.median=9 clients.availability=intervals "
    "clients.availability.file=tests/keys/other_intervals.csv": {"clients.availability.period": "41 99 record"},
    **{
        f"{CLOCK} devices.power=true devices.power.{phase}=table devices.power.{phase}.column=speed": {
            f"devices.power.{phase}.file": "tests/keys/devices.csv tests/keys/other_devices.csv record"
        }
        for phase in ("download", "training", "upload")
    },
    f"{CLOCK} devices.speed=lognormal": {"clients.over_selection": "1 2 clients"},
    f"{FREE} devices.speed=constant": {"devices.speed.median": "1000 50 record"},
    f"{FREE} devices.speed=lognormal": {"devices.speed.sigma": "0 2 record", "devices.speed.median": "1000 50 record"},
    f"{CLASSES} devices.speed.shares=[0,1]": {"devices.speed.rates": "[1,100] [1,50] record"},
    f"{CLASSES} devices.speed.rates=[10,100]": {"devices.speed.shares": "[1,0] [0,1] record"},
    f"{FREE} devices.speed=table devices.speed.column=speed": {
        "devices.speed.file": "tests/keys/devices.csv tests/keys/other_devices.csv record"
    },
    f"{FREE} devices.speed=table devices.speed.file=tests/keys/devices.csv": {
        "devices.speed.column": "speed other record"
    },
    FAST: {"devices.upload.median": "1000 200 record", "devices.download.median": "1000 200 record"},
    f"{FAST} devices.upload=lognormal devices.upload.median=1000": {"devices.upload.sigma": "0 1 record"},
    f"{ALL} compression=top-k": {"compression.fraction": "0.1 0.2 model"},
    f"{ALL} compression=top-k compression.fraction=0.1": {"compression.error_feedback": "false true model"},
    CLIPPED: {"privacy.clip_norm": "0.02 100 model"},
    NOISED: {"privacy.noise_multiplier": "2 4 model"},
    f"{NOISED} privacy.noise_multiplier=2": {
        "privacy.delta": "1e-5 1e-3 record",
        "privacy.adaptive_clip": "false {count_noise=9} model",
    },
    f"{NOISED} privacy.adaptive_clip=true": {
        "privacy.adaptive_clip.quantile": "0.5 0.9 model",
        "privacy.adaptive_clip.lr": "0.2 0.4 model",
    },
    f"{NOISED} privacy.adaptive_clip=true privacy.noise_multiplier=1": {
        "privacy.adaptive_clip.count_noise": "0.6 0.7 model"
    },
    f"{NOISED} clients.sampler=shuffled clients.count=3 privacy.noise_multiplier=2": {
        "privacy.noise": "independent tree model"
    },
    f"{SOME} task.loss=cross-entropy": {"task.loss.class_weights": "[] balanced model"},
    f"{SOME} task.loss=label-smoothing": {"task.loss.smoothing": "0 0.5 model"},
    f"{SOME} task.metrics=top-k": {"task.metrics.k": "2 3 record"},
}
"""Settings → key → two values, and the first part of a run (`worlds.SEEN`) in which the two runs differ.

tests/reference says what most keys do; here each is seen to have an effect.
"""
ELSEWHERE = {
    *("cluster.placement", "cluster.balance", "cluster.server_trains", "cluster.reduction"),  # tests/mpi, tests/core
    "clients.sampler.spread",  # tests/reference
    "cluster.threads",  # tests/common/test_arithmetic.py
    "local.precision",  # tests/common/test_arithmetic.py
    "cluster.stall_timeout",  # tests/faults
    "cluster.state_memory",  # tests/local/test_client_state.py
    "evaluation.batch_size",  # tests/test_training_own_models.py
    "task.kind",  # tests/tasks/test_kinds.py
}
"""Keys without visible effect on one rank and the digits."""
ROWS = [(base, key, *values.split()) for base, keys in EFFECTS.items() for key, values in keys.items()]
RUN = [kind for kind in KINDS.values() if kind.modules and not kind.key.startswith("--") and not kind.late]


def options() -> Iterator[tuple[str, str]]:
    """Yield (component, option) of all built-in components of a run except models."""
    for kind in RUN:
        for part in components(kind.name):
            yield from ((part.name, f"{kind.key}.{name}") for name in part.own)


def test_every_key_and_every_option_has_a_row():
    tried = set()
    for base, key, *_ in ROWS:
        chosen = re.findall(rf"{re.escape(key.rpartition('.')[0])}=([^\s:]+)", base)
        tried.add((chosen[-1] if chosen else "", key))
    assert not set(options()) - tried
    tables = {name for name, field in Config.model_fields.items() if not isinstance(field.annotation, type)}
    links = {
        f"devices.{link}{key}"
        for link in ("upload", "download")
        for key in ("", ".rates", ".shares", ".file", ".column")
    }
    links |= {key for key, *_ in key_descriptions() if key.startswith("devices.power.")}
    rows = {key for key, *_ in key_descriptions() if not key.startswith("[") and " = " not in key}
    untried = (rows | tables) - {key for _, key in tried} - links - {"devices.download.sigma", "samples.size"}
    assert sorted(untried) == sorted(ELSEWHERE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs into folders of this module."""
    return Runs(tmp_path_factory.mktemp("runs"))


def is_inherited(base: str, key: str) -> bool:
    """Check whether `oort` has an option from `oort-loss`, where it has a row as well."""
    [by_loss] = [part for part in components("client sampler") if part.name == "oort-loss"]
    return "=oort " in base and key.rpartition(".")[2] in by_loss.own


@pytest.mark.parametrize(
    ("base", "key", "one", "other", "first"),
    [
        pytest.param(*row, id=f"{row[1]} {row[0]}", marks=pytest.mark.slow if is_inherited(*row[:2]) else ())
        for row in ROWS
    ],
)
def test_a_key_changes_a_run(base: str, key: str, one: str, other: str, first: str, runs: Runs):
    option = rf'task.metrics=[{{name="\1",{key.rpartition(".")[2]}='  # of one of several components
    settings = [
        re.sub(r"task\.metrics=(\S+)", rf"{option}{value}}}]", base)
        if key.startswith("task.metrics.")
        else f"{base} {key}={value}"
        for value in (one, other)
    ]
    assert runs.difference(*settings, in_folder=first == "files") == first


SMALL = {
    "mlp": {"hidden": [6]},
    "cnn": {"dense": 8},
    "cifar-cnn": {"hidden": 8},
    "image-cnn": {"filters": [2, 3], "hidden": [4, 5]},
    "resnet18": {"width": 8, "groups": 2},
    "text-cnn": {"dimension": 4, "filters": 3, "widths": [2, 3]},
    "fedsampling-text-cnn": {"dimension": 4, "filters": 3, "hidden": [5]},
    "transformer": {"dimension": 4, "heads": 2, "head_size": 3, "hidden": [5]},
    "lstm": {"dimension": 4, "units": 3},
    "char-lstm": {"dimension": 4, "units": 3, "layers": 1},
}
OTHERWISE = {
    "hidden": [7],
    "activation": "tanh",
    "dropout": 0.33,
    "batch_norm": True,
    "dense": 9,
    "dense_dropout": 0.33,
    "filters": 5,
    "width": 16,
    "groups": 4,
    "dimension": 5,
    "widths": [2, 4],
    "heads": 3,
    "head_size": 4,
    "units": 5,
    "layers": 2,
}
SPECIAL = {("cifar-cnn", "hidden"): 9, ("image-cnn", "filters"): [2, 4]}
GRAY, COLORED = (DataDescription((c, s, s), "uint8", 10, "image", 0, (), ()) for c, s in ((1, 28), (3, 32)))
TEXTS = DataDescription((12,), "int32", 3, "text", 40, (), ())


@pytest.mark.parametrize(
    ("name", "option"), [(part.name, name) for part in components("model") for name in part.fields if name in OTHERWISE]
)
def test_an_option_changes_the_model(name: str, option: str):
    data = TEXTS if "dimension" in SMALL[name] else COLORED if name in ("cifar-cnn", "resnet18") else GRAY
    found = []
    for options in (SMALL[name], SMALL[name] | {option: SPECIAL.get((name, option), OTHERWISE[option])}):
        module = build(name, options, data, 0).train()
        torch.manual_seed(0)
        x = torch.randint(1, 40, (4, 12)) if data is TEXTS else torch.randn(4, *data.feature_shape)
        found.append((str(module), sum(p.numel() for p in module.parameters()), module(x).detach()))
    assert found[0][:2] != found[1][:2] or not torch.equal(found[0][2], found[1][2])
