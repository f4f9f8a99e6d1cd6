"""Random stars over all parts, for the plain loop to replay: three rounds each, small enough to take a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ValidationError

from fedmpi import Config, UserError
from fedmpi.config import build_config, config_table

MODELS: list[dict[str, Any]] = [
    {"name": "mlp", "hidden": [12], "activation": "tanh"},
    {"name": "mlp", "hidden": [10], "dropout": 0.25, "activation": "sigmoid"},
    {"name": "mlp", "hidden": [10], "dropout": 0.3, "activation": "gelu"},
    {"name": "tests.mpi.user_models:dropout_mlp", "width": 12},
    {"name": "tests.reference.networks:batch_norm_mlp", "width": 10},
]
"""All smooth: a rounding can switch a ReLU on or off."""
DOUBLE = "tests.reference.networks:double_perceptron"
DATA = ["digits:clients=14,alpha=0.4", "digits:clients=9,partition=iid", "digits:clients=30,alpha=0.1,seed=3"]
CHOICES: dict[str, dict[str, list[Any]]] = {
    "server.weights": ["samples", "uniform", "gradient-sum", "stratified", "normalized", "unbiased", "literal"],
    "server.weights.population": ["samples", "clients"],
    "server.optimizer": ["sgd", "momentum", "adagrad", "adam", "yogi"],
    "server.optimizer.lr": [0.05, 1.0],
    "server.exact": [False, False, False, True],
    "cluster": {
        "reduction": ["auto", "window", "allreduce"],
        "threads": [1],
    },
    "data": {"source": DATA, "normalize": [True, True, False]},
    "evaluation": {
        "every": [1, 1, 2],
        "batch_size": [100, 2000],
    },
    "local": {
        "optimizer": ["sgd", "sgd", "sgd", "adam"],
        "lr": [0.02],
        "schedule": ["constant", "inverse", "cosine", "step"],
        "epochs": [None, 1, 2],
        "steps": [None, 1, 3],
        "batch_size": [8, 20, "all"],
        "proximal_mu": [0.0, 0.2],
        "engine": ["auto", "auto", "sequential", "merged", "batched"],
        "schedule.every": [1, 2],
        "optimizer.epsilon": [0.001],
    },
    "logging": {
        "diagnostics": [False, False, True],
    },
    "clients": {
        "sampler": ["all", "uniform", "weighted", "importance", "stratified", "stratified", "stratified"],
        "count": [4, 7, None],
        "fraction": [None, 0.5],
        "sampler.replace": [True, False],
        "sampler.features": ["one-step-change", "full-gradient", "compressed-gradient", "label-histogram"],
        "sampler.features.codebook_size": [2, 9],
        "sampler.features.decompress": [True, False],
        "sampler.features.probe": ["full", "batch", "sample"],
        "sampler.refresh": [0, 1],
        "sampler.refresh_clients": ["all", "participants"],
        "sampler.initial_step": [False, True],
        "sampler.clustering": ["kmeans", "optics"],
        "sampler.strata": [3, 6],
        "sampler.clustering.outliers": ["nearest", "singletons", "stratum", "drop"],
        "sampler.projection_above": [20000000, 1000],
        "sampler.allocation": ["proportional", "neyman", "equal"],
        "sampler.spread": ["std", "pairwise"],
        "sampler.within_stratum": ["uniform", "importance"],
        "sampler.design": ["systematic", "sequential"],
        "sampler.clustering.min_samples": [2, 3],
        "sampler.clustering.xi": [0.05, 0.25],
    },
    "privacy": {
        "clip_norm": [None, None, None, 0.05],
        "noise_multiplier": [0.0, 0.1],
    },
    "rebalance": [False, False, True],
    "rebalance.alpha": [0.67, 1.0],
    "rebalance.copies": ["ratio", "ratio-minus-one"],
    "rebalance.weights": ["augmented", "original"],
    "samples": {
        "sampler": ["all", "bernoulli", "ratio", "exact"],
        "budget": [60, 400],
        "sampler.ratio": [0.1, 0.7],
        "size.estimate": ["exact", "randomized-response", "duchi", "piecewise"],
        "size.epsilon": [0.5, 3.0],
        "size.max_size": [40, 121, 200],
        "size.clip": [True, False],
        "size.query": ["all", "participants"],
        "size.reuse_reports": [False, True],
    },
    "cluster.server_trains": ["auto", "auto", "always"],
    "clients.availability": ["always", "always", "bernoulli", "time-of-day", "label-group"],
    "clients.availability.probability": [0.6],
    "clients.availability.lowest": [0.3],
    "clients.availability.by_label": [[0.9, 0.4]],
    "clients.failure_rate": [0.0, 0.0, 0.3],
    "clients.over_selection": [1.0, 1.5],
    "devices": [False, True],
    "devices.speed": ["constant", "lognormal", "classes"],
    "devices.speed.rates": [[100.0, 1000.0]],
    "devices.speed.shares": [[0.3, 0.7]],
    "devices.bandwidth_sigma_XXX": [0.0, 1.0],
    "clients.availability.period": [2.0],
    "topology": ["star", "star", "star", "mediators"],
    "topology.clients_per_mediator": [1, 3],
    "topology.epochs": [1, 2],
    "topology.regroup": ["every-round", "static"],
    "topology.scheduling": ["greedy", "exchange", "random"],
    "topology.target": ["uniform", "test"],
    "cluster.placement": ["owner", "auto", "shared"],
    "topology.keep_optimizer": [False, True],
    "compression": ["float32", "float32", "float32", "topk", "float16"],
    "compression.fraction": [0.2],
    "compression.error_feedback": [False, True],
}
"""Values of each key; `None` leaves the key out."""
LOSSES: list[dict[str, Any]] = [
    {},
    {},
    {"loss": "label-smoothing", "smoothing": 0.2},
    {"loss": "focal"},
    {"loss": "tests.tasks.own_losses:squared", "scale": 2.0},
]
FIXED = {
    "logging.tensorboard": False,
    "checkpoint.every": 0,
    "cluster.threads": 1,
    "topology": "star",
    "local.precision": "float32",
}


ALGORITHMS = ("scaffold", "feddyn", "fednova")


def drawn_stars(count: int, seed: int, with_state: bool = False) -> list[Config]:
    """`count` different stars that fedmpi accepts; `with_state`: their local algorithms are not the plain one."""
    generator, found = np.random.Generator(np.random.Philox(seed)), {}
    while len(found) < count:
        config = _drawn(generator, len(found), ALGORITHMS[len(found) % 3] if with_state else "plain")
        if config is not None:
            found[str(config_table(config))] = config
    return list(found.values())


def _drawn(generator: np.random.Generator, seed: int, algorithm: str) -> Config | None:
    table: dict[str, Any] = {"seed": seed, "rounds": 3}
    for part, keys in sorted(CHOICES.items()):
        values = {key: choices[generator.integers(len(choices))] for key, choices in sorted(keys.items())}
        table[part] = {key: value for key, value in values.items() if value is not None}
    table["model"] = MODELS[generator.integers(len(MODELS))]
    table["task"] = LOSSES[seed % len(LOSSES)]
    if table["local"]["engine"] == "merged":
        table["local"] |= {"steps": 1, "optimizer": "sgd"}
        table["local"].pop("epochs", None)
    if table["aggregation"]["optimizer"] in ("adagrad", "adam", "yogi"):
        table["aggregation"]["lr"] = 0.05
    if table["transport"]["kind"] != "float32":  # adaptive steps magnify a value that is rounded the other way
        table["aggregation"]["optimizer"] = ["sgd", "momentum"][seed % 2]
    if table["transport"]["kind"] == "topk":  # few samples, and dark pixels, have gradients that are exactly alike
        table["data"], table["samples"] = {"shards": "digits:clients=9,partition=iid"}, {"rule": "all"}
    if table["aggregation"]["optimizer"] == "yogi" or table["transport"]["kind"] == "topk":
        # A rounding in float32 can turn Yogi's sign, and the order of two values at the border of the largest ones.
        table["model"], table["data"]["normalize"] = {"name": DOUBLE}, False
    if table["model"]["name"].endswith("batch_norm_mlp"):  # which fails on a batch of one sample
        table["data"] = {"shards": "digits:clients=9,partition=iid"}
        table["samples"], table["local"]["batch_size"] = {"rule": "all"}, "all"
        table["participation"]["probe"] = "full"
    if algorithm != "plain":
        table["local"] |= {"algorithm": algorithm, "optimizer": "sgd"}
        table["transport"], table["privacy"], table["logging"] = {"kind": "float32"}, {}, {}
        if algorithm != "fednova":
            table["local"]["proximal_mu"] = 0.0
        if algorithm == "feddyn":
            table["aggregation"] |= {"optimizer": "sgd", "lr": 1.0, "weights": "uniform"}
    if "clip_norm" in table["privacy"]:
        table["aggregation"]["weights"] = "uniform"
    for key, value in FIXED.items():
        part, name = key.split(".")
        table.setdefault(part, {})[name] = value
    try:
        return build_config([("drawn", config_table(Config.exactly(table)))])
    except (ValidationError, UserError):
        return None
