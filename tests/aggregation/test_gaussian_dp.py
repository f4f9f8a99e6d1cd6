"""Client-level privacy: updates are bounded, the noise is the same on every rank, ε agrees with theory."""

import builtins
import math

import pytest
import torch
from scipy import optimize, stats

from fedmpi.aggregation.gaussian_dp import METHODS, GaussianAccountant, add_noise, clip
from fedmpi.errors import UserError
from fedmpi.streams import Streams


def test_long_updates_are_shortened_to_the_norm_and_short_ones_left_alone():
    long, was_clipped = clip(torch.tensor([3.0, 4.0]), 1.0)
    assert was_clipped and long.tolist() == pytest.approx([0.6, 0.8])
    short, was_clipped = clip(torch.tensor([0.3, 0.4]), 1.0)
    assert not was_clipped and short.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_without_a_norm_is_refused(bad: float):
    with pytest.raises(FloatingPointError, match=r"local\.lr"):
        clip(torch.tensor([1.0, bad]), 1.0)


def test_the_noise_depends_on_seed_and_round_alone():
    first, second, later = (add_noise(torch.zeros(1000), Streams(4), t, 2.0, 0.5) for t in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, later)


def test_the_noise_is_normal_with_the_stated_deviation():
    """Kolmogorov-Smirnov over 200,000 coordinates at 1e-6."""
    noise = add_noise(torch.zeros(200_000), Streams(4), 0, noise_multiplier=2.0, norm=0.5, largest_coefficient=0.1)
    assert stats.kstest(noise.double().numpy() / 0.1, "norm").pvalue > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_without_subsampling_epsilon_bounds_the_exact_gaussian_mechanism(method: str):
    """T rounds of the Gaussian mechanism are one with σ/√T, whose δ(ε) is known (Balle and Wang 2018, Theorem 8)."""
    pytest.importorskip("dp_accounting")
    sigma, rounds, delta = 4.0, 10, 1e-5
    accountant = GaussianAccountant(sigma, delta, method)
    for _ in range(rounds):
        accountant.spend(1.0)
    mu = math.sqrt(rounds) / sigma

    def excess(epsilon: float) -> float:
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu) - delta

    exact = optimize.brentq(excess, 0.01, 50)
    assert exact * 0.999 <= accountant.epsilon() <= exact * 1.2


@pytest.mark.parametrize("method", METHODS)
def test_epsilon_grows_with_rounds_and_sampling_and_survives_a_checkpoint(method: str):
    pytest.importorskip("dp_accounting")
    accountant = GaussianAccountant(1.0, 1e-5, method)
    assert accountant.epsilon() == 0
    spent = []
    for probability in (0.0, 0.01, 0.01, 0.1):
        accountant.spend(probability)
        spent.append(accountant.epsilon())
    assert spent[0] == 0 and spent[0] < spent[1] < spent[2] < spent[3]
    resumed = GaussianAccountant(1.0, 1e-5, method)
    resumed.load(accountant.state())
    assert resumed.epsilon() == spent[-1]


@pytest.mark.parametrize("method", METHODS)
def test_without_noise_there_is_no_privacy(method: str):
    pytest.importorskip("dp_accounting")
    accountant = GaussianAccountant(0.0, 1e-5, method)
    accountant.spend(0.1)
    assert math.isinf(accountant.epsilon())


def test_a_missing_accountant_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without_dp_accounting(name: str, *rest: object, **named: object) -> object:
        if name == "dp_accounting":
            raise ImportError(name)
        return real(name, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_dp_accounting)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[dp\]'"):
        GaussianAccountant(1.0, 1e-5)


@pytest.mark.parametrize("wrong", [(-1.0, 1e-5, "rdp"), (1.0, 0.0, "rdp"), (1.0, 1.0, "rdp"), (1.0, 1e-5, "moments")])
def test_settings_out_of_range_are_the_users_error(wrong: tuple[float, float, str]):
    with pytest.raises(UserError, match="privacy"):
        GaussianAccountant(*wrong)
