"""FedSSO's Eq 3 as printed: the next model is (N/K) Σ ρ_k w_k, whose factors do not sum to one for unequal n_k."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.data.conftest import written
from tests.end_to_end.in_process import Run, run

UNEQUAL = ("data.source=digits:clients=12,alpha=0.3", "model.hidden=[8]", "clients.count=4", "local.lr=0.1")
LITERAL = "server.weights=literal"


def by_hand(one: Run, rounds: int, lr: float) -> tuple[torch.Tensor, list[float]]:
    """w_t = (N/K) Σ ρ_k (w_{t−1} − η ∇F_k(w_{t−1})) in float64 over the cohorts of the run; and N/K Σ ρ_k."""
    experiment, w, factors = one.experiment, one.start.clone(), []
    sizes = experiment.data.sizes
    for t in range(rounds):
        clients, total = experiment.decisions.plan(t).clients.tolist(), torch.zeros(len(w), dtype=torch.float64)
        for client in clients:
            x, y = experiment.data.load(client)
            experiment.model.bind(w.clone())
            loss = cross_entropy(experiment.model.module(x), y)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, experiment.model.parameters)])
            total += len(sizes) / len(clients) * sizes[client] / sizes.sum() * (w - lr * gradient).double()
        w = total.float()
        factors.append(len(sizes) / len(clients) * sizes[clients].sum() / sizes.sum())
    return w, factors


@pytest.mark.parametrize("exact", ["false", "true"])
def test_the_next_model_is_the_sum_that_the_paper_prints(exact: str) -> None:
    one = run(*UNEQUAL, LITERAL, "rounds=3", "local.steps=1", "local.batch_size=all", f"server.exact={exact}")
    expected, factors = by_hand(one, 3, 0.1)
    assert max(abs(factor - 1) for factor in factors) > 0.1
    assert torch.allclose(one.model, expected, atol=2e-6)


@pytest.mark.parametrize(
    "more",
    [
        ("topology=mediators", "topology.clients_per_mediator=2"),
        ("compression=int8",),
        ("clients.sampler=weighted", "clients.sampler.replace=true"),
        ("clients.availability=bernoulli", "clients.availability.probability=0.5", "clients.failure_rate=0.3"),
    ],
    ids=["mediators", "compressed", "drawn twice", "away"],
)
def test_it_is_the_mean_by_samples_times_the_sum_of_the_factors(more: tuple[str, ...]) -> None:
    one, mean = (run(*UNEQUAL, *more, f"server.weights={kind}", "rounds=1") for kind in ("literal", "samples"))
    drawn, sizes = one.experiment.decisions.planner.cohorts.draw(0, None).cohort, one.experiment.data.sizes
    factor = 12 / drawn.draws * float(drawn.multiplicity @ sizes[drawn.clients]) / sizes.sum()
    assert abs(factor - 1) > 0.05
    assert torch.allclose(one.model, factor * mean.model, atol=1e-5)


def test_participants_that_use_no_sample_send_the_model_they_were_sent() -> None:
    """π = K/N for all: unbiased weights are the same c_k, and leave (Σ c_k − 1) w out, over all participants."""
    few = ("samples.sampler=ratio", "samples.sampler.ratio=0.005", "seed=2", "rounds=1")
    one, other = (run(*UNEQUAL, *few, f"server.weights={kind}") for kind in ("literal", "unbiased"))
    drawn, sizes = one.experiment.decisions.plan(0).clients, one.experiment.data.sizes
    assert one.records[0]["samples"] < len(drawn)
    factor = 12 / 4 * sizes[drawn].sum() / sizes.sum()
    assert torch.allclose(one.model, other.model + (factor - 1) * one.start, atol=1e-6)


@pytest.mark.parametrize("population", ["samples", "clients"])
def test_clients_without_samples_send_the_model_they_were_sent(population: str, tmp_path: Path) -> None:
    """All take part, so that Σ ρ_k = 1: Eq 3 is then w + Σ ρ_k Δ_k, of which clients without samples have Δ_k = 0."""
    settings = ("model.hidden=[4]", "clients.sampler=all", f"server.weights.population={population}", "rounds=1")
    shards = f"data.source={written([5, 0, 3, 0, 4, 6], tmp_path / 'shards')}"
    one, other = (run(shards, *settings, f"server.weights={kind}") for kind in ("literal", "unbiased"))
    assert torch.allclose(one.model, other.model, atol=1e-6) and not torch.equal(one.model, one.start)


@pytest.mark.parametrize("weights", ["literal", "normalized", "unbiased", "gradient-sum"])
def test_the_opening_is_the_mean_of_all_under_any_of_fedssos_weights(weights: str) -> None:
    """Algorithm 1, line 3: w_1 = Σ ρ_k w_1^k, with neither N/K nor strata."""
    settings = ("preset=fedsso", *UNEQUAL[:2], "rounds=1")
    one, other = run(*settings, f"server.weights={weights}"), run(*settings, "server.weights=samples")
    assert torch.allclose(one.model, other.model, atol=1e-6)


def test_the_opening_of_those_who_return_is_a_mean_too() -> None:
    settings = ("preset=fedsso", *UNEQUAL[:2], "rounds=1", "clients.failure_rate=0.5")
    one, other = (run(*settings, f"server.weights={kind}") for kind in ("literal", "normalized"))
    assert one.records[0]["participants"] < 12 and torch.equal(one.model, other.model)


def test_a_round_without_participants_leaves_the_model() -> None:
    one = run(*UNEQUAL, LITERAL, "clients.availability=bernoulli", "clients.availability.probability=1e-9", "rounds=2")
    assert one.records[0]["participants"] == 0 and torch.equal(one.model, one.start)
