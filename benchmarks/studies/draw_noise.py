"""Bias and noise of FedSTS's update with stratified and with unbiased weights, in closed form, as Markdown:

    fedmpi sweep jobs/experiments/fedstas-parts.toml --out runs/fedstas-parts
    python -m benchmarks.studies.draw_noise runs/fedstas-parts/FedSTS,seed=0 runs/fedstas-parts/FedSTS,seed=1 …

Every folder is a run of the preset fedsts with as many strata as clients per round, plain SGD steps and images in
[0, 1]. Each stratum h then sends one
client k, drawn with probability π_k = ‖Z_k‖ / Σ_{j ∈ h} ‖Z_j‖. From the run's last model every client takes its local
steps once more. With Δ_k its update and ρ = 1/N, the round's update has

    stratified weights   Σ_h N_h ρ Δ_k        bias Σ_h N_h ρ (Σ_k π_k Δ_k − mean_h)
    unbiased weights     Σ_h ρ Δ_k / π_k      bias 0

and a variance that is the sum of the strata's. Both are divided by the squared norm of the mean over all clients.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.measure import table
from fedmpi import load_run
from fedmpi.clients.features import compress, norms, restore
from fedmpi.clients.stratifier import kmeans
from fedmpi.common.types import Floats, Ints
from fedmpi.config.stratification import CompressedGradient, stratification
from fedmpi.data.opening import open_store
from fedmpi.results.comparison import paired


def moments(updates: Floats, strata: Ints, lengths: Floats, unbiased: bool) -> tuple[float, float]:
    """Return squared bias and variance of the round's update, in units of ‖mean‖²."""
    mean, expected, variance = updates.mean(axis=0), np.zeros(updates.shape[1]), 0.0
    for stratum in range(strata.max() + 1):
        members = np.flatnonzero(strata == stratum)
        chance = lengths[members] / lengths[members].sum()
        weight = 1 / chance if unbiased else np.full(members.size, float(members.size))
        sent = updates[members] * (weight / strata.size)[:, None]
        middle = chance @ sent
        expected += middle
        variance += float(chance @ (sent**2).sum(axis=1) - middle @ middle)
    scale = float(mean @ mean)
    return float(((expected - mean) ** 2).sum()) / scale, variance / scale


def measured(folder: str) -> tuple[Floats, Ints, Floats]:
    """Return updates (N, d), strata (N,) and norms (N,) at a run's last model."""
    run = load_run(folder)
    clients, local, network = run.config.clients, run.config.local, run.model
    grouping, draw = stratification(run.config), clients.sampler.options["within_stratum"]
    assert grouping.strata == clients.count and draw == "importance", "one client per stratum, drawn by norm"
    assert isinstance(grouping.features, CompressedGradient)
    assert local.steps is not None and isinstance(local.batch_size, int), "a number of steps on whole batches"
    store, start = (
        open_store(run.config.data.source.choice, run.config.data.source.options),
        parameters_to_vector(network.parameters()).detach().clone(),
    )
    generator = np.random.default_rng(run.config.seed)
    gradients, updates = [], []
    for client in range(store.clients):
        rows, labels = store.client(client)
        x, y = torch.as_tensor(np.asarray(rows, np.float32) / 255), torch.as_tensor(np.asarray(labels, np.int64))
        vector_to_parameters(start.clone(), network.parameters())
        slope = torch.autograd.grad(cross_entropy(network(x), y), list(network.parameters()))
        gradients.append(torch.cat([one.flatten() for one in slope]).numpy())
        order = generator.permutation(len(y))
        for step in range(local.steps):
            batch = order[step * local.batch_size : (step + 1) * local.batch_size]
            slope = torch.autograd.grad(cross_entropy(network(x[batch]), y[batch]), list(network.parameters()))
            with torch.no_grad():
                for value, gradient in zip(network.parameters(), slope, strict=True):
                    value.sub_(local.lr * gradient)
        updates.append((parameters_to_vector(network.parameters()).detach() - start).double().numpy())
    codes = compress(np.stack(gradients), grouping.features.codebook_size)
    strata = kmeans(restore(codes), grouping.strata, generator)
    assert strata.max() + 1 == clients.count, f"{folder}: {strata.max() + 1} strata at the last model"
    return np.stack(updates), strata, norms(codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, one a seed")
    found = [measured(folder) for folder in parser.parse_args().runs]
    kinds = {"stratified": False, "unbiased": True}
    both = {kind: np.array([moments(*one, unbiased=which) for one in found]) for kind, which in kinds.items()}
    rows = []
    for kind, values in both.items():
        shown = np.column_stack([values, values.sum(axis=1)]).T
        rows.append([kind, *(f"{v.mean():.3f} ± {v.std(ddof=min(1, len(v) - 1)):.3f}" for v in shown)])
    print(table([f"{len(found)} seeds", "squared bias", "variance", "both"], rows))
    if len(found) > 1:
        gap = paired(both["unbiased"].sum(axis=1), both["stratified"].sum(axis=1))
        print(f"\nunbiased − stratified, both: {gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]")


if __name__ == "__main__":
    main()
