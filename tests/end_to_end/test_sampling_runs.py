"""The sampling systems as whole runs: FedSampling beside centralised training, FedSSO's opening, stale gradients,
diagnostics, the virtual clock, resumption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from fedmpi import UserError
from fedmpi.updates.traffic import compressed_probes, star_models
from tests.end_to_end.in_process import Run, run, run_into
from tests.end_to_end.runs import curve

DIGITS = "data.source=digits:clients=12,alpha=0.4"
SMALL = (DIGITS, "model.hidden=[8]")


def full_gradient_step(one: Run, lr: float) -> torch.Tensor:
    """w_0 − η ∇F(w_0) on the pooled data, by autograd."""
    experiment = one.experiment
    parts = [experiment.data.load(client) for client in range(len(experiment.data.sizes))]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    values = one.start.clone()
    experiment.model.bind(values)
    experiment.model.module.train()
    gradients = torch.autograd.grad(cross_entropy(experiment.model.module(x), y), experiment.model.parameters)
    return one.start - lr * torch.cat([gradient.flatten() for gradient in gradients])


@pytest.fixture(scope="module")
def curves() -> dict[str, np.ndarray]:
    """Test losses of five seeds after each of 60 rounds, (5, 60), with 144 samples a round of 20 uneven clients."""
    systems = {
        "centralized": ("preset=centralized",),
        "fedsampling": ("preset=fedsampling", "samples.size.estimate=exact"),
        "clipped": ("preset=fedsampling", "samples.size.max_size=40", "samples.size.epsilon=8"),
    }
    common = ("samples.budget=144", "rounds=60", "server.optimizer.lr=0.3", "model.hidden=[16]")
    shards = "data.source=digits:clients=20,alpha=0.3"
    return {
        name: np.stack([run(*parts, *common, shards, f"seed={seed}", evaluate=True).test_losses for seed in range(5)])
        for name, parts in systems.items()
    }


def largest_gap(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference of the mean curves, in standard deviations over the seeds."""
    spread = np.sqrt((one.var(0, ddof=1) + other.var(0, ddof=1)) / 2)
    return float((np.abs(one.mean(0) - other.mean(0)) / spread).max())


@pytest.mark.slow
def test_fedsampling_with_exact_sizes_learns_as_centralised_training_does(curves: dict[str, np.ndarray]):
    """Paired t-tests, by seed, of the mean of the whole curve and of its last ten rounds, 1e-4 each: false alarm 2e-4.

    No round's mean curves differ by more than three standard deviations over the seeds. Clipped sizes, which make the
    batches larger than asked, are told apart by the same measures.
    """
    central, federated, clipped = curves["centralized"], curves["fedsampling"], curves["clipped"]
    for part in (slice(None), slice(-10, None)):
        assert stats.ttest_rel(central[:, part].mean(1), federated[:, part].mean(1)).pvalue > 1e-4
    assert largest_gap(central, federated) < 3 < largest_gap(central, clipped)
    assert stats.ttest_rel(central.mean(1), clipped.mean(1)).pvalue < 1e-3


@pytest.mark.parametrize("system", [(), ("clients.availability=bernoulli", "clients.availability.probability=1.0")])
def test_fedsso_opens_with_one_step_of_every_client(system: tuple[str, ...]):
    """Algorithm 1, lines 1-3: w_1 = Σ ρ_k (w_0 − η_0 ∇F_k(w_0)), and strata from those very steps."""
    one = run("preset=fedsso", *SMALL, "rounds=1", "local.lr=0.2", *system)
    expected = full_gradient_step(one, 0.2)
    assert torch.allclose(one.model, expected, atol=1e-6)
    assert one.records[0]["opening"] and one.records[0]["participants"] == 12
    assert one.records[0]["steps"] == 12 and sum(one.records[0]["stratum_sizes"]) == 12
    two = run("preset=fedsso", *SMALL, "rounds=2", "local.lr=0.01", "clients.fraction=0.5", *system)
    assert "opening" not in two.records[1] and two.records[1]["participants"] == 6
    assert two.records[1]["lr"] == pytest.approx(0.01 / 2)


def test_only_the_last_participants_are_measured_anew_if_so_asked():
    fresh = ("preset=fedsts", *SMALL, "clients.sampler.strata=3", "clients.count=4", "local.lr=0.1", "rounds=3")
    everybody, latest = run(*fresh), run(*fresh, "clients.sampler.refresh_clients=selected")
    size = latest.experiment.model.size
    models = star_models(size, 4, 4)
    for record, probed in zip(latest.records, (12, 4, 4), strict=True):
        assert record["bytes_client_up"] == (models + compressed_probes(probed, size, 9)).client_up
    assert everybody.records[2]["bytes_client_up"] == everybody.records[0]["bytes_client_up"]
    stale = (*fresh, "clients.sampler.refresh_clients=selected", "clients.count=10")
    first, second = (run(*stale, f"rounds={t}").experiment for t in (1, 2))
    assert first.decisions.stratifier.strata and second.decisions.stratifier.strata
    changed = np.flatnonzero(first.decisions.stratifier.strata.norms != second.decisions.stratifier.strata.norms)
    assert np.array_equal(changed, first.decisions.stratifier.latest) and changed[0] == 0


STATEFUL = (
    *SMALL,
    "preset=fedstas-dp",
    "clients.sampler.strata=3",
    "clients.count=4",
    "clients.sampler.refresh_clients=selected",
    "samples.budget=200",
    "samples.size.reuse_reports=true",
    "server.optimizer=momentum",
    "logging.diagnostics=true",
    "devices=true",
    "local.engine=batched",
    "rounds=6",
)


def test_a_run_with_stale_gradients_ledger_and_usage_goes_on_where_it_stopped(tmp_path: Path):
    assert run_into(tmp_path / "whole", *STATEFUL) == 0
    assert run_into(tmp_path / "parts", *STATEFUL, stop_after=3) == 75
    assert run_into(tmp_path / "parts", *STATEFUL, resume=True) == 0
    assert len(curve(tmp_path / "whole")) == 6
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_diagnostics_say_how_evenly_clients_and_samples_are_used():
    exact = ("samples.sampler=exact", "samples.budget=100000", "clients.sampler=all", "server.weights=uniform")
    everything = run(*SMALL, *exact, "local.lr=0.1", "logging.diagnostics=true", "rounds=2").records[1]
    for name in ("clients_used", "client_use_effective", "samples_used", "sample_use_effective"):
        assert everything[name] == pytest.approx(1.0)
    assert everything["sample_use_gini"] == pytest.approx(0.0, abs=1e-12)
    assert everything["inclusion_min"] == everything["inclusion_max"] == 1.0
    bernoulli = ("preset=fedsampling", "samples.budget=100", "samples.size.estimate=exact", "rounds=3")
    few = run(*bernoulli, *SMALL, "logging.diagnostics=true").records
    assert few[0]["samples_used"] == pytest.approx(few[0]["samples"] / 1442)
    assert few[0]["sample_use_effective"] == pytest.approx(few[0]["samples_used"])
    assert few[2]["samples_used"] > few[0]["samples_used"]
    assert few[2]["clients_used"] == 1.0


def test_chances_that_a_sampler_does_not_tell_are_left_out_of_the_diagnostics():
    settings = ("preset=fedavg", *SMALL, "clients.sampler=oort", "clients.count=4", "rounds=1")
    record = run(*settings, "logging.diagnostics=true").records[0]
    assert record["clients_used"] == pytest.approx(4 / 12)
    assert not [name for name in record if name.startswith("inclusion")]


def test_gamma_is_what_clients_gain_on_their_own_data():
    """One client alone: F_k(w) − F_k(w_k) is the fall of the training loss, and there is no drift."""
    five_steps = ("local.lr=0.5", "local.steps=5", "local.batch_size=all", "rounds=2", "logging.diagnostics=true")
    one_client = ("data.source=digits:clients=1,partition=iid", "model.hidden=[8]", "clients.sampler=all")
    alone = run(*one_client, *five_steps)
    first, second = alone.records
    x, y = alone.experiment.data.load(0)
    flat = alone.experiment.model
    flat.module.eval()
    losses = []
    for values in (alone.start, alone.model):
        flat.bind(values)
        losses.append(float(cross_entropy(flat.module(x), y).detach()))
    assert first["gamma"] + second["gamma"] == pytest.approx(losses[0] - losses[1], rel=1e-4)
    assert first["client_drift"] == pytest.approx(0.0, abs=1e-6)
    assert first["gradient_diversity"] == pytest.approx(1.0, rel=1e-4)
    many = run("preset=fedavg", *SMALL, "clients.count=6", "local.lr=0.1", "rounds=1", "logging.diagnostics=true")
    assert many.records[0]["gamma"] > 0 and many.records[0]["client_drift"] > 0
    assert many.records[0]["update_norm"] == pytest.approx(float((many.model - many.start).norm()), rel=1e-4)


def test_the_distance_from_a_reference_model_ends_where_the_reference_is_the_run_itself(tmp_path: Path):
    settings = ("preset=fedavg", *SMALL, "clients.count=4", "rounds=3", "local.engine=batched")
    assert run_into(tmp_path / "reference", *settings) == 0
    model = tmp_path / "reference" / "model.safetensors"
    distances = [record["weight_divergence"] for record in run(*settings, f"logging.reference={model}").records]
    assert distances[0] > distances[1] > distances[2] == 0
    with pytest.raises(UserError, match="no model of this run"):
        run("preset=fedavg", DIGITS, "model.hidden=[9]", "rounds=1", f"logging.reference={model}")
    with pytest.raises(UserError, match="cannot be read"):
        run(*settings, f"logging.reference={tmp_path}/nothing.safetensors")


def test_unstandardised_pixels_stay_between_zero_and_one():
    plain = run("preset=fedavg", *SMALL, "rounds=1", "data.normalize=false").experiment.data.load(0)[0]
    assert float(plain.min()) == 0.0 and 0.05 < float(plain.max()) <= 1.0
    assert float(run("preset=fedavg", *SMALL, "rounds=1").experiment.data.load(0)[0].min()) < 0


CLOCK = (
    "devices=true",
    "devices.speed.median=100",
    "devices.upload.median=1e12",
    "devices.download.median=1e12",
    "rounds=1",
)


def test_the_virtual_clock_counts_the_rows_that_are_used():
    """Constant speed of 100 samples a second, immediate transfers: the slowest client's rows decide."""
    whole = run("preset=fedavg", *SMALL, "clients.sampler=all", "local.epochs=2", *CLOCK)
    largest = int(whole.experiment.data.sizes.max())
    assert whole.records[0]["virtual_seconds"] == pytest.approx(2 * largest / 100, rel=1e-6)
    share = run("preset=fedsampling-naive", *SMALL, "samples.sampler.ratio=0.25", *CLOCK).records[0]["virtual_seconds"]
    assert share == pytest.approx(0.25 * largest / 100, rel=1e-6)
    steps = run("preset=fedavg", *SMALL, "local.steps=3", "local.batch_size=5", *CLOCK).records[0]["virtual_seconds"]
    assert steps == pytest.approx(15 / 100, rel=1e-6)


def test_a_mediators_clients_take_their_time_one_after_another():
    settings = ("preset=astraea", *SMALL, "rebalance=false", "clients.sampler=all", *CLOCK)
    chained = run(*settings, "topology.clients_per_mediator=12", "topology.epochs=2")
    total = int(chained.experiment.data.sizes.sum())
    assert chained.records[0]["mediators"] == 1
    assert chained.records[0]["virtual_seconds"] == pytest.approx(2 * total / 100, rel=1e-6)
    several = run(*settings, "topology.clients_per_mediator=4", "rounds=1")
    groups, sizes = several.experiment.decisions.planner.groups, several.experiment.data.sizes
    assert groups is not None
    chains = np.bincount(groups.group(0, np.arange(12))[0], sizes)
    assert len(chains) == 3 and chains.max() > 1.05 * chains.mean()
    assert several.records[0]["virtual_seconds"] == pytest.approx(2 * chains.max() / 100, rel=1e-6)
