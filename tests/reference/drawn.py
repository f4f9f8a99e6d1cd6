"""Random stars over all parts, for the plain loop to replay: three rounds each, small enough to take a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ValidationError

from fedmpi import Config, UserError
from fedmpi.config import build_config, config_table
from tests.end_to_end.combinations import CHOICES, Choices

MODELS: list[dict[str, Any]] = [
    {"name": "mlp", "hidden": [12], "activation": "tanh"},
    {"name": "mlp", "hidden": [10], "dropout": 0.25, "activation": "sigmoid"},
    {"name": "mlp", "hidden": [10], "dropout": 0.3, "activation": "gelu"},
    {"name": "tests.mpi.user_models:dropout_mlp", "width": 12},
    {"name": "tests.reference.batch_norm:batch_norm_mlp", "width": 10},
]
"""All smooth: a rounding can switch a ReLU on or off."""
DOUBLE = "tests.reference.double_model:double_perceptron"
ELSEWHERE: Choices = {
    "clients": {
        "sampler.clustering.outliers": ["nearest", "singletons", "stratum", "drop"],
        "sampler.clustering.min_samples": [2, 3],
        "sampler.clustering.xi": [0.05, 0.25],
    },
    "samples": {"budget": [60, 400], "size.max_size": [40, 121, 200]},
    "local": {
        "optimizer": ["sgd", "sgd", "sgd", "adam"],
        "lr": [0.02],
        "schedule.every": [1, 2],
        "optimizer.epsilon": [1e-3],
    },
    "cluster": {"placement": ["owner", "auto", "shared"]},
    "compression": ["float32", "float32", "float32", "topk", "float16"],
    "compression.fraction": [0.2],
    "compression.error_feedback": [False, True],
    "evaluation": {"every": [1, 1, 2], "batch_size": [100, 2000]},
    "rebalance": [False, False, True],
    "rebalance.weights": ["augmented", "original"],
    "rebalance.alpha": [0.67, 1.0],
    "rebalance.copies": ["ratio", "ratio-minus-one"],
    "clients.over_selection": [1.0, 1.5],
    "devices": [False, True],
    "clients.availability.period": [2.0],
}
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
    for part in sorted(CHOICES.keys() | ELSEWHERE.keys()):
        keys = CHOICES.get(part, {}) | ELSEWHERE.get(part, {})
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
