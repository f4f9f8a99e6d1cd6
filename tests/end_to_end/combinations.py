"""Random configurations over all parts, and a program that runs many of them in one job:

mpiexec -n N python tests/end_to_end/combinations.py CONFIGURATIONS OUT.npz
"""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedmpi import Config, UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.config import build_config, config_table
from fedmpi.core.experiment import Experiment
from fedmpi.core.loop import Simulation
from fedmpi.process.exit_codes import run_guarded
from tests.mpi.trace import Tracer
from tests.quick_end import end_quickly

Choices = dict[str, dict[str, list[Any]]]

DATA = ["digits:clients=14,alpha=0.4", "digits:clients=9,partition=iid", "digits:clients=30,alpha=0.1,seed=3"]
CHOICES: Choices = {
    "data": {"source": DATA, "normalize": [True, True, False]},
    "model": {"name": ["mlp", "tests.mpi.user_models:dropout_mlp"]},
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
        "sampler.clustering.outliers": ["nearest", "singletons", "stratum"],
        "sampler.projection_above": [20_000_000, 1000],
        "sampler.allocation": ["proportional", "neyman", "equal"],
        "sampler.spread": ["std", "pairwise"],
        "sampler.within_stratum": ["uniform", "importance"],
        "sampler.design": ["systematic", "sequential"],
    },
    "samples": {
        "sampler": ["all", "bernoulli", "ratio", "exact"],
        "budget": [60, 400],
        "sampler.ratio": [0.1, 0.7],
        "size.estimate": ["exact", "randomized-response", "duchi", "piecewise"],
        "size.epsilon": [0.5, 3.0],
        "size.max_size": [40, 200],
        "size.clip": [True, False],
        "size.query": ["all", "participants"],
        "size.reuse_reports": [False, True],
    },
    "local": {
        "optimizer": ["sgd", "sgd", "adam"],
        "lr": [0.01],
        "schedule": ["constant", "inverse", "cosine", "step"],
        "epochs": [None, 1, 2],
        "steps": [None, 1, 3],
        "batch_size": [8, 20, "all"],
        "proximal_mu": [0.0, 0.2],
        "engine": ["auto", "auto", "sequential", "merged", "batched"],
    },
    "topology": ["star", "star", "star", "mediators"],
    "topology.clients_per_mediator": [1, 3],
    "topology.epochs": [1, 2],
    "topology.regroup": ["every-round", "once"],
    "topology.scheduling": ["greedy", "exchange", "random"],
    "topology.target": ["uniform", "test"],
    "cluster.placement": ["owner", "mediator"],
    "topology.keep_optimizer": [False, True],
    "rebalance": [False, False, True],
    "rebalance.alpha": [0.67, 1.0],
    "rebalance.copies": ["ratio", "ratio-minus-one"],
    "server.weights": ["samples", "uniform", "gradient-sum", "stratified", "normalized", "unbiased", "literal"],
    "server.weights.population": ["samples", "clients"],
    "server.optimizer": ["sgd", "momentum", "adagrad", "adam", "yogi"],
    "server.optimizer.lr": [0.05, 1.0],
    "server.exact": [False, False, False, True],
    "privacy": {"clip_norm": [None, None, None, 0.05], "noise_multiplier": [0.0, 0.1]},
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
    "cluster.server_trains": ["auto", "auto", "always"],
    "cluster": {"reduction": ["auto", "window", "allreduce"], "threads": [1]},
    "logging": {"diagnostics": [False, False, True]},
}
SHARED = [{}, {"placement": "auto"}, {"placement": "auto", "balance": "measured"}]
"""How the cohorts of stars that keep no data to themselves are spread; drawn from a stream of its own."""
MODEL_OPTIONS = {"mlp": {"hidden": [12], "activation": "tanh"}, "tests.mpi.user_models:dropout_mlp": {"width": 12}}


def valid_configurations(count: int, seed: int = 0) -> list[Config]:
    """`count` different configurations that fedmpi accepts, drawn from all parts."""
    generator = Streams(seed).generator(Purpose.PARTITION)
    spreading = Streams(seed).generator(Purpose.PARTITION, round=1)
    found: dict[str, Config] = {}
    while len(found) < count:
        config = _drawn(generator, SHARED[spreading.integers(len(SHARED))], seed=len(found))
        if config is not None:
            found[str(config_table(config))] = config
    return list(found.values())


def _drawn(generator: np.random.Generator, shared: dict[str, str], seed: int) -> Config | None:
    table: dict[str, Any] = {"seed": seed, "rounds": 2}
    for part, keys in CHOICES.items():
        drawn = {key: values[generator.integers(len(values))] for key, values in keys.items()}
        table[part] = {key: value for key, value in drawn.items() if value is not None}
    table["model"] |= MODEL_OPTIONS[table["model"]["name"]]
    if table["topology"]["kind"] == "mediators":  # their conditions are so narrow that few drawn at random fit them
        table["aggregation"]["weights"], table["privacy"], table["logging"] = "samples", {}, {}
    elif table["topology"]["placement"] == "owner":
        table["topology"] |= shared
    if table["local"]["engine"] == "merged":
        table["local"] |= {"steps": 1, "optimizer": "sgd"}
        table["local"].pop("epochs", None)
    if table["aggregation"]["optimizer"] in ("adagrad", "adam", "yogi"):
        table["aggregation"]["lr"] = 0.05  # at 1 they magnify the rounding of the sum beyond what is compared
    if table["aggregation"]["optimizer"] == "yogi":  # a rounding can turn its sign
        table["aggregation"]["exact"], table["local"]["engine"] = True, "auto"
    own = Streams(seed).generator(Purpose.PARTITION, 1)  # leaves the other draws as they are
    if own.random() < 0.3:
        table["cluster"]["reduction"] = "device"
    if table["aggregation"]["exact"] and own.random() < 0.5:  # elsewhere it magnifies the sum's rounding too much
        table["local"]["precision"] = "bfloat16"
    if "clip_norm" in table["privacy"]:
        table["aggregation"]["weights"] = "uniform"
        if not _bounds_one_client(table):
            table["privacy"].pop("noise_multiplier")
    if table["aggregation"]["weights"] == "unbiased":
        table["system"]["over_selection"] = 1.0  # clients of unlike sizes: who arrives first is no matter of the draw
    try:
        pruned = config_table(Config.exactly(table))  # without the keys that mean nothing beside the others
        return build_config([("drawn", pruned)])
    except (ValidationError, UserError):
        return None


def _bounds_one_client(table: dict[str, Any]) -> bool:
    """Whether noise goes with the other choices: no client's data changes more than its own update."""
    sizes = table["samples"]
    rows = sizes["rule"] in ("all", "ratio")
    private = sizes["rule"] == "bernoulli" and sizes["size_estimate"] != "exact" and sizes["clip"]
    drawn = table["participation"]["clients"] in ("all", "uniform")
    return drawn and (rows or private) and not table["rebalance"]["enabled"]


def traced(config: Config) -> dict[str, np.ndarray] | None:
    """Cohorts, rows, records and the final model of a run; None on other ranks and for a refused engine."""
    try:
        experiment = Experiment.connect(config)
    except UserError as refusal:
        assert str(refusal).startswith("local.engine"), refusal
        return None
    tracer, records = Tracer(experiment), []

    def check_record(record: dict[str, Any]) -> None:
        """Without times, and without scores, of which a rounding can turn whole samples."""
        scores = [key for key in record if key.startswith(("test_", "val_"))]
        records.append({key: record[key] for key in record if key not in ("seconds", "phase_seconds", *scores)})

    simulation = Simulation(experiment, on_round=check_record)
    assert simulation.run() == "finished"
    flat = np.array(sorted(row for rows in tracer.rows for row in rows), np.int64).reshape(-1, 3)
    gathered = experiment.cluster.gather(flat)
    trace = None
    if gathered is not None:
        rows = np.concatenate([part.reshape(-1, 3) for part in gathered])
        trace = {
            "cohorts": np.concatenate(tracer.cohorts),
            "facts": np.array(tracer.facts),
            "records": np.array(json.dumps(records)),
            "rows": rows[np.lexsort(rows.T[::-1])],
            "model": simulation.model.cpu().numpy(),
        }
    experiment.close()
    return trace


def main() -> int:
    logging.getLogger("fedmpi").setLevel(logging.ERROR)
    drawn, out = Path(sys.argv[1]), Path(sys.argv[2])
    traces: dict[str, np.ndarray] = {}
    for number, config in pickle.loads(drawn.read_bytes()).items():
        found = traced(config)
        if found is not None:
            traces |= {f"{key}{number}": value for key, value in found.items()}
    if traces:
        np.savez(out, **traces)
    return 0


if __name__ == "__main__":
    end_quickly()
    run_guarded(main)
