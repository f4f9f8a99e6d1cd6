"""Every built-in component passes the conformance tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedmpi
import fedmpi.testing
from data_prep.__main__ import run as prepare
from fedmpi.common.registry import Component
from fedmpi.testing import Check, checks
from fedmpi.testing.check import Subject
from fedmpi.testing.kit import CONTRACTS, part_of
from fedmpi.testing.started import Starts, started_checks
from tests.testing.made_up import raw_of

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
OF_FILES = ("user", "user-groups", "pachinko")
"""Partitions that go by what only some data sets have."""
PARTS = [(part, NEEDED.get(f"{part.kind} {part.name}", {})) for part in fedmpi.components() if part.name not in WRITTEN]
LATER = {"model": ("mlp",), "partition": [p.name for p in fedmpi.components("partition") if p.name not in OF_FILES]}
"""Components of some kinds that are tried in started runs with the others; the rest need files first."""
LONG = {"stratified": "inclusion", "importance": "inclusion", "clustered-md": "inclusion"}
"""Checks that take seconds."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("digits", {}),
    "cnn": ("mnist", {}),
    "cifar-cnn": ("cifar10", {}),
    "image-cnn": ("cifar10", {}),
    "resnet18": ("cifar10", {"model.width": 4, "model.groups": 2}),
    **dict.fromkeys(("text-cnn", "fedsampling-text-cnn", "transformer"), ("mind", {"model.dimension": 4})),
    **dict.fromkeys(("lstm", "bilstm", "char-lstm", "word-lstm"), ("mind", {"model.dimension": 4, "model.units": 6})),
    "bag-of-words": ("mind", {}),
    "causal-transformer": ("mind", {"model.dimension": 4, "model.heads": 2}),
}
"""The data set on which each model is trained in started runs, and what makes it small."""


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
def test_every_model_gives_the_same_on_any_number_of_ranks_and_resumed(tmp_path: Path) -> None:
    subjects = []
    for name, (data, settings) in MODELS.items():
        raw = [] if data == "digits" else ["--raw", str(raw_of(data, tmp_path))]
        if not (shards := tmp_path / f"{data}-shards").exists():
            assert prepare([data, *raw, "--partition", "iid", "--clients", "5", "--out", str(shards)]) == 0
        subjects.append(Subject(part_of(name, "model"), settings | {"data.source": str(shards)}))
    starts = Starts(subjects)
    for subject in subjects:
        for check in started_checks(subject, starts):
            assert check(), check
