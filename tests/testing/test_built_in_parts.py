"""Every built-in component passes the conformance tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedmpi
import fedmpi.testing
from fedmpi.common.registry import Component
from fedmpi.testing import Check, checks
from fedmpi.testing.check import Subject
from fedmpi.testing.kit import CONTRACTS, part_of
from fedmpi.testing.started import Starts, started_checks

NEEDED: dict[str, dict[str, Any]] = {
    "data sampler bernoulli": {"samples.budget": 200},
    "data sampler exact": {"samples.budget": 200},
    "data sampler ratio": {"samples.sampler.ratio": 0.3},
    "weights gradient-sum": {"samples.sampler": "bernoulli", "samples.budget": 200},
    "weights gradient-sum-squared": {"samples.sampler": "bernoulli", "samples.budget": 200},
    "weights stratified": {"clients.sampler": "stratified", "clients.sampler.strata": 3},
    "client sampler stratified": {"clients.sampler.strata": 3},
    "aggregator krum": {"server.aggregator.byzantine": 1},
    "aggregator norm-clip": {"server.aggregator.bound": 0.5},
    "local algorithm feddyn": {"server.weights": "uniform"},
    "weights q-ffl": {"server.weights.q": 1.0},
    "availability label-group": {"clients.availability.by_label": [0.9, 0.5]},
    "partition dirichlet": {"alpha": 0.5},
    "partition inner-dirichlet": {"alpha": 0.5},
    "partition label-sorted": {"size": 20},
    "partition astraea": {"variant": "BAL2"},
    "partition user-groups": {"group": 2},
    "partition attribute": {"attribute": "mean"},
    "partition pachinko": {"clients": 2, "size": 20},
}
"""Settings that a component needs, and choices that go with it."""
WRITTEN = {part.name: part for part in fedmpi.components("data set") if part.name != "digits"}
"""Data sets whose readers need files; tests/data_prep reads such."""
PARTS = [(part, NEEDED.get(f"{part.kind} {part.name}", {})) for part in fedmpi.components() if part.name not in WRITTEN]
LATER = {"model": ("mlp",)}
"""Components of some kinds that are tried in started runs with the others."""
LONG = {"stratified": "inclusion", "importance": "inclusion", "clustered-md": "inclusion"}
"""Checks that take seconds."""

HERE = "tests.testing.test_built_in_parts"
TEXTS = f"{HERE}:texts"
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "cnn": {"data.source": f"{HERE}:images", "data.source.side": 28, "data.source.channels": 1},
    "cifar-cnn": {"data.source": f"{HERE}:images"},
    "image-cnn": {"data.source": f"{HERE}:images"},
    "resnet18": {"data.source": f"{HERE}:images", "model.width": 4, "model.groups": 2},
    **dict.fromkeys(("text-cnn", "fedsampling-text-cnn", "transformer"), {"data.source": TEXTS, "model.dimension": 4}),
    **dict.fromkeys(
        ("lstm", "bilstm", "char-lstm"),
        {"data.source": TEXTS, "model.dimension": 4, "model.units": 6},
    ),
}
"""Settings of each model in started runs: its data, and what makes it small."""


def images(*, side: int = 32, channels: int = 3) -> fedmpi.ClientArrays:
    """Make five clients with 8 random images each."""
    x = np.random.default_rng(0).integers(0, 256, (60, channels, side, side)).astype(np.uint8)
    y = np.arange(60) % 10
    return fedmpi.ClientArrays(x[:40], y[:40], np.arange(40) % 5, test=(x[40:], y[40:]))


def texts() -> fedmpi.ClientArrays:
    """Make five clients with 8 random texts each."""
    x = np.random.default_rng(0).integers(1, 30, (60, 12)).astype(np.int32)
    y = np.arange(60) % 3
    clients = np.arange(40) % 5
    return fedmpi.ClientArrays(x[:40], y[:40], clients, test=(x[40:], y[40:]), task="text", vocabulary=30)


def long(part: Component, check: Check) -> bool:
    return check.name.startswith(LONG.get(part.name, "nothing"))


QUICK = [check for part, settings in PARTS for check in checks(part, settings, runs=False) if not long(part, check)]


def test_every_kind_that_the_contract_names_has_checks_and_components() -> None:
    kinds = {part.kind for part, _ in PARTS}
    assert kinds | {"feature shift", "label noise"} == CONTRACTS.keys()  # these have custom components only
    assert len(PARTS) > 30 and len(QUICK) > 140


@pytest.mark.parametrize("check", QUICK, ids=str)
def test_a_built_in_component_keeps_its_contract(check: Check) -> None:
    assert check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@fedmpi.testing.parametrize_with_checks(
    [pair for pair in PARTS if pair[0].name in LATER.get(pair[0].kind, (pair[0].name,))]
)
def test_a_built_in_component_keeps_its_contract_in_started_runs(check: Check) -> None:
    assert check()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_model_gives_the_same_on_any_number_of_ranks_and_resumed() -> None:
    subjects = [Subject(part_of(name, "model"), settings) for name, settings in MODELS.items()]
    starts = Starts(subjects)
    for subject in subjects:
        for check in started_checks(subject, starts):
            assert check(), check
