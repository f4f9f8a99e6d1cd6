"""FedSSO's opening: one step of every client makes the strata and the first global model (Algorithm 1, lines 1-3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpi.common.streams import Streams
from fedmpi.local.probes import make_probe
from tests.end_to_end.in_process import run

MODEL = Path(__file__).parent / "dropping.py"


@pytest.mark.parametrize("engine", ["sequential", "batched", "auto"])
@pytest.mark.parametrize("probe", ["full", "batch", "sample"])
@pytest.mark.parametrize("rows", ["all", "bernoulli"])
def test_the_first_model_is_the_mean_of_the_models_that_were_clustered(
    engine: str, probe: str, rows: str, monkeypatch: pytest.MonkeyPatch
):
    """w_1 = Σ ρ_k (w_0 − η g_k), η = 1, with the gradients g_k that the strata were made of; the model has dropout."""
    monkeypatch.syspath_prepend(str(MODEL.parent))
    sampled = ["samples.sampler=bernoulli", "samples.budget=200"] if rows == "bernoulli" else []
    made = run(
        "preset=fedsso",
        "data.source=digits:clients=12",
        "model.name=dropping:net",
        f"clients.sampler.features.probe={probe}",
        f"local.engine={engine}",
        "local.lr=1",
        "rounds=1",
        *sampled,
    )
    experiment = made.experiment
    seen = make_probe(experiment.config, experiment.model, experiment.data, Streams(experiment.config.seed), 0)
    sizes = experiment.data.sizes
    mean = torch.zeros_like(made.start, dtype=torch.float64)
    for clients, gradients in seen(0, made.start, np.arange(len(sizes))):
        shares = torch.from_numpy(sizes[clients] / sizes.sum())
        mean += (shares[:, None] * gradients.double()).sum(0)
    expected = made.start.double() - mean
    change = (made.model.double() - made.start.double()).norm()
    assert (made.model.double() - expected).norm() < 1e-5 * change
    assert made.records[0]["opening"] and made.records[0]["participants"] == len(sizes)
    assert "size_estimate" not in made.records[0]


def test_later_probes_see_rows_of_their_own():
    made = run("preset=fedsso", "data.source=digits:clients=12", "clients.sampler.features.probe=sample", "rounds=1")
    experiment = made.experiment
    probe = make_probe(experiment.config, experiment.model, experiment.data, Streams(experiment.config.seed), 0)
    at = [torch.cat([g for _, g in probe(t, made.start, np.arange(12))]) for t in (0, 1, 1, 2)]
    assert not torch.equal(at[0], at[1])
    assert torch.equal(at[1], at[2])
    assert not torch.equal(at[2], at[3])
