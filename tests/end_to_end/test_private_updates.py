"""Client-level privacy as whole runs: how far one client moves the model, against the noise and the ε reported."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.workloads import write
from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.records.history import clients_from_text
from tests.end_to_end.in_process import SMALL, Run, run
from tests.privacy.test_gaussian_dp import gaussian_epsilon
from tests.statistical import weighed

pytest.importorskip("dp_accounting")

C, SIGMA = 0.01, 1.0
CLIENTS = 6
NOISED = (f"privacy.clip_norm={C}", f"privacy.noise_multiplier={SIGMA}", "server.weights=uniform")
ONE_STEP = ("local.steps=1", "local.batch_size=all", "local.lr=1", "rounds=1")
MODEL = "model.name=tests.end_to_end.user_models:linear_from_zero"
POPULATIONS = {"as they are": ([4] * 6, 0), "replaced": ([9, 4, 4, 4, 4, 4], 1), "emptied": ([0, 4, 4, 4, 4, 4], 0)}
"""Sizes of the clients and the label of client 0; the others' label is 0, and every sample is the same image."""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Populations that differ in client 0 only."""
    folder = tmp_path_factory.mktemp("neighbors")
    for name, (sizes, label) in POPULATIONS.items():
        labels = np.repeat([label, 0], [sizes[0], sum(sizes[1:])])
        images = np.ones((len(labels), 784), np.float32)
        write(folder / name, "vector", np.array(sizes), (images, labels), (images[:2], labels[:2]), 2)
    return {name: folder / name for name in POPULATIONS}


def released(shards: dict[str, Path], population: str, seed: int, *settings: str) -> Run:
    return run(f"data.source={shards[population]}", f"seed={seed}", *NOISED, *ONE_STEP, MODEL, *settings)


ALL = ("clients.sampler=all",)
DRAWN = ("clients.sampler=uniform", "clients.count=3")
SCENES = {
    "everybody": (ALL, 6),
    "a draw": (DRAWN, 3),
    "drop-outs": ((*ALL, "clients.failure_rate=0.5"), 6),
    "fewer present than requested": (
        ("clients.sampler=uniform", "clients.count=5", "clients.availability=bernoulli")
        + ("clients.availability.probability=0.5",),
        5,
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_one_client_moves_what_is_released_by_two_norms_over_the_fixed_denominator(scene: str, shards: dict[str, Path]):
    """Three seeds; the noise is the same in both runs, so that models differ by what the client changed."""
    settings, planned = SCENES[scene]
    moved = []
    for seed in range(1 if scene == "everybody" else 3):
        before = released(shards, "as they are", seed, *settings)
        for population in ("replaced", "emptied"):
            after = released(shards, population, seed, *settings)
            moved.append(float(torch.linalg.vector_norm(after.model - before.model, dtype=torch.float64)))
    assert max(moved) <= 2 * C / planned * (1 + 1e-4)
    assert max(moved) >= 2 * C / planned * (1 - 1e-4)


@pytest.mark.parametrize("drop_out", [0.0, 0.3])
def test_the_epsilon_of_a_round_is_that_of_the_measured_move_and_noise(drop_out: float, shards: dict[str, Path]):
    """10.0 by the exact formula; half the sensitivity would give 4.4. 1,570 values: the deviation is known to 10 %."""
    settings = (*ALL, f"clients.failure_rate={drop_out}")
    one, other = (released(shards, name, 2, *settings) for name in ("as they are", "replaced"))
    silent = released(shards, "as they are", 2, *settings, "privacy.noise_multiplier=0")
    moved = float(torch.linalg.vector_norm(one.model - other.model, dtype=torch.float64))
    assert moved == pytest.approx(2 * C / CLIENTS, rel=1e-4)
    assert (one.records[0]["participants"] < CLIENTS) == (drop_out > 0)
    deviation = float((one.model - silent.model).double().std())
    assert deviation == pytest.approx(SIGMA * C / CLIENTS, rel=0.1)
    exact = gaussian_epsilon(moved / (SIGMA * C / CLIENTS), 1e-5)
    assert exact * 0.999 <= one.records[0]["update_epsilon"] <= exact * 1.1
    assert "update_epsilon" not in silent.records[0]


def test_a_round_in_which_no_client_returns_is_noised_and_charged_all_the_same(shards: dict[str, Path]):
    empty = released(shards, "as they are", 0, *ALL, "clients.failure_rate=0.999")
    assert empty.records[0]["participants"] == 0
    assert float(empty.model.double().std()) == pytest.approx(SIGMA * C / CLIENTS, rel=0.1)
    assert empty.records[0]["update_epsilon"] > 10


planner = partial(weighed.planner, *NOISED, sizes=np.full(40, 5), labels=np.arange(40) % 10)


def test_every_record_says_what_fixed_samples_of_those_present_have_spent():
    """Against dp-accounting composed with the realized m of a; 3 % for the shorter list of orders."""
    import dp_accounting as dp

    uniform = planner(
        *DRAWN, "clients.availability=bernoulli", "clients.availability.probability=0.5", "clients.failure_rate=0.3"
    )
    reference = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    previous = 0.0
    for t in range(2):
        turnout, plan = uniform.cohorts.draw(t, None), uniform.plan(t)
        assert len(turnout.asked) == 3 < turnout.available < 40
        sampled = dp.SampledWithoutReplacementDpEvent(turnout.available, 3, dp.GaussianDpEvent(SIGMA / 2))
        reference.compose(sampled)
        assert previous < plan.facts["update_epsilon"]
        previous = plan.facts["update_epsilon"]
    assert previous == pytest.approx(reference.get_epsilon(1e-5), rel=0.03)


def test_over_selected_clients_count_as_drawn():
    drawn = planner(*DRAWN).plan(0).facts["update_epsilon"]
    more = planner(*DRAWN, "devices=true", "clients.over_selection=2").plan(0).facts["update_epsilon"]
    unlike = planner(*DRAWN, "devices=true", "clients.over_selection=2", "devices.speed=lognormal").plan(0)
    assert unlike.facts["update_epsilon"] == more
    assert more == planner("clients.sampler=uniform", "clients.count=6").plan(0).facts["update_epsilon"]
    assert more > drawn


PRIVATE_SIZES = ("samples.sampler=bernoulli", "samples.budget=50", "samples.size.estimate=duchi")


@pytest.mark.parametrize("settings", [DRAWN, (*DRAWN, *PRIVATE_SIZES, "samples.size.query=all")])
def test_a_secret_draw_costs_less(settings: tuple[str, ...]):
    assert planner(*settings).plan(0).facts["update_epsilon"] < 8


@pytest.mark.parametrize(
    "settings",
    [
        ALL,
        (*DRAWN, "clients.availability=label-group", "clients.availability.by_label=[0.9, 0.6]"),
        (*DRAWN, "compression=top-k", "compression.error_feedback=true"),
        (*DRAWN, *PRIVATE_SIZES, "samples.size.query=selected"),
    ],
)
def test_draws_that_are_no_secret_are_charged_without_sampling(settings: tuple[str, ...]):
    """σ = 1, one round, δ = 1e-5: Rényi's bound is 10.7."""
    assert planner(*settings).plan(0).facts["update_epsilon"] == pytest.approx(10.73, abs=0.01)


def test_an_adaptive_norm_follows_the_quantile_as_in_a_plain_loop():
    settings = (*SMALL, "rounds=6", "privacy.clip_norm=0.3", "server.weights=uniform", "privacy.noise_multiplier=0.5")
    adaptive = [f"privacy.adaptive_clip.{one}" for one in ("quantile=0.7", "lr=0.9", "count_noise=0.4")]
    found, fixed = run(*settings, *adaptive), run(*settings)
    norm = 0.3
    for t, record in enumerate(found.records):
        assert record["clip_norm"] == pytest.approx(norm, rel=1e-12)
        assert record["update_epsilon"] == fixed.records[t]["update_epsilon"]
        noise = Streams(0).generator(Purpose.DP_NOISE, t, 1).standard_normal()
        share = (record["participants"] - record["clipped_updates"] + 0.4 * noise) / 7
        norm *= np.exp(-0.9 * (share - 0.7))
    clipping = found.experiment.server.clipping
    assert clipping.norm == pytest.approx(norm) and norm != 0.3
    assert clipping.multiplier == pytest.approx((0.5**-2 - 0.8**-2) ** -0.5)  # Andrew et al. 2021, Theorem 1
    noised = torch.zeros(5)
    clipping.add_noise(noised, 6)  # by the norm of its own round
    drawn = Streams(0).generator(Purpose.DP_NOISE, 6, 0).standard_normal(5, np.float32)
    assert noised.numpy() == pytest.approx(drawn * clipping.multiplier * norm / 7, rel=1e-5)
    with pytest.raises(UserError, match="count_noise = 0.35 leaves no ε"):
        run(*settings, "privacy.noise_multiplier=0.7", "privacy.adaptive_clip=true")


def test_noise_of_trees_adds_up_to_their_nodes_in_a_run():
    """Updates of a tiny learning rate vanish beside the noise; 16 clients by 3 are 5 rounds in each tree."""
    settings = (*SMALL, "clients.sampler=shuffled", "clients.count=3", "rounds=12", "local.lr=1e-30")
    settings += ("privacy.clip_norm=2", "privacy.noise_multiplier=1.5", "privacy.noise=tree", "server.weights=uniform")
    found, released = run(*settings), 0.0
    for first, leaves in ((0, 5), (5, 5), (10, 2)):
        last = 0
        for level in reversed(range(4)):  # the nodes of a prefix, largest first
            if leaves >> level & 1:
                last += 2**level
                stream = Streams(0).generator(Purpose.DP_NOISE, first + last - 1, level)
                released = released + stream.standard_normal(len(found.model), np.float32)
    noise = (found.model - found.start).double().numpy() / (1.5 * 2 / 3)
    assert np.allclose(noise, released, atol=1e-4)
    exact = gaussian_epsilon(2 * np.sqrt(3 + 3 + 2) / 1.5, 1e-5)  # nodes with one client's updates
    assert exact <= found.records[-1]["update_epsilon"] <= exact * 1.15
    records = run(*settings, "logging.participants=true").records
    for first in (0, 5):
        used = np.concatenate([clients_from_text(one["clients"]) for one in records[first : first + 5]])
        assert len(np.unique(used)) == 15


def test_running_statistics_are_rejected_beside_noise(shards: dict[str, Path]):
    with pytest.raises(UserError, match="batch norm"):
        released(shards, "as they are", 0, *ALL, "model.name=tests.end_to_end.user_models:normed")
