"""FedBalancer and importance sampling of samples against plain loops written from the papers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from fedmpi.common.registry import resolve
from fedmpi.common.streams import Purpose, Streams
from fedmpi.samples.rules import RowClient

ROUNDS, CLIENTS = 100, 5


def clients_of(budgeted: bool) -> Iterator[RowClient]:
    """Yield clients of different sizes whose numbers change with the round; two samples have equal numbers."""
    for t in range(ROUNDS):
        for k in range(CLIENTS):
            draws, size = np.random.default_rng([7, t, k]), 3 + 9 * k
            values = draws.lognormal(-t / 50, 1, size)
            values[1] = values[0]
            values[2] *= k > 0
            expected = size * (0.1 + (t % 10) / 10) if budgeted else float(size)
            measured = {"sample_loss": values, "sample_gradient_norm": values}
            yield RowClient(k, t, np.zeros(size, np.int64), generator_of(t, k), expected, measured)


def generator_of(t: int, k: int) -> np.random.Generator:
    return Streams(3).generator(Purpose.ROWS, t, k)


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("under, noise", [(0.0, 0.0), (0.3, 0.2), (1.0, 0.0)])
def test_fedbalancer_selects_as_a_plain_loop(budgeted: bool, under: float, noise: float) -> None:
    rule = resolve("data sampler", "fedbalancer").make({"window": 10, "step": 0.2, "under": under, "noise": noise})
    for client in clients_of(budgeted):
        generator = generator_of(client.round, client.index)
        loss = client.fresh("sample_loss").tolist()
        noise_low, noise_high = generator.standard_normal(), generator.standard_normal()
        place = 0.8 * (len(loss) - 1)
        one, two = sorted(loss)[math.floor(place)], sorted(loss)[math.ceil(place)]
        low = min(loss) + noise * noise_low
        high = one + (place - math.floor(place)) * (two - one) + noise * noise_high
        ratio = min(1.0, sum(0.2 for t in range(20, client.round + 1) if t % 10 == 0))
        threshold = min(low + ratio * (high - low), max(loss))
        over = [i for i, value in enumerate(loss) if value >= threshold]
        rest = [i for i, value in enumerate(loss) if value < threshold]
        length = len(over)
        if client.expected < len(loss) and math.floor(client.expected) > length:
            length = math.floor(client.expected)
        from_rest = math.floor(round(length * under, 6))
        from_over = length - from_rest
        if from_rest > len(rest):
            from_rest, from_over = len(rest), length - len(rest)
        elif from_over > len(over):
            from_over, from_rest = len(over), length - len(over)
        expected = {*generator.choice(over, from_over, replace=False).tolist()}
        expected |= {*generator.choice(rest, from_rest, replace=False).tolist()} if rest else set()
        assert rule(client).tolist() == sorted(expected)
        assert len(expected) == length >= 1


@pytest.mark.parametrize("budgeted", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 1.3])
def test_importance_of_samples_selects_as_a_plain_loop(budgeted: bool, threshold: float) -> None:
    rule = resolve("data sampler", "sample-importance").make({"share": 0.4, "threshold": threshold})
    important = 0
    for client in clients_of(budgeted):
        generator = generator_of(client.round, client.index)
        norm = client.fresh("sample_gradient_norm").tolist()
        g = [value / sum(norm) for value in norm]
        apart = sum((value - 1 / len(g)) ** 2 for value in g)
        tau = 1 / math.sqrt(1 - apart / sum(value**2 for value in g))
        weight = g if tau > threshold else [1.0] * len(g)
        important += tau > threshold
        arrival = [generator.standard_exponential() for _ in g]
        arrival = [time / w if w else math.inf for time, w in zip(arrival, weight, strict=True)]
        count = min(len(g), max(1, math.floor(0.4 * client.expected + 0.5)))
        first = sorted(range(len(g)), key=lambda i: arrival[i])[:count]
        assert rule(client).tolist() == sorted(first)
    assert 0 < important <= ROUNDS * CLIENTS and (important < ROUNDS * CLIENTS) == (threshold > 0)


def test_samples_without_gradients_are_drawn_uniformly() -> None:
    rule = resolve("data sampler", "sample-importance").make({"share": 0.5})
    client = RowClient(0, 0, np.zeros(6, np.int64), generator_of(0, 0), 6.0, {"sample_gradient_norm": np.zeros(6)})
    assert len(rule(client)) == 3
