"""FedSampling's size estimates: unbiased, private to exactly ε, with the variance they state (Eq 1-21, Lemma 3.1).

Statistical tests use fixed seeds; their docstrings state the chance of a false alarm.
"""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy import stats

from fedmpi import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.privacy.sizes import (
    Duchi,
    Mechanism,
    Piecewise,
    RandomizedResponse,
    answer_stream,
    clip_sizes,
    estimate_total,
    make_mechanism,
    sampling_probability,
    saturations,
)

PRIVATE = ("randomized-response", "duchi", "piecewise")
STREAMS = Streams(21)


def mixed_sizes(clients: int, threshold: int) -> np.ndarray:
    return STREAMS.generator(Purpose.PARTITION).integers(1, threshold, clients)


def raw_estimates(mechanism: str, sizes: np.ndarray, epsilon: float, threshold: int, trials: int) -> np.ndarray:
    rounds = range(trials)
    return np.array(
        [estimate_total(mechanism, sizes, epsilon, threshold, answer_stream(STREAMS, t, False)).raw for t in rounds]
    )


def answers_of(mechanism: Mechanism) -> np.ndarray:
    """Every answer a mechanism can give; for the piecewise one a grid and the ends of all windows."""
    if isinstance(mechanism, RandomizedResponse):
        return np.arange(1.0, mechanism.threshold)
    if isinstance(mechanism, Duchi):
        return np.array([-mechanism.magnitude, mechanism.magnitude])
    assert isinstance(mechanism, Piecewise)
    sizes = np.arange(1, mechanism.threshold)
    return np.concatenate([np.linspace(-mechanism.bound, mechanism.bound, 501), *mechanism.window(sizes)])


def likelihood_of(mechanism: Mechanism, sizes: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return the probability (or density) of every report given every size, (sizes, answers)."""
    if isinstance(mechanism, RandomizedResponse):  # Eq 17 and 18: α + (1 − α)/(M − 1) for the true size
        alpha, others = mechanism.truth_probability, mechanism.threshold - 1
        possible = (answers >= 1) & (answers <= others) & (answers == np.floor(answers))
        return (alpha * (sizes[:, None] == answers) + (1 - alpha) / others) * possible
    if isinstance(mechanism, Duchi):
        upper = 0.5 + mechanism.rescaled(sizes)[:, None] / (2 * mechanism.magnitude)
        lower = np.where(answers == -mechanism.magnitude, 1 - upper, 0.0)
        return np.where(answers == mechanism.magnitude, upper, lower)
    assert isinstance(mechanism, Piecewise)
    left, right = mechanism.window(sizes)
    inside = (answers >= left[:, None]) & (answers <= right[:, None])
    density = math.exp(mechanism.epsilon / 2) * math.tanh(mechanism.epsilon / 4) / 2  # (e^ε − e^{ε/2})/(2e^{ε/2} + 2)
    return density * np.where(inside, 1.0, math.exp(-mechanism.epsilon)) * (np.abs(answers) <= mechanism.bound)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize(("epsilon", "threshold"), [(0.5, 3), (3.0, 100), (3.0, 300), (8.0, 20)])
def test_the_worst_ratio_of_two_likelihoods_of_an_answer_is_exactly_e_to_the_epsilon(name, epsilon, threshold):
    """Eq 16, 19 and 20, from the probabilities."""
    mechanism = make_mechanism(name, epsilon, threshold)
    sizes = np.arange(1, threshold)
    likelihood = likelihood_of(mechanism, sizes, answers_of(mechanism))
    inside = likelihood.min(axis=0) > 0  # rounding may put the end of an outermost window outside [-C, C]
    ratio = likelihood.max(axis=0)[inside] / likelihood.min(axis=0)[inside]
    assert ratio.max() == pytest.approx(math.exp(epsilon), rel=1e-9)


@pytest.mark.parametrize("name", ["randomized-response", "duchi"])
def test_the_probabilities_of_all_answers_sum_to_one_and_decode_to_the_size(name: str):
    """Σ P = 1 and E[decoded] = n for every size, from the probabilities (Eq 5, 7)."""
    mechanism = make_mechanism(name, 2.0, 30)
    sizes, answers = np.arange(1, 30), answers_of(mechanism)
    likelihood = likelihood_of(mechanism, sizes, answers)
    decoded = np.array([mechanism.total(np.array([answer])) for answer in answers])
    assert likelihood.sum(axis=1) == pytest.approx(1)
    assert likelihood @ decoded == pytest.approx(sizes)
    assert likelihood @ decoded**2 - sizes**2 == pytest.approx(mechanism.variance(sizes))


def test_the_piecewise_density_integrates_to_one_the_size_and_the_stated_variance():
    mechanism = Piecewise(2.0, 30)
    sizes = np.arange(1, 30)
    edges = np.linspace(-mechanism.bound, mechanism.bound, 200_001)
    answers, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    density = likelihood_of(mechanism, sizes, answers) * width
    decoded = 15 + 14 * answers
    assert density.sum(axis=1) == pytest.approx(1, rel=1e-4)
    assert not likelihood_of(mechanism, sizes, mechanism.bound * np.array([-2.0, -1.001, 1.001, 2.0])).any()
    assert density @ decoded == pytest.approx(sizes, rel=1e-3, abs=1e-2)
    assert density @ decoded**2 - sizes**2 == pytest.approx(mechanism.variance(sizes), rel=1e-3)


@pytest.mark.parametrize("name", PRIVATE)
def test_answers_follow_the_stated_likelihoods(name: str):
    """χ² of 200,000 answers of one size at 1e-6 per mechanism."""
    mechanism, size, draws = make_mechanism(name, 1.5, 12), 4, 200_000
    answers = mechanism.answer(np.full(draws, size), STREAMS.generator(Purpose.SIZE_ANSWER))
    if isinstance(mechanism, Piecewise):
        left, right = (float(end[0]) for end in mechanism.window(np.array([size])))
        edges = np.unique([*np.linspace(-mechanism.bound, mechanism.bound, 25), left, right])
        middles = (edges[1:] + edges[:-1]) / 2
        observed = np.histogram(answers, edges)[0]
        expected = likelihood_of(mechanism, np.array([size]), middles)[0] * np.diff(edges) * draws
    else:
        possible = answers_of(mechanism)
        observed = np.array([(answers == answer).sum() for answer in possible])
        expected = likelihood_of(mechanism, np.array([size]), possible)[0] * draws
    assert observed.sum() == draws
    assert stats.chisquare(observed, expected).pvalue > 1e-6


@pytest.mark.parametrize("name", PRIVATE)
def test_the_estimate_is_unbiased_and_spreads_as_its_closed_form_says(name: str):
    """Eq 7 when nothing is clipped: z-test of the mean and χ² of the variance over 400 rounds, 1e-6 each."""
    sizes, trials = mixed_sizes(2000, 60), 400
    raw = raw_estimates(name, sizes, 3.0, 60, trials)
    stated = estimate_total(name, sizes, 3.0, 60, answer_stream(STREAMS, 0, False)).standard_deviation
    z = (raw.mean() - sizes.sum()) / (stated / math.sqrt(trials))
    assert abs(z) < stats.norm.isf(5e-7)
    ratio = stats.chi2.cdf((trials - 1) * raw.var(ddof=1) / stated**2, trials - 1)
    assert 5e-7 < ratio < 1 - 5e-7


@pytest.mark.parametrize("name", PRIVATE)
def test_the_error_of_the_sampling_probability_falls_with_the_number_of_clients(name: str):
    """Lemma 3.1: for a fixed K the mean square error of p falls like N^-3 (the leading term of Eq 13), and that of the
    number of samples drawn, Corollary 3.1, like 1/N. Slopes over two decades from 200 rounds each have a standard error
    near 0.03; the band of 0.2 is left by chance less than once in 1e6 seeds."""
    clients, wanted = np.array([1000, 8000, 64_000]), 500
    errors_of_p, errors_of_drawn = [], []
    for n in clients:
        sizes = np.resize([1, 2, 3, 4], n)
        total = np.maximum(raw_estimates(name, sizes, 3.0, 10, 200), n)
        errors_of_p.append(np.mean((wanted / total - wanted / sizes.sum()) ** 2))
        errors_of_drawn.append(np.mean((wanted * sizes.sum() / total - wanted) ** 2))
    assert np.polyfit(np.log(clients), np.log(errors_of_p), 1)[0] == pytest.approx(-3, abs=0.2)
    assert np.polyfit(np.log(clients), np.log(errors_of_drawn), 1)[0] == pytest.approx(-1, abs=0.2)


def test_unclipped_randomized_response_is_unbiased_but_gives_large_clients_away():
    """z-test over 400 rounds at 1e-6."""
    sizes = np.array([5] * 90 + [1000] * 10)
    found = [
        estimate_total("randomized-response", sizes, 3.0, 50, answer_stream(STREAMS, t, False), clip=False)
        for t in range(400)
    ]
    z = (np.mean([one.raw for one in found]) - sizes.sum()) / (found[0].standard_deviation / 20)
    assert abs(z) < stats.norm.isf(5e-7)
    assert found[0].unprotected == 10
    assert "privacy" in saturations(found[0], 10, 50)["unclipped"]


@pytest.mark.parametrize(("mechanism", "clip"), [*((name, True) for name in PRIVATE), (PRIVATE[0], False)])
def test_an_empty_client_answers_as_one_with_a_single_sample(mechanism: str, clip: bool):
    def answered(sizes: list[int]) -> float:
        return estimate_total(mechanism, np.array(sizes), 2.0, 20, answer_stream(STREAMS, 3, False), clip).raw

    assert answered([0, 7, 0, 5] * 10) == answered([1, 7, 1, 5] * 10)  # some of them answer truthfully
    found = estimate_total(mechanism, np.array([0, 7, 0, 5]), 2.0, 20, answer_stream(STREAMS, 3, False), clip)
    assert found.unprotected == 0 and not saturations(found, 1, 20)


@pytest.mark.parametrize("threshold", [3, 300])
@pytest.mark.parametrize("epsilon", [1e-3, 3.0, 44.0, 200.0])
def test_variances_hold_at_every_epsilon(epsilon: float, threshold: int):
    """The closed forms in 400 decimal digits, written from the mechanisms' definitions as second moments."""
    sizes = np.unique([1, 2, threshold // 2, threshold - 1])
    with localcontext(prec=400):
        e, m = Decimal(epsilon).exp(), Decimal(threshold)
        root = e.sqrt()
        for place, n in enumerate(map(Decimal, sizes.tolist())):
            alpha = (e - 1) / (e + m - 2)
            mean = alpha * n + (1 - alpha) * m / 2
            second = alpha * n * n + (1 - alpha) * m * (2 * m - 1) / 6
            t, unit = (n - m / 2) / (m / 2 - 1), (m / 2 - 1) ** 2
            expected = {
                "randomized-response": (second - mean * mean) / (alpha * alpha),
                "duchi": (((e + 1) / (e - 1)) ** 2 - t * t) * unit,
                "piecewise": (t * t / (root - 1) + (root + 3) / (3 * (root - 1) ** 2)) * unit,
            }
            for name, variance in expected.items():
                found = make_mechanism(name, epsilon, threshold).variance(sizes)[place]
                assert found > 0
                assert found == pytest.approx(float(variance), rel=1e-9)


def test_a_saturated_run_names_which_setting_to_change():
    """FedSTaS's own setting: 600 samples per client, M = 100, K = 2048: p is 1 and every client is clipped."""
    found = estimate_total("randomized-response", np.full(10, 600), 3.0, 100, answer_stream(STREAMS, 0, False))
    by_kind = saturations(found, 2048, 100)
    assert sampling_probability(2048, found.total) == 1
    assert set(by_kind) == {"probability", "clipping"}
    assert "probability" in saturations(found, math.ceil(found.total), 100)
    assert "probability" not in saturations(found, math.ceil(found.total) - 1, 100)
    assert "raise samples.size.max_size (now 100)" in by_kind["probability"] and "max_size" in by_kind["clipping"]
    assert clip_sizes(np.array([0, 5, 99]), 10).tolist() == [1, 5, 9]
    for wrong in (("duchi", 0.0, 10), ("piecewise", 1.0, 2)):
        with pytest.raises(UserError):
            make_mechanism(*wrong)
    well = estimate_total("exact", np.full(10, 600), 3.0, 100, answer_stream(STREAMS, 0, False))
    assert saturations(well, 2048, 100) == {}
