"""Random stars over all components, for the plain loop to replay: three rounds each, small enough to take a moment."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedmpi import Config, UserError
from fedmpi.config import build_config, config_table

MODELS: list[dict[str, Any]] = [
    {"model": "mlp", "model.hidden": [12], "model.activation": "tanh"},
    {"model": "mlp", "model.hidden": [10], "model.dropout": 0.25, "model.activation": "sigmoid"},
    {"model": "mlp", "model.hidden": [10], "model.dropout": 0.3, "model.activation": "gelu"},
    {"model": "tests.reference.networks:dropout_mlp", "model.width": 12},
    {"model": "tests.reference.networks:batch_norm_mlp", "model.width": 10},
]
"""All smooth: rounding can switch a ReLU on or off."""
DOUBLE = "tests.reference.networks:double_perceptron"
IID = "digits:clients=9,partition=iid"
CHOICES: dict[str, list[Any]] = {
    "data.source": ["digits:clients=14,alpha=0.4", IID, "digits:clients=30,alpha=0.1,seed=3"],
    "data.normalize": [True, True, False],
    "clients.sampler": ["all", "uniform", "weighted", "importance", "stratified", "stratified", "stratified"],
    "clients.count": [4, 7, None],
    "clients.fraction": [None, 0.5],
    "clients.availability": ["always", "always", "bernoulli", "bernoulli", "label-group"],
    "clients.failure_rate": [0.0, 0.0, 0.3],
    "clients.over_selection": [1.0, 1.5],
    "samples.sampler": ["all", "bernoulli", "ratio", "exact"],
    "samples.budget": [60, 400],
    "samples.size.estimate": ["exact", "randomized-response", "duchi", "piecewise"],
    "samples.size.epsilon": [0.5, 3.0],
    "samples.size.max_size": [40, 121, 200],
    "samples.size.clip": [True, False],
    "samples.size.query": ["all", "selected"],
    "samples.size.reuse_reports": [False, True],
    "local.optimizer": ["sgd", "sgd", "sgd", "adam"],
    "local.lr": [0.02],
    "local.schedule": ["constant", "inverse", "cosine", "step"],
    "local.epochs": [None, 1, 2],
    "local.steps": [None, 1, 3],
    "local.batch_size": [8, 20, "all"],
    "local.proximal_mu": [0.0, 0.2],
    "local.engine": ["auto", "auto", "sequential", "merged", "batched"],
    "rebalance": [False, False, True],
    "server.weights": ["samples", "uniform", "gradient-sum", "stratified", "normalized", "unbiased", "literal"],
    "server.optimizer": ["sgd", "momentum", "adagrad", "adam", "yogi"],
    "server.exact": [False, False, False, True],
    "compression": ["none", "none", "none", "top-k", "float16"],
    "privacy.clip_norm": [None, None, None, 0.05],
    "privacy.noise_multiplier": [0.0, 0.1],
    "devices": [False, True],
    "cluster.reduction": ["auto", "window", "allreduce"],
    "cluster.server_trains": ["auto", "auto", "always"],
    "cluster.placement": ["owner", "auto", "shared"],
    "evaluation.every": [1, 1, 2],
    "evaluation.batch_size": [100, 2000],
    "logging.diagnostics": [False, False, True],
}
"""Values of each key; `None` leaves the key out."""
PROBES = ["full", "batch", "sample"]
FEATURES = {"features": ["one-step-change", "full-gradient", "compressed-gradient", "label-histogram"]}
MEASURED = {
    **FEATURES,
    "refresh": [0, 1],
    "refresh_clients": ["all", "selected"],
    "projection_above": [20_000_000, 1000],
    "design": ["systematic", "sequential"],
}
OPTIONS: dict[str, dict[Any, dict[str, list[Any]]]] = {
    "clients.sampler": {
        "weighted": {"replace": [True, False]},
        "importance": MEASURED,
        "stratified": {
            **MEASURED,
            "initial_step": [False, True],
            "clustering": ["kmeans", "optics"],
            "strata": [3, 6],
            "allocation": ["proportional", "neyman", "equal"],
            "spread": ["std", "pairwise"],
            "within_stratum": ["uniform", "importance"],
        },
    },
    "clients.sampler.features": {
        "one-step-change": {"probe": PROBES},
        "full-gradient": {"probe": PROBES},
        "compressed-gradient": {
            "probe": PROBES,
            "codebook_size": [2, 9],
            "decompress": [True, False],
        },
    },
    "clients.sampler.clustering": {
        "optics": {
            "outliers": ["nearest", "singletons", "stratum", "drop"],
            "min_samples": [2, 3],
            "xi": [0.05, 0.25],
        }
    },
    "clients.availability": {
        "bernoulli": {"probability": [0.6]},
        "label-group": {"by_label": [[0.9, 0.4]]},
    },
    "samples.sampler": {"ratio": {"ratio": [0.1, 0.7]}},
    "local.optimizer": {"adam": {"epsilon": [0.001]}},
    "local.schedule": {"step": {"every": [1, 2]}},
    "rebalance": {
        True: {"alpha": [0.67, 1.0], "copies": ["ratio", "ratio-minus-one"], "weights": ["augmented", "original"]}
    },
    "server.weights": {name: {"population": ["samples", "clients"]} for name in ("normalized", "unbiased", "literal")},
    "server.optimizer": {
        "sgd": {"lr": [0.05, 1.0]},
        "momentum": {"lr": [0.05, 1.0]},
        **{name: {"lr": [0.05]} for name in ("adagrad", "adam", "yogi")},
    },
    "compression": {
        "top-k": {"fraction": [0.2], "error_feedback": [False, True]},
        "float16": {"error_feedback": [False, True]},
    },
    "devices": {True: {"speed": ["constant", "lognormal", "classes"], "upload": ["constant", "lognormal"]}},
    "devices.speed": {"classes": {"rates": [[100.0, 1000.0]], "shares": [[0.3, 0.7]]}},
}
"""Options by component: key → name → option → values."""
LOSSES: list[dict[str, Any]] = [
    {},
    {},
    {"task.loss": "label-smoothing", "task.loss.smoothing": 0.2},
    {"task.loss": "focal"},
    {"task.loss": "tests.tasks.own_losses:squared", "task.loss.scale": 2.0},
]
FIXED = {"logging.tensorboard": False, "checkpoint.every": 0, "cluster.threads": 1}
ALGORITHMS = ("scaffold", "feddyn", "fednova")


def drawn_stars(count: int, seed: int, with_state: bool = False) -> list[Config]:
    """Return different stars that fedmpi accepts; `with_state`: with local algorithms other than the plain one."""
    generator, found = np.random.Generator(np.random.Philox(seed)), {}
    while len(found) < count:
        config = _drawn(generator, len(found), ALGORITHMS[len(found) % 3] if with_state else "plain")
        if config is not None:
            found[str(config_table(config))] = config
    return list(found.values())


def _drawn(generator: np.random.Generator, seed: int, algorithm: str) -> Config | None:
    flat: dict[str, Any] = {"seed": seed, "rounds": 3, **FIXED}
    waiting = sorted(CHOICES.items())
    while waiting:
        key, values = waiting.pop(0)
        value = values[generator.integers(len(values))]
        if value is not None:
            flat[key] = value
            options = {} if isinstance(value, list) else OPTIONS.get(key, {}).get(value, {})
            waiting += [(f"{key}.{name}", choices) for name, choices in sorted(options.items())]
    flat |= MODELS[generator.integers(len(MODELS))] | LOSSES[seed % len(LOSSES)]
    for changes in _adapted(flat, seed, algorithm):
        for key, value in changes.items():
            for name in [name for name in flat if name == key or name.startswith(f"{key}.")]:
                del flat[name]
            if value is not None:
                flat[key] = value
    while True:
        try:
            return build_config([("drawn", flat)])
        except UserError as error:
            key, _, reason = str(error).partition(" (from drawn) ")
            if not reason.startswith("has no effect"):
                return None
            del flat[key]


def _adapted(flat: dict[str, Any], seed: int, algorithm: str) -> Any:
    """Yield changes that make rare combinations valid, and those that keep rounding from being magnified."""
    if flat["local.engine"] == "merged":
        yield {"local.steps": 1, "local.optimizer": "sgd", "local.epochs": None}
    if flat["compression"] != "none":  # adaptive steps magnify a value that is rounded the other way
        yield {"server.optimizer": ["sgd", "momentum"][seed % 2]}
    if flat["compression"] == "top-k":  # few samples, and dark pixels, have gradients that are exactly equal
        yield {"data.source": IID, "samples.sampler": "all"}
        if "clients.sampler.features.probe" in flat:
            yield {"clients.sampler.features.probe": "full"}
    if flat["server.optimizer"] == "yogi" or flat["compression"] == "top-k":
        # Rounding in float32 can turn Yogi's sign, and the order of two values at the border of the largest ones.
        yield {"model": DOUBLE, "data.normalize": False}
    if flat["model"].endswith("batch_norm_mlp"):  # it fails on a batch of one sample
        yield {"data.source": IID, "samples.sampler": "all", "local.batch_size": "all"}
        if "clients.sampler.features.probe" in flat:
            yield {"clients.sampler.features.probe": "full"}
    if algorithm != "plain":
        yield {"local.algorithm": algorithm, "local.optimizer": "sgd", "compression": "none", "privacy.clip_norm": None}
        yield {"logging.diagnostics": False}
        if algorithm != "fednova":
            yield {"local.proximal_mu": 0.0}
        if algorithm == "feddyn":
            yield {"server.optimizer": "sgd", "server.weights": "uniform"}
    if "privacy.clip_norm" in flat:
        yield {"server.weights": "uniform"}
