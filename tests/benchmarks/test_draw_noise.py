"""The closed form of `benchmarks.draw_noise` against every draw of a small example, one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.draw_noise import moments


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
