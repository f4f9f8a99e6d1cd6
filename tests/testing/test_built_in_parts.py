"""Every built-in component passes the conformance tests."""

from __future__ import annotations

from typing import Any

import pytest

import fedmpi
from fedmpi.testing import CONTRACTS, Check, checks

SYNTHETIC = {"data.source": "fedmpi.testing.runs:synthetic"}
TEXT = SYNTHETIC | {"data.source.shape": (12,), "data.source.vocabulary": 30, "model.dimension": 20}
TEXTS = ("text-cnn", "fedsampling-text-cnn", "transformer", "lstm")
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
    "local algorithm fedrep": {"local.personal": ["output.*"]},
    "weights q-ffl": {"server.weights.q": 1.0},
    "availability label-group": {"clients.availability.by_label": [0.9, 0.5]},
    "device rate classes": {"devices.speed.rates": (9.0, 99.0), "devices.speed.shares": (0.3, 0.7)},
    "schedule step": {"local.schedule.every": 1},
    "model cnn": SYNTHETIC | {"data.source.shape": (1, 28, 28)},
    "model image-cnn": SYNTHETIC | {"data.source.shape": (1, 16, 16), "model.hidden": [8]},
    "model cifar-cnn": SYNTHETIC | {"data.source.shape": (3, 16, 16), "model.hidden": 8},
    "model resnet18": SYNTHETIC | {"data.source.shape": (3, 4, 4), "model.width": 4, "model.groups": 2},
    **dict.fromkeys((f"model {name}" for name in TEXTS), TEXT),
    "model char-lstm": TEXT | {"model.units": 8},
    "partition dirichlet": {"alpha": 0.5},
    "partition label-sorted": {"size": 20},
    "partition astraea": {"variant": "BAL2"},
    "partition attribute": {"attribute": "mean"},
}
"""Settings that a component needs, and choices that go with it."""
WRITTEN = {part.name: part for part in fedmpi.components("data set") if part.name != "digits"}
"""Data sets whose readers need files; tests/data_prep reads such."""
OF_TABLES = ("table", "intervals")
"""Components that read rows of the clients from a file; tests/clients read such files."""
PARTS = [
    (part, NEEDED.get(f"{part.kind} {part.name}", {}))
    for part in fedmpi.components()
    if part.name not in (*WRITTEN, *OF_TABLES)
]
LONG = ("inclusion", "cost")
"""Checks of many draws or clients; tests/statistical compares the same probabilities."""
CHECKS = [
    pytest.param(check, marks=pytest.mark.slow if check.name.startswith(LONG) else ())
    for part, settings in PARTS
    for check in checks(part, settings, runs=False)
]


def test_every_kind_that_the_contract_names_has_checks_and_components() -> None:
    kinds = {part.kind for part, _ in PARTS}
    assert kinds == CONTRACTS.keys()
    assert len(PARTS) > 30 and len(CHECKS) > 140


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_built_in_component_keeps_its_contract(check: Check) -> None:
    assert check()
