"""The study `draw_noise`: its closed form against all draws of an example, its updates against softmax regression."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmpi
from benchmarks.studies.draw_noise import main, measured, moments
from fedmpi.data.opening import open_store
from tests.data_prep.command import main as prepare

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "clients.count": 3,
    "clients.sampler.strata": 3,
    "clients.sampler.features.codebook_size": 40,
    "data.normalize": False,
    "model.hidden": [],
    "local.steps": 2,
    "local.batch_size": 20,
    "local.lr": 0.5,
    "logging.tensorboard": False,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("draws") / "shards")
    assert prepare(["digits", "--partition", "iid", "--clients", "12", "--out", folder]) == 0
    return folder


def slope(model: Any, x: Any, y: Any) -> Any:
    """Gradient of the mean cross-entropy of softmax regression, (C, p + 1)."""
    scores = np.exp(x @ model.T)
    return (scores / scores.sum(axis=1, keepdims=True) - np.eye(len(model))[y]).T @ x / len(y)


@pytest.mark.parametrize("unbiased", [False, True])
def test_bias_and_variance_are_those_over_all_draws(unbiased: bool) -> None:
    generator = np.random.default_rng(0)
    updates, lengths = generator.normal(size=(5, 3)), generator.uniform(1, 3, 5)
    strata = np.array([0, 1, 0, 1, 1])
    outcomes, chances = [], []
    for drawn in product([0, 2], [1, 3, 4]):
        chance = [lengths[k] / lengths[strata == strata[k]].sum() for k in drawn]
        weight = [1 / p if unbiased else (strata == strata[k]).sum() for k, p in zip(drawn, chance, strict=True)]
        outcomes.append(sum(w * updates[k] / 5 for k, w in zip(drawn, weight, strict=True)))
        chances.append(np.prod(chance))
    mean, expected = updates.mean(axis=0), np.average(outcomes, axis=0, weights=chances)
    spread = np.average(((np.array(outcomes) - expected) ** 2).sum(axis=1), weights=chances)
    found = moments(updates, strata, lengths, unbiased)
    assert found == pytest.approx((((expected - mean) ** 2).sum() / (mean @ mean), spread / (mean @ mean)))
    assert (found[0] < 1e-12) == unbiased


def test_updates_and_norms_are_those_of_softmax_regression(
    shards: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    fedmpi.run("fedsts", SETTINGS | {"seed": 4}, data=shards, out=tmp_path / "run")
    updates, strata, lengths = measured(str(tmp_path / "run"))
    assert sorted(set(strata.tolist())) == [0, 1, 2]
    weight, bias = (value.detach().double().numpy() for value in fedmpi.load_run(tmp_path / "run").model.parameters())
    start, store, generator = np.column_stack([weight, bias]), open_store(shards), np.random.default_rng(4)
    for client in range(12):
        rows, y = store.client(client)
        x = np.column_stack([np.asarray(rows, float).reshape(len(y), -1) / 255, np.ones(len(y))])
        assert lengths[client] == pytest.approx(np.linalg.norm(slope(start, x, y)), rel=0.02)
        order, model = generator.permutation(len(y)), start.copy()
        for batch in (order[:20], order[20:40]):
            model = model - 0.5 * slope(model, x[batch], y[batch])
        moved = model - start
        assert np.allclose(updates[client], np.concatenate([moved[:, :-1].ravel(), moved[:, -1]]), atol=1e-6)
    monkeypatch.setattr("sys.argv", ["draw_noise", str(tmp_path / "run"), str(tmp_path / "run")])
    main()
    table = capsys.readouterr().out
    for kind, which in (("stratified", False), ("unbiased", True)):
        squared, spread = moments(updates, strata, lengths, which)
        assert f"| {kind} | {squared:.3f} ± 0.000 | {spread:.3f} ± 0.000 | {squared + spread:.3f} ± 0.000 |" in table
    gap = sum(moments(updates, strata, lengths, True)) - sum(moments(updates, strata, lengths, False))
    assert f"unbiased − stratified, both: {gap:+.3f} [{gap:+.3f}, {gap:+.3f}]" in table


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"clients.sampler.strata": 4}, "not one client a stratum"),
        ({"clients.sampler.within_stratum": "uniform"}, "not one client a stratum"),
        ({"data.normalize": True}, "plain SGD"),
        ({"local.steps": 20}, "samples for its steps"),
    ],
)
def test_runs_that_it_does_not_describe_are_refused(
    shards: str, tmp_path: Path, setting: dict[str, Any], words: str
) -> None:
    fedmpi.run("fedsts", SETTINGS | {"rounds": 1} | setting, data=shards, out=tmp_path / "run")
    with pytest.raises(SystemExit, match=words):
        measured(str(tmp_path / "run"))
