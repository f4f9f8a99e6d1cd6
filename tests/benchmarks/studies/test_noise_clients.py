"""The error of a mean update against that of all clients."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.noise_clients import bias_and_error


def test_bias_is_the_length_of_the_mean_error_without_sampling_noise() -> None:
    """Two clients of unequal size, updates of length 2 and 1 at right angles; the first always counts 0.1 too much."""
    generator, sizes = np.random.default_rng(0), np.array([30.0, 10.0])
    wrong = np.array([0.1, -0.1]) + 0.5 * generator.normal(size=(20_000, 1)) * np.array([1.0, -1.0])
    bias, error = bias_and_error(wrong, np.diag([4.0, 1.0]), sizes)
    length = np.sqrt(4 * 0.75**2 + 0.25**2)
    assert bias == pytest.approx(0.1 * 5**0.5 / length, rel=0.1)
    assert error == pytest.approx((0.26 * 5) ** 0.5 / length, rel=0.03)
