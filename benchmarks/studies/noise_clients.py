"""Distance of FedSSO's mean update from that of all clients, by the treatment of clients that OPTICS calls noise:

    python -m benchmarks.studies.noise_clients --seeds 8 --rounds 600

The digits are partitioned among clients of unequal kinds. A client's update is its full gradient, at the initial model
or at the model after ten rounds of FedAvg with all clients. A run's planner draws the cohorts. Their weighted sums are
compared with the mean update of all clients, Σ n_k/n Δ_k, in units of its length. The bias is the length of the mean
error over the rounds, without its sampling noise. The error is the root mean square over single rounds. Clients are
always available, or with the probability of their most frequent class, 0.1 … 1.0. ± is half the 95 % confidence
interval over seeds; every seed has its own partition, initial model and draws.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn.utils import parameters_to_vector

import fedmpi
from benchmarks.measure import table
from fedmpi.common.types import Floats
from fedmpi.config import load_config
from fedmpi.core.experiment import Experiment
from fedmpi.results.comparison import paired

PARTITIONS = {
    "24 clients, two classes each": "pathological --classes-per-client 2 --clients 24",
    "100 clients, two classes each": "pathological --classes-per-client 2 --clients 100",
    "50 clients, Dirichlet(0.3)": "dirichlet --alpha 0.3 --clients 50",
}
AVAILABILITY = {
    "all": (),
    "by class": ("clients.availability=label-group", f"clients.availability.by_label={[k / 10 for k in range(1, 11)]}"),
}
NOISE = ("stratum", "singletons", "nearest", "drop")
METHODS = {noise: ("preset=fedsso", f"clients.sampler.clustering.outliers={noise}") for noise in NOISE} | {
    "no noise: k-means, H = 10": ("preset=fedsso", "clients.sampler.clustering=kmeans"),
    "stratum, unbiased weights": (
        "preset=fedsso",
        "server.weights=unbiased",
        "clients.sampler.clustering.outliers=stratum",
    ),
    "FedAvg": ("preset=fedavg",),
}
MODEL = {"model.hidden": [32], "cluster.threads": 1, "local.engine": "sequential"}
QUIET = ("model.hidden=[32]", "cluster.threads=1")


def products(experiment: Experiment, model: Tensor) -> Floats:
    """Return the inner products (N, N) of the clients' full gradients at a model."""
    clients = np.arange(len(experiment.data.sizes), dtype=np.int64)
    gradients = np.zeros((len(clients), experiment.model.trainable))
    for members, block in experiment.decisions.stratifier.probe(0, model, clients):
        gradients[members] = block.numpy()
    return gradients @ gradients.T


def deviations(experiment: Experiment, rounds: int) -> Floats:
    """Return each client's weight in a round minus its weight among all clients, (rounds, N)."""
    decisions, sizes = experiment.decisions, experiment.data.sizes
    found = np.tile(-sizes / sizes.sum(), (rounds, 1))
    for t in range(1, rounds + 1):
        plan = decisions.planner.plan(t, decisions.stratifier.strata)
        c = plan.coefficients * sizes[plan.clients] ** plan.per_sample
        found[t - 1, plan.clients] += c / c.sum() if plan.normalize and c.size else c
    return found


def bias_and_error(wrong: Floats, inner: Floats, sizes: Floats) -> tuple[float, float]:
    """Return both in units of the mean update's length."""
    rounds, mean = len(wrong), wrong.mean(axis=0)
    length, square = sizes @ inner @ sizes / sizes.sum() ** 2, float((wrong @ inner * wrong).sum(axis=1).mean())
    bias = (mean @ inner @ mean - square / rounds) * rounds / (rounds - 1)
    return float(np.sqrt(max(bias, 0) / length)), float(np.sqrt(square / length))


def measured(folder: Path, seed: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return bias and error at the initial and at the trained model, by availability and method."""
    trained = fedmpi.run(
        "fedavg",
        MODEL | {"seed": seed, "rounds": 10, "clients.sampler": "all", "local.lr": 0.1},
        data=str(folder),
    )
    inner: list[Floats] = []
    found = {}
    for name, away in AVAILABILITY.items():
        for method, settings in METHODS.items():
            run = [f"data.source={folder}", f"seed={seed}", f"rounds={rounds + 1}", "clients.count=10"]
            experiment = Experiment.connect(load_config(None, [*run, *QUIET, *settings, *away]))
            if not inner:
                vector = parameters_to_vector(trained.model.parameters()).detach()
                inner = [products(experiment, w) for w in (experiment.model.initial, vector)]
            experiment.decisions.observe(0, experiment.model.initial)
            wrong = deviations(experiment, rounds)
            sizes = experiment.data.sizes.astype(np.float64)
            found[name, method] = [value for one in inner for value in bias_and_error(wrong, one, sizes)]
            if method == "drop":
                labels = experiment.decisions.stratifier.strata.labels  # type: ignore[union-attr]
                found[name, "noise clients"] = [float((labels < 0).mean())]
            experiment.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="partitions, each with its own model and draws")
    parser.add_argument("--rounds", type=int, default=600, help="rounds drawn of each")
    asked = parser.parse_args()
    lines = []
    for partition, words in PARTITIONS.items():
        runs = []
        for seed in range(asked.seeds):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "shards"
                options = f"digits --partition {words} --seed {seed} --shards 1 --out {folder}"
                subprocess.run([sys.executable, "-m", "data_prep", *options.split()], check=True, capture_output=True)
                runs.append(measured(folder, seed, asked.rounds))
        noise = 100 * np.mean([run["all", "noise clients"] for run in runs])
        for name, method in [key for key in runs[0] if key[1] != "noise clients"]:
            values, stratum = (100 * np.array([run[name, one] for run in runs]).T for one in (method, NOISE[0]))
            cells = [f"{partition}, {noise:.0f} % noise", name, method]
            for model in (0, 2):
                less = "" if method == NOISE[0] else shown(values[model] - stratum[model], "+")
                cells += [shown(values[model]), less, shown(values[model + 1])]
            lines.append(cells)
    measures = ("bias", "against stratum", "error")
    print(table(["clients", "available", "noise", *measures, *(f"trained: {name}" for name in measures)], lines))


def shown(values: Floats, sign: str = "") -> str:
    """Return mean and half the confidence interval as text."""
    mean = paired(values.tolist(), [0.0] * len(values))
    return f"{mean.mean:{sign}.1f} ± {mean.high - mean.mean:.1f}"


if __name__ == "__main__":
    main()
