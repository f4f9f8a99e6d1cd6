"""Client-level privacy: updates are bounded, the noise is the same on every rank, ε agrees with theory."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from fedmpi import UserError
from fedmpi.common.streams import Streams
from fedmpi.privacy.updates import GaussianAccountant, TreeAccountant, _leading, add_noise, clip, tree_nodes


def test_long_updates_are_shortened_to_the_norm_and_short_ones_left_alone():
    long, was_clipped = clip(torch.tensor([3.0, 4.0]), 1.0)
    assert was_clipped and long.tolist() == pytest.approx([0.6, 0.8])
    assert not clip(torch.tensor([3.0, 4.0]), 5.0)[1]
    short, was_clipped = clip(torch.tensor([0.3, 0.4]), 1.0)
    assert not was_clipped and short.tolist() == pytest.approx([0.3, 0.4])


def test_the_nodes_of_a_tree_are_those_of_the_binary_digits():
    covered = set()
    for leaf in range(1, 70):
        for sign, level, last in tree_nodes(leaf):
            change = covered.add if sign > 0 else covered.remove
            change((last - 2**level + 1, last))
        assert len(covered) == leaf.bit_count()
        assert sorted(one for first, last in covered for one in range(first, last + 1)) == list(range(1, leaf + 1))
        assert all(first % (last - first + 1) == 1 % (last - first + 1) for first, last in covered), "nodes of one tree"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_without_a_norm_is_rejected(bad: float):
    with pytest.raises(FloatingPointError, match=r"local\.lr"):
        clip(torch.tensor([1.0, bad]), 1.0)


def test_the_noise_is_normal_with_the_stated_deviation():
    """Kolmogorov-Smirnov over 200,000 coordinates at 1e-6."""
    noise = add_noise(torch.zeros(200_000), Streams(4), 0, 2.0 * 0.5 * 0.1)
    assert stats.kstest(noise.double().numpy() / 0.1, "norm").pvalue > 1e-6


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of the Gaussian mechanism whose sensitivity is μ standard deviations (Balle and Wang 2018, Theorem 8)."""

    def excess(epsilon: float) -> float:
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)) - delta

    return float(optimize.brentq(excess, 0.001, 200))


def sampled_epsilon(rate: float, sigma: float, rounds: int, delta: float) -> float:
    """ε that a pair of neighbors attains: all send −C, or one client, in a sample with probability `rate`, sends +C.

    The privacy loss of (1 − q) N(0, σ²) + q N(2, σ²) against N(0, σ²), put on a grid and convolved with itself.
    """
    x = np.linspace(-12 * sigma, 2 + 12 * sigma, 400_001)
    minus = stats.norm.pdf(x, 0, sigma)
    plus = (1 - rate) * minus + rate * stats.norm.pdf(x, 2, sigma)
    step, reach = 1e-3, 60.0
    bins = int(2 * reach / step)
    loss = np.floor(np.log(plus / minus) / step)  # rounded down: what comes out is no more than the truth
    masses = np.bincount((loss + bins // 2).astype(int), plus / plus.sum(), bins)
    whole = np.fft.irfft(np.fft.rfft(np.roll(masses, -(bins // 2))) ** rounds, bins)
    losses, masses = (np.arange(bins) - bins // 2) * step, np.roll(whole, bins // 2).clip(0)

    def excess(epsilon: float) -> float:
        beyond = losses > epsilon
        return float((masses[beyond] * -np.expm1(epsilon - losses[beyond])).sum()) - delta

    return float(optimize.brentq(excess, 0.0, reach - 1))


@pytest.mark.parametrize("sigma, rounds", [(1.0, 1), (4.0, 10)])
def test_epsilon_without_sampling_is_that_of_a_sum_that_moves_by_two_norms(sigma: float, rounds: int):
    """T rounds of the Gaussian mechanism are one with σ/√T. At σ = 1, T = 1 the exact ε is 10.0, Rényi's bound 10.7."""
    pytest.importorskip("dp_accounting")
    accountant = GaussianAccountant(sigma, 1e-5, 50)
    for _ in range(rounds):
        accountant.spend(50, 50)
    exact = gaussian_epsilon(2 * math.sqrt(rounds) / sigma, 1e-5)
    assert exact <= accountant.epsilon() <= exact * 1.1


@pytest.mark.parametrize("sigma, restart, rounds", [(6.0, 5, 12), (4.0, 1, 3), (8.0, 100, 64)])
def test_epsilon_of_trees_is_that_of_the_nodes_with_one_clients_update(sigma: float, restart: int, rounds: int):
    """Counted leaf by leaf: the largest number of released nodes over one leaf, summed over the trees."""
    pytest.importorskip("dp_accounting")
    accountant = TreeAccountant(sigma, 1e-5, 50, restart)
    for round in range(rounds):
        accountant.spend(3, 50)
        if round == 6:
            state = accountant.state()
            accountant = TreeAccountant(sigma, 1e-5, 50, restart)
            accountant.load(state)
    nodes = 0
    for first in range(0, rounds, restart):
        leaves = min(restart, rounds - first)
        released = [(last - 2**level + 1, last) for leaf in range(1, leaves + 1) for _, level, last in tree_nodes(leaf)]
        nodes += max(sum(a <= leaf <= b for a, b in set(released)) for leaf in range(1, leaves + 1))
    exact = gaussian_epsilon(2 * math.sqrt(nodes) / sigma, 1e-5)
    assert exact <= accountant.epsilon() <= exact * 1.15


@pytest.mark.parametrize("sigma, drawn, rounds", [(1.0, 100, 1), (2.0, 100, 20), (4.0, 10, 100)])
def test_epsilon_of_a_fixed_sample_covers_neighbors_that_differ_in_one_client(sigma: float, drawn: int, rounds: int):
    dp = pytest.importorskip("dp_accounting")
    accountant = GaussianAccountant(sigma, 1e-5, 1000)
    for _ in range(rounds):
        accountant.spend(drawn, 1000)
    attained = sampled_epsilon(drawn / 1000, sigma, rounds, 1e-5)
    poisson = dp.rdp.RdpAccountant().compose(dp.PoissonSampledDpEvent(drawn / 1000, dp.GaussianDpEvent(sigma)), rounds)
    whole = gaussian_epsilon(2 * math.sqrt(rounds) / sigma, 1e-5)
    assert poisson.get_epsilon(1e-5) < attained <= accountant.epsilon() < whole


def test_sampling_never_costs_more_than_no_sampling_and_no_noise_is_no_privacy():
    """If half of all clients are selected, the bound for samples is 17 % above the one without, after 100 rounds."""
    pytest.importorskip("dp_accounting")
    sampled, whole, silent = (GaussianAccountant(noise, 1e-5, 1000) for noise in (1.0, 1.0, 0.0))
    for _ in range(100):
        sampled.spend(500, 1000)
        whole.spend(1000, 1000)
    silent.spend(10, 1000)
    assert sampled.epsilon() <= whole.epsilon() < math.inf == silent.epsilon()


def test_rates_that_change_with_the_available_clients_are_rounded_up_and_few():
    pytest.importorskip("dp_accounting")
    rounded, below, above = (GaussianAccountant(2.0, 1e-5, clients) for clients in (10_000, 8999, 8830))
    rounded.spend(900, 8999)
    below.spend(900, 8999)
    above.spend(900, 8830)
    assert below.epsilon() < rounded.epsilon() < above.epsilon()
    assert {_leading(present) for present in range(64)} == set(range(64))
    assert len({_leading(present) for present in range(4096, 8192)}) == 64
    assert all(0 <= present - _leading(present) < present / 64 for present in range(1, 10_000))


def test_epsilon_grows_with_rounds_and_sampling_and_survives_a_checkpoint():
    pytest.importorskip("dp_accounting")
    accountant = GaussianAccountant(1.0, 1e-5, 1000)
    accountant.spend(0, 0)
    assert accountant.epsilon() == 0
    spent = []
    for drawn in (0, 10, 10, 1000):
        accountant.spend(drawn, 1000)
        spent.append(accountant.epsilon())
    assert spent[0] == 0 and spent[0] < spent[1] < spent[2] < spent[3]
    resumed = GaussianAccountant(1.0, 1e-5, 1000)
    resumed.load(accountant.state())
    assert resumed.epsilon() == spent[-1]


def test_a_missing_accountant_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'fedmpi\[dp\]'"):
        GaussianAccountant(1.0, 1e-5, 10)
