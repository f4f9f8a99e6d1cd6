"""Methods do what their documentation claims: weights of strata, clients that OPTICS calls noise, stale gradients."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn, zeros

import fedmpi

QUIET = {"logging.tensorboard": False, "cluster.threads": 1, "checkpoint.every": 0, "data.normalize": False}


class Weights(nn.Module):
    """Two parameters that start at zero: after one round each is the weight that the updates of one stratum had."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.theta).sum(1, keepdim=True)


def two_strata(each: int, small: int = 1, large: int = 40) -> fedmpi.ClientArrays:
    """`each` clients with `small` samples (1, 0) -> 1, and as many with `large` samples (0, 1) -> 1."""
    owner = np.repeat(np.arange(2 * each), np.repeat([small, large], each))
    x = np.eye(2, dtype=np.float32)[(owner >= each).astype(int)]
    y = np.ones((len(x), 1), np.float32)
    return fedmpi.ClientArrays(x, y, owner, test=(x[:2], y[:2]))


def weights_of_two_strata(count: int, seed: int, wanted: int, **settings: Any) -> np.ndarray:
    """The two weights of one round of FedSTaS in which the server asks for `wanted` samples."""
    keys = QUIET | {
        "rounds": 1, "seed": seed, "clients.sampler.features": "full-gradient", "clients.sampler.strata": 2,
        "clients.count": count, "samples.budget": wanted, "task.kind": "regression",
        "local.lr": 0.5, "local.steps": 1, "local.batch_size": "all",
    }  # fmt: skip
    run = fedmpi.run("fedstas", keys | settings, data=two_strata(8), model=Weights())
    return run.model.theta.detach().numpy().astype(np.float64)


@pytest.mark.parametrize(
    "count, settings",
    [
        (16, {}),
        (6, {}),
        (2, {}),
        (6, {"clients.sampler.within_stratum": "uniform", "clients.sampler.allocation": "equal"}),
        (16, {"clients.sampler.allocation": "proportional", "server.optimizer": "momentum"}),
        (16, {"local.engine": "sequential", "server.exact": True}),
    ],
)
def test_strata_keep_their_weight_where_participants_have_no_sampled_row(count: int, settings: dict[str, Any]) -> None:
    """Half of the clients have one sample, drawn with probability K/ñ near 1/4; a client without it changes nothing.

    FedSTaS, last line of Algorithm 2: the other stratum, all of whose clients have rows, weighs N_h/N = 1/2 whatever
    happens in the first, whose weight is 1/2 times the share of its participants with a row.
    """
    found = np.array([weights_of_two_strata(count, seed, wanted=11 * count // 2, **settings) for seed in range(3)])
    with_row = found[:, 0] * count  # m_h / (N_h / N)
    assert found[:, 1] == pytest.approx(np.full(3, 0.5), abs=1e-6)
    assert with_row == pytest.approx(np.rint(with_row), abs=1e-4)
    assert found[:, 0].min() < 0.5


def test_fewer_participants_than_strata_and_no_row_change_nothing() -> None:
    """m = 1 < H = 2: the stratum drawn counts 1/P_h = 2 times its half, and a client without a row changes nothing."""
    asked = {"samples.size.query": "all"}
    runs = [weights_of_two_strata(1, seed, wanted=82, **asked) for seed in range(8)]
    found = {tuple(np.round(weights, 6).tolist()) for weights in runs}
    assert {(0.0, 1.0), (0.0, 0.0)} <= found <= {(0.0, 1.0), (0.0, 0.0), (1.0, 0.0)}


class Own(nn.Module):
    """A parameter for each client, which its updates alone change."""

    def __init__(self, clients: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(zeros(clients))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.theta).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "sampler",
    [
        {"clients.sampler": "importance", "server.weights": "unbiased"},
        {"clients.sampler.features": "full-gradient", "clients.sampler.strata": 3},
        {
            "clients.sampler.features": "full-gradient",
            "clients.sampler.strata": 2,
            "clients.sampler.spread": "pairwise",
        },
        {"clients.sampler.strata": 3, "clients.sampler.features.codebook_size": 12, "server.weights": "unbiased"},
    ],
)
def test_gradients_of_clients_that_did_not_take_part_stay_what_they_were(sampler: dict[str, Any]) -> None:
    """Nobody else changes a client's gradient: those of the last participants are all that has to be measured anew."""
    scale = np.array([0.3, 2.0, 0.9, 1.4, 0.5, 1.1, 0.7, 1.7, 0.4, 1.2, 0.6, 0.8], np.float32)
    x, y = np.diag(scale), np.ones((12, 1), np.float32)
    data = fedmpi.ClientArrays(x, y, np.arange(12), test=(x, y))
    keys = QUIET | {
        "rounds": 8, "clients.count": 4, "task.kind": "regression", "local.lr": 0.1, "local.steps": 1,
        "logging.participants": True, "logging.diagnostics": True,
    }  # fmt: skip
    found = []
    for who in ("all", "participants"):
        run = fedmpi.run("fedsts", keys | sampler | {"clients.sampler.refresh_clients": who}, data=data, model=Own(12))
        drawn = [(record["clients"], record["inclusion_min"], record["inclusion_max"]) for record in run.records]
        found.append((drawn, run.model.theta.tolist()))
    assert found[0] == found[1] and len({clients for clients, *_ in found[0][0]}) > 4


@pytest.mark.parametrize(
    "rule, rows",
    [
        (
            {"samples.sampler": "bernoulli", "samples.budget": 60, "samples.size.query": "all"},
            lambda r: 60 / r["available"],
        ),
        (
            {"samples.sampler": "bernoulli", "samples.budget": 60, "samples.size.query": "selected"},
            lambda r: 60 / r["asked"],
        ),
        ({"samples.sampler": "bernoulli", "samples.budget": 10**6, "samples.size.query": "all"}, lambda r: 20),
        ({"samples.sampler": "exact", "samples.budget": 30}, lambda r: 30 / r["participants"]),
        ({"samples.sampler": "ratio", "samples.sampler.ratio": 0.35}, lambda r: 7),
        ({}, lambda r: 20),
    ],
)
@pytest.mark.parametrize("work, factor", [({"local.epochs": 3}, 3), ({"local.steps": 5, "local.batch_size": "all"}, 5)])
def test_the_virtual_clock_counts_the_rows_expected_of_those_who_are_there(
    rule: dict[str, Any], rows: Any, work: dict[str, Any], factor: int
) -> None:
    """Twelve clients of 20 samples at one sample a second, six of them there at a time on average."""
    owner = np.repeat(np.arange(12), 20)
    x = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)
    data = fedmpi.ClientArrays(x, owner % 3, owner, test=(x[:9], owner[:9] % 3))
    keys = QUIET | {
        "rounds": 6, "clients.count": 4, "model.hidden": [3], "clients.availability": "bernoulli",
        "clients.availability.probability": 0.5, "clients.failure_rate": 0.2, "devices": True, "devices.speed": "constant",
        "devices.speed.median": 1.0, "devices.upload.median": 1e15, "devices.download.median": 1e15,
    }  # fmt: skip
    run = fedmpi.run("fedavg", keys | rule | work, data=data)
    some = [record for record in run.records if record["participants"]]
    assert len({record["available"] for record in some}) > 2
    for record in some:
        assert record["virtual_seconds"] == pytest.approx(factor * min(20, rows(record)), rel=1e-6)


def kinds(loners: int, each: int = 4) -> fedmpi.ClientArrays:
    """Clients of three kinds, `each` of class 0, 1 or 2 alone, and loners: 3 samples of a kind, 7 of an own class."""
    held = [[kind] * 10 for kind in range(3) for _ in range(each)]
    held += [[k % 3] * 3 + [3 + k] * 7 for k in range(loners)]
    y, owner = np.concatenate(held), np.repeat(np.arange(len(held)), 10)
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    return fedmpi.ClientArrays(x, y, owner, test=(x, y), classes=12)


BY_LABELS = QUIET | {
    "rounds": 3, "model.hidden": [3], "clients.sampler.features": "label-histogram", "clients.count": 3,
    "clients.sampler.initial_step": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "noise, loners, sizes",
    [
        ("nearest", 3, [5, 5, 5]),
        ("nearest", 1, [5, 4, 4]),
        ("nearest", 5, [6, 6, 5]),
        ("nearest", 0, [4, 4, 4]),
        ("singletons", 3, [4, 4, 4, 1, 1, 1]),
        ("stratum", 3, [4, 4, 4, 3]),
        ("drop", 3, [4, 4, 4]),
        (None, 3, [5, 5, 5]),
    ],
)
def test_the_record_counts_noise_clients_and_the_option_places_them(
    noise: str | None, loners: int, sizes: list[int]
) -> None:
    keys = BY_LABELS | ({} if noise is None else {"clients.sampler.clustering.outliers": noise})
    records = fedmpi.run("fedsso", keys, data=kinds(loners)).records
    assert [record["stratum_sizes"] for record in records] == [sizes] * 3
    assert [record.get("noise_clients") for record in records] == [loners, None, None]


@pytest.mark.parametrize("refresh, counted", [(0, [2, None, None]), (1, [2, 2, 2]), (2, [2, None, 2])])
def test_noise_clients_are_counted_whenever_clients_are_clustered(refresh: int, counted: list[int | None]) -> None:
    records = fedmpi.run("fedsso", BY_LABELS | {"clients.sampler.refresh": refresh}, data=kinds(2)).records
    assert [record.get("noise_clients") for record in records] == counted


@pytest.mark.parametrize("loners, warns", [(3, 0), (4, 0), (5, 1), (9, 1)])
def test_many_noise_clients_are_warned_of_once(loners: int, warns: int, caplog: pytest.LogCaptureFixture) -> None:
    """Above a quarter of the clients: 4 of 16 are not, 5 of 17 are."""
    with caplog.at_level(logging.WARNING, "fedmpi"):
        fedmpi.run("fedsso", BY_LABELS | {"clients.sampler.refresh": 1}, data=kinds(loners))
    found = [record.getMessage() for record in caplog.records if "OPTICS" in record.getMessage()]
    assert len(found) == warns
    assert all(f"{loners} of {12 + loners} clients" in text and 'weights = "unbiased"' in text for text in found)


def test_an_unknown_place_for_noise_clients_is_rejected_with_the_allowed_ones() -> None:
    with pytest.raises(fedmpi.UserError, match=r"nearby.*nearest.*singletons.*stratum.*drop|nearest.*drop.*nearby"):
        fedmpi.run("fedsso", {"clients.sampler.clustering.outliers": "nearby"}, data="digits")
