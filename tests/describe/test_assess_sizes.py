"""The assessment before a run agrees with what the mechanisms then do."""

import math

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fedmpi import UserError
from fedmpi.cli import app
from fedmpi.common.streams import Streams
from fedmpi.describe.estimates import advice, assess
from fedmpi.privacy.sizes import answer_stream, estimate_total, sampling_probability

SIZES = np.concatenate([np.resize([1, 2, 3], 500), np.full(20, 60)]).astype(np.int64)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bias_deviation_and_saturation_agree_with_500_simulated_rounds(place: int):
    """z-test of the mean and χ² of the variance at 1e-6. The probabilities come from a normal approximation: binomial
    tests at 1e-6 after widening by 0.02 for its error (Berry-Esseen over 520 answers)."""
    one, trials = assess(SIZES, 2.0, 40, 1000)[place], 500
    found = [estimate_total(one.mechanism, SIZES, 2.0, 40, answer_stream(Streams(8), t, False)) for t in range(trials)]
    raw = np.array([f.raw for f in found])
    assert found[0].standard_deviation == pytest.approx(one.standard_deviation)
    z = (raw.mean() - SIZES.sum() - one.bias) / (one.standard_deviation / math.sqrt(trials))
    assert abs(z) < stats.norm.isf(5e-7)
    tail = stats.chi2.cdf((trials - 1) * raw.var(ddof=1) / one.standard_deviation**2, trials - 1)
    assert 5e-7 < tail < 1 - 5e-7
    saturated = np.mean([sampling_probability(1000, f.total) == 1 for f in found])
    floored = np.mean([f.raw < f.asked for f in found])
    for observed, stated in ((saturated, one.saturation_probability), (floored, one.floor_probability)):
        spread = stats.norm.isf(5e-7) * math.sqrt(max(stated * (1 - stated), 1e-3) / trials)
        assert abs(observed - stated) < spread + 0.02
    drawn = np.array([SIZES.sum() * sampling_probability(1000, f.total) for f in found])
    within = np.mean((drawn >= one.drawn[0] * 0.999) & (drawn <= one.drawn[1] * 1.001))
    assert within > 0.9 - 0.02 - stats.norm.isf(5e-7) * math.sqrt(0.09 / trials)


@pytest.mark.parametrize(
    ("sizes", "epsilon", "threshold", "wanted", "said"),
    [
        (np.full(10, 600), 3.0, 100, 2048, "samples.size.max_size above 100"),
        (np.full(20, 2), 0.1, 300, 10, "epsilon"),
        (np.resize([1, 2, 3], 100_000), 3.0, 300, 2048, "duchi"),
        (np.repeat([0, 20], [5000, 50]), 6.0, 30, 100, "without samples"),
    ],
)
def test_the_advice_names_what_goes_wrong(sizes: np.ndarray, epsilon: float, threshold: int, wanted: int, said: str):
    found = assess(sizes, epsilon, threshold, wanted)
    assert said in advice(found, threshold)
    errors = [one.relative_error for one in found]
    assert errors == sorted(errors)


def test_bias_is_what_clipping_hides_and_one_for_each_empty_client():
    one = assess(SIZES, 2.0, 40, 1000)[0]
    assert one.bias == 20 * (39 - 60) and one.clipped_fraction == pytest.approx(20 / 520)
    assert assess(np.array([39, 40]), 2.0, 40, 10)[0].clipped_fraction == 0.5
    assert assess(np.repeat([0, 20], [5000, 50]), 6.0, 30, 100)[0].bias == 5000


def test_fewer_clients_asked_leave_a_larger_relative_error():
    sizes = np.resize([1, 2, 3], 900)
    everybody = {one.mechanism: one for one in assess(sizes, 3.0, 10, 50)}
    for one in assess(sizes, 3.0, 10, 50, participants=9):
        whole = everybody[one.mechanism]
        assert (one.clients, one.samples) == (9, 18)
        assert one.standard_deviation == pytest.approx(whole.standard_deviation / 10)
        assert one.relative_error == pytest.approx(10 * whole.relative_error)


@pytest.mark.parametrize(("sizes", "participants"), [([1, 1, 2], 1), ([3] * 10 + [4] * 3, 7)])
def test_participants_whose_mean_total_is_no_whole_number_are_not_taken_for_clipped_or_empty(
    sizes: list[int], participants: int
):
    found = assess(np.array(sizes), 60.0, 100, 5, participants)
    assert [one.bias for one in found] == [0, 0, 0]
    assert found[0].relative_error < 1e-6
    assert "samples.size.estimate" in advice(found, 100)


COMMAND = ["estimate", "--sizes", "digits:clients=30", "--epsilon", "3", "--threshold"]


def test_the_command_assesses_every_mechanism_on_the_users_clients():
    done = CliRunner().invoke(app, [*COMMAND, "20", "--participants", "5"], env={"COLUMNS": "160"})
    assert done.exit_code == 0
    for words in ("5 clients, 240 samples: ε = 3, M = 20, K = 24", "randomized-response", "duchi", "piecewise"):
        assert words in done.stdout
    assert "clipped clients: 96.7%" in done.stdout and "max_size above 20" in done.stdout


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--wanted=0", "budget per round is 0"),
        ("--participants=31", "Choose 1 to 30"),
        ("--epsilon=0", "samples.size.epsilon"),
    ],
)
def test_wrong_settings_are_user_errors(option: str, words: str):
    with pytest.raises(UserError, match=words):
        app([*COMMAND, "300", option], standalone_mode=False)
