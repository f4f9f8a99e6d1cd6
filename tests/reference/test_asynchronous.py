"""Asynchronous rounds beside a plain loop in float64: FedAsync (Xie et al. 2019), FedBuff (Nguyen et al. 2022), and a
server that steps in fixed periods.

The loop is written from Algorithm 1 of each paper, and shares nothing with the program but the samples, the module and
the keys of the random streams (`plain_data`). Cohorts are keyed by (step, fill), batches by (version + 2³² · number of
earlier starts from it, client).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import fedmpi
from fedmpi.config.loading import given_config
from tests.reference.plain_data import AVAILABILITY, COHORT, DEVICE, Network, Population, stream
from tests.reference.plain_loop import batches, train

BASE: dict[str, Any] = {
    "data.source": "digits:clients=12,alpha=0.5",
    "data.normalize": False,
    "model": "tests.reference.networks:double_perceptron",
    "local.engine": "sequential",
    "local.batch_size": 16,
    "local.epochs": 2,
    "local.lr": 0.1,
    "local.schedule": "inverse",
    "local.proximal_mu": 0.05,
    "rounds": 14,
    "devices.speed": "lognormal",
    "devices.power": True,
    "logging.participants": True,
    "cluster.threads": 1,
    "evaluation.every": 100,
    "server.weights": "uniform",
    "topology": "async",
    "topology.in_flight": 5,
}


class Plain:
    """Plain simulation of a run: `x` is the global model, `clock` the simulated time, `flying` the starts in flight."""

    def __init__(self, settings: dict[str, Any]):
        self.config = given_config({}, settings)
        self.people, self.seed = Population(self.config), self.config.seed
        self.network = Network(self.config, self.people.description)
        self.clock, self.step, self.started = 0.0, 0, 0
        self.flying: list[tuple[float, int, int, int, int, bool]] = []
        self.events: list[tuple[int, float, str, int, int]] = []
        normals = stream(self.seed, DEVICE, 0, 0).standard_normal(self.people.clients)
        self.speed, self.deadline = 1000 * np.exp(normals), self.config.devices.deadline or np.inf
        self.joules, self.facts = np.zeros(self.config.rounds), list[dict[str, float]]()

    def fill(self, turn: int, values: int) -> None:
        """Send the model to idle clients, drawn uniformly."""
        busy = {client for _, _, client, *_ in self.flying}
        idle = [k for k in range(self.people.clients) if k not in busy]
        places = min(self.config.topology.in_flight - len(busy), len(idle))
        generator = stream(self.seed, COHORT, self.step, turn)
        chosen = range(len(idle))
        if places < len(idle):
            chosen = sorted(generator.choice(len(idle), places, replace=False, shuffle=False).tolist())
        rate = self.config.clients.failure_rate
        fate = stream(self.seed, AVAILABILITY, self.step + (turn << 32), 1).random(self.people.clients)
        for k in (idle[i] for i in chosen):
            times = 4 * values / 4e6, 2 * self.people.sizes[k] / self.speed[k], 4 * values / 1e6
            late, failed = sum(times) > self.deadline, fate[k] < rate
            end = self.clock + min(sum(times), self.deadline)
            row = end, self.started, k, self.step, self.repeats[k], late | failed
            left = min(sum(times[: 2 if failed else 3]), self.deadline)
            for part, watts in zip(times, (1, 3, 1), strict=True):
                self.joules[self.step] += watts * min(part, left)
                left -= min(part, left)
            self.flying.append(row)
            self.repeats[k] += 1
            self.started += 1
            self.events.append((self.step, self.clock, "start", k, self.step))

    def arrivals(self, values: int) -> list[tuple[int, int, int]]:
        """Client, version and repeat of each update that enters the next step."""
        topology, found, turn = self.config.topology, [], 0
        self.repeats = Counter[int]()
        end = np.inf if topology.period is None else topology.period * (self.step + 1)
        while len(found) < (topology.buffer or np.inf):
            self.flying.sort()
            same_time = self.flying and self.flying[0][0] == self.clock
            if len(self.flying) < topology.in_flight and self.clock < end and not same_time:
                self.fill(turn, values)
                self.flying.sort()
                turn += 1
            if self.flying[0][0] > end:
                self.clock = end
                break
            self.clock, _, k, version, repeat, lost = self.flying.pop(0)
            self.events.append((self.step, self.clock, "lost" if lost else "arrival", k, version))
            found += [] if lost else [(k, version, repeat)]
        return found

    def trained(self, x: np.ndarray, k: int, version: int, repeat: int) -> np.ndarray:
        """The change of client k in its epochs of SGD on ℓ + μ/2 ‖w − x‖²."""
        key, (images, labels) = version + (repeat << 32), self.people.rows(k, None)
        steps = batches(self.config, key, k, len(labels))
        return train(self.config, key, k, x, images, labels, steps, self.network).change

    def run(self, rule: Any) -> np.ndarray:
        """The last global model; `rule` is s(staleness)."""
        x, history, rate = self.network.initial, [], self.config.server.optimizer.options["lr"]
        d = self.network.trainable
        for step in range(self.config.rounds):
            self.step = step
            history.append(x)
            due = self.arrivals(len(x))
            late, models = [step - v for _, v, _ in due], {v for _, _, _, v, _, lost in self.flying if not lost}
            self.facts.append({"participants": len(due), "in_flight": len(self.flying), "versions": len(models)})
            self.facts[-1] |= {"staleness_mean": sum(late) / len(due), "staleness_max": max(late)} if due else {}
            ends = [(self.trained(history[v], k, v, r), history[v], rule(step - v)) for k, v, r in due]
            if self.config.topology.average == "models":
                [(change, old, s)] = ends  # Xie et al. 2019, Algorithm 1: x_t ← (1 − α_t) x_{t−1} + α_t x_new
                x = (1 - rate * s) * x + rate * s * (old + change)
            elif ends:  # Nguyen et al. 2022, Algorithm 1: w ← w − η_g Δ̄, Δ̄ = Σ s Δ_i / K; buffers are averaged
                weights = rate * sum(s * change[:d] for change, _, s in ends)
                buffers = sum(s * (old + change - x)[d:] for change, old, s in ends)
                x = x + np.concatenate([weights, buffers]) / len(ends)
        return x


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "fedasync": (
        {"buffer": 1, "average": "models", "staleness": {"name": "hinge", "a": 0.5, "b": 2}},
        {"rounds": 40},
        lambda staleness: 1.0 if staleness <= 2 else 1 / (0.5 * (staleness - 2) + 1),
    ),
    "fedbuff": (
        {"buffer": 7},
        {"model.norm": True, "local.batch_size": "all"},
        lambda staleness: (1 + staleness) ** -0.5,
    ),
    "period": (
        {"period": 0.3},
        {"clients.failure_rate": 0.3, "devices.deadline": 0.5},
        lambda staleness: (1 + staleness) ** -0.5,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_the_loop_of_its_paper(kind: str) -> None:
    topology, more, rule = KINDS[kind]
    settings = BASE | {"server.optimizer.lr": 0.6} | {f"topology.{name}": one for name, one in topology.items()} | more
    plain = Plain(settings)
    run, wanted = fedmpi.run(settings), plain.run(rule)
    events = list(zip(*(run.events[name] for name in ("round", "event", "client", "version")), strict=True))
    assert events == [(step, event, client, version) for step, _, event, client, version in plain.events]
    np.testing.assert_allclose(run.events["seconds"], [seconds for _, seconds, *_ in plain.events], rtol=1e-12)
    np.testing.assert_allclose([record["joules"] for record in run.records], plain.joules, rtol=1e-12)
    for record, facts in zip(run.records, plain.facts, strict=True):
        assert {name: record[name] for name in facts} == pytest.approx(facts)
        sent = record.get("bytes_client_up", 0) + record.get("bytes_client_down", 0)
        assert sum(record["invited_bytes"]) == sent
        assert sum(record["invited_joules"]) == pytest.approx(record["joules"], rel=1e-12)
    starts = Counter((client, version) for _, _, event, client, version in plain.events if event == "start")
    assert max(starts.values()) > 1 or kind == "fedasync"
    assert max(record.get("staleness_max", 0) for record in run.records) > 1
    values = [*run.model.parameters(), *(one for one in run.model.buffers() if one.is_floating_point())]
    found = torch.nn.utils.parameters_to_vector(values).detach()
    assert found.dtype == torch.float64
    assert np.linalg.norm(found.numpy() - wanted) <= 1e-10 * np.linalg.norm(wanted)
