"""Astraea's sets from labels alone: the law that is asked for is the one that is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.studies.letter_laws import BYMERGE, BYMERGE_STOCK, Population, row
from data_prep.partitions.astraea import class_shares
from fedmpi.data.statistics import kl_divergence


def test_a_population_has_its_totals_and_the_divergence_that_is_looked_for() -> None:
    population = Population(named=True, total=20_000, clients=40, sizes="even", digit_weight=0.25, skew=0.5)
    held = population.counts(seed=1, concentration=1.0)
    assert held.shape == (40, 47) and set(held.sum(axis=1)) == {500}
    shares = class_shares("letters", 47, BYMERGE, BYMERGE_STOCK, 0.25, 0.5)
    assert np.abs(held.sum(axis=0) - 20_000 * shares).max() < 1
    found = population.concentration(0.5)
    assert kl_divergence(population.counts(0, found)).mean() == pytest.approx(0.5, abs=0.01)


def test_a_row_tells_what_augmentation_takes_off() -> None:
    population = Population(named=True, total=20_000, clients=120, sizes="pareto", digit_weight=1.0, skew=1.0)
    cells = [float(cell.split(" ± ")[0]) for cell in row(population, 1.0, seeds=2, alpha=0.83, online=100, most=20)]
    pooled, clients, copied, counted, copied_off, counted_off = cells[:6]
    assert pooled == pytest.approx(0.277, abs=0.005), "set by the totals alone"
    assert copied_off == pytest.approx(clients - copied, abs=0.0011)
    assert counted_off == pytest.approx(clients - counted, abs=0.0011)
    assert cells[8:] == pytest.approx([37.9, 43.9, 53.2, 12.9, 18.9, 28.2], abs=0.5), "the shares of docs/results.md"
