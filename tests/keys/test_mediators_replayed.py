"""A run with mediators is Astraea's Algorithm 1 line by line, in float64: models, and what the record says of them.

Participants, rows and coefficients come from the plain loop of stars (`tests/reference/plain_loop.py`), the groups from
the run; who belongs together is judged by `tests/mediators`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedmpi.config import load_config
from fedmpi.mediators.relay import visiting_order
from tests.keys.watched import QUIET, Watcher
from tests.reference.compare import same
from tests.reference.plain_loop import DROPOUT, PlainLoop, batches, sampled_rows, stream

EPOCH_BITS, SCHEDULE = 32, 12
SEVERAL = "topology=mediators topology.clients_per_mediator=3 topology.epochs=2"
SMALL = "model.hidden=[6] model.activation=tanh model.dropout=0.3 rounds=3"
COMPOSITIONS = {
    "SGD with a proximal pull, after drop-outs, timed, moved by a server's Adam": (
        f"{SMALL} clients.sampler=uniform clients.count=8 local.proximal_mu=0.5 clients.failure_rate=0.2 "
        "clients.availability=bernoulli clients.availability.probability=0.8 devices=true devices.speed=lognormal "
        "server.weights=uniform server.optimizer=adam server.optimizer.lr=0.02",
        SEVERAL,
    ),
    "Adam whose memory goes along, on copies that do not weigh": (
        f"{SMALL} clients.sampler=uniform clients.count=7 local.optimizer=adam local.lr=0.01 "
        "local.optimizer.epsilon=1e-3 rebalance=true rebalance.weights=original",
        f"{SEVERAL} topology.keep_optimizer=true",
    ),
    "Adam that starts afresh at every visit, on sampled rows, drawn with replacement": (
        f"{SMALL} clients.sampler=weighted clients.count=7 local.optimizer=adam local.lr=0.01 "
        "local.optimizer.epsilon=1e-3 local.steps=2 samples.sampler=bernoulli samples.budget=60",
        f"{SEVERAL} topology.scheduling=random",
    ),
    "groups made once, three epochs, unbiased weights, momentum": (
        f"{SMALL} clients.sampler=all clients.availability=bernoulli clients.availability.probability=0.7 "
        "server.weights=unbiased server.optimizer=momentum server.optimizer.beta1=0.5 samples.sampler=ratio "
        "samples.sampler.ratio=0.3",
        "topology=mediators topology.clients_per_mediator=5 topology.epochs=3 topology.regroup=once",
    ),
}


@dataclass
class Memory:
    """Adam's."""

    first: np.ndarray
    second: np.ndarray
    steps: int = 0


@dataclass
class Round:
    """What a round came to."""

    model: np.ndarray
    record: dict[str, Any] = field(default_factory=dict)


class Relays:
    """Astraea's rounds, one after another."""

    def __init__(self, star: str, topology: str):
        self.loop = PlainLoop(load_config(None, f"{QUIET} {star}".split()))
        self.config = self.loop.config
        self.topology = load_config(None, f"{QUIET} {star} {topology}".split()).topology
        self.steps, self.loss, self.passed = 0, 0.0, 0

    def round(self, t: int, groups: np.ndarray) -> Round:
        """Round t with the participants in these groups."""
        loop, config, epochs = self.loop, self.config, self.topology.epochs
        w, turnout = loop.w, loop._turnout(t)
        clients = turnout.cohort.clients
        p, facts = loop._probability(t, turnout)
        rows = sampled_rows(config.samples.sampler.name, config, t, clients, loop.sizes, p)
        factors, normalizes = loop._factors(t, turnout, rows)
        total, self.steps, self.loss, self.passed = np.zeros_like(w), 0, 0.0, 0
        for ring in visiting_order(np.array(clients), groups):
            model, memory = w.copy(), self._memory()
            for epoch in range(epochs):
                for k in [k for k in ring.tolist() if k in rows]:
                    kept = memory if self.topology.keep_optimizer else self._memory()
                    self._visit(t, t + (epoch << EPOCH_BITS), k, model, rows[k], kept)
            total += sum(factors[k] for k in ring.tolist() if k in rows) * (model - w)
        loop.w = loop.server.step(w, total / (sum(factors[k] for k in rows) if normalizes and rows else 1.0))
        visits, d = epochs * len(rows), len(w)
        record = {"participants": len(clients), "visits": visits, "hops": 0, "steps": self.steps, **facts}
        record |= {"samples": sum(map(len, rows.values())), "mediators": int(groups.max(initial=-1)) + 1}
        record |= {"train_loss": self.loss / self.passed} if self.passed else {}
        record |= self._links(t, turnout, facts, visits, record["mediators"], d)
        record |= self._divergences(clients, groups)
        if turnout.seconds is not None:
            chains = [sum(s for s, g in zip(turnout.seconds, groups, strict=True) if g == m) for m in set(groups)]
            record["virtual_seconds"] = epochs * max(chains, default=0.0)
        return Round(loop.w, record)

    def _memory(self) -> Memory:
        return Memory(*np.zeros((2, self.loop.network.trainable)))

    def _visit(self, t: int, key: int, k: int, model: np.ndarray, rows: list[int], memory: Memory) -> None:
        """The client's epochs or steps on the mediator's model, which it changes."""
        part, net, start = self.config.local, self.loop.network, model.copy()
        adam = SimpleNamespace(**part.optimizer.options)
        x, y = self.loop.population.rows(k, rows)
        net.shared["words"] = stream(self.config.seed, DROPOUT, key, k)
        for own in batches(self.config, key, k, len(rows)):
            loss, gradient, _ = net.gradient(model, x[own], y[own])
            gradient = gradient + part.proximal_mu * (model - start)
            if part.optimizer.name == "adam":
                memory.steps += 1
                memory.first = adam.beta1 * memory.first + (1 - adam.beta1) * gradient
                memory.second = adam.beta2 * memory.second + (1 - adam.beta2) * gradient**2
                mean = memory.first / (1 - adam.beta1**memory.steps)
                gradient = mean / (np.sqrt(memory.second / (1 - adam.beta2**memory.steps)) + adam.epsilon)
            model -= part.lr * gradient
            self.steps, self.loss, self.passed = self.steps + 1, self.loss + loss * len(own), self.passed + len(own)

    def _links(
        self, t: int, turnout: Any, facts: dict[str, Any], visits: int, mediators: int, d: int
    ) -> dict[str, int]:
        """The models on their ways, Adam's memory with them; class counts, and the copies of each class, once."""
        moments = 2 * self.loop.network.trainable if self.topology.keep_optimizer else 0
        lost = len(turnout.asked) - len(turnout.cohort.clients)
        up, down = 4 * visits * (d + moments), 4 * (visits + lost) * (d + moments)
        counts = 4 * self.loop.n * self.loop.population.description.classes
        if t == 0:
            up, down = up + counts, down + (counts if self.config.rebalance is not None else 0)
        if "size_asked" in facts:
            up, down = up + 4 * facts["size_asked"], down + 8 * len(turnout.asked)
        gamma, c = self.topology.clients_per_mediator, len(turnout.cohort.clients)
        links = {"client_up": up, "client_down": down, "mediator_up": 4 * mediators * d}
        links |= {"mediator_down": 4 * mediators * d, "paper_formula": 8 * d * (-(-c // gamma) + c)}
        return {f"bytes_{link}": count for link, count in links.items() if count}

    def _divergences(self, clients: list[int], groups: np.ndarray) -> dict[str, Any]:
        """Σ p log(p C) of mediators and of clients: their mean, deviation, largest value and five quartiles."""
        counts = self.loop.population.class_counts[clients]
        pooled = [counts[groups == m].sum(0) for m in range(int(groups.max(initial=-1)) + 1)]

        def divergence(of: np.ndarray) -> float:
            shares = of[of > 0] / of.sum()
            return float((shares * np.log(shares * len(of))).sum())

        mediators, alone = [divergence(of) for of in pooled], [divergence(of) for of in counts]
        found: dict[str, Any] = {"kl_mediators": mediators}
        for name, values in (("kl", mediators), ("kl_client", alone)):
            quarters = [float(np.quantile(values, q / 4)) for q in range(5)]
            found |= {f"{name}_mean": sum(values) / len(values), f"{name}_quartiles": quarters}
            found |= {f"{name}_max": max(values), f"{name}_std": float(np.std(values))}
        return found


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_run_with_mediators_is_the_papers_loop(name: str, watcher: Watcher):
    star, topology = COMPOSITIONS[name]
    seen = watcher.see(f"{star} {topology}")
    assert not seen.refusal, seen.refusal
    relays = Relays(star, topology)
    start = relays.loop.w.copy()
    for t, record in enumerate(seen.record):
        expected = relays.round(t, seen.mediators[t])
        error = np.linalg.norm(seen.model[t] - expected.model)
        assert error <= 1e-5 * np.linalg.norm(expected.model), f"round {t}"
        assert error <= 5e-3 * np.linalg.norm(expected.model - start), f"round {t}"
        wrong = {
            key: (record.get(key), value)
            for key, value in expected.record.items()
            if not same(key, record.get(key), value)
        }
        assert not wrong, f"round {t}: {wrong}"


def test_random_groups_are_drawn_for_every_round_and_static_ones_for_all_clients_once(watcher: Watcher):
    base = "model.hidden=[6] clients.sampler=all topology=mediators topology.clients_per_mediator=5"
    groups = np.arange(12) // 5
    for reschedule, rounds in (("once", (0, 0)), ("every-round", (0, 1))):
        seen = watcher.see(f"{base} topology.scheduling=random topology.regroup={reschedule}")
        for found, t in zip(seen.mediators, rounds, strict=True):
            assert found[stream(0, SCHEDULE, t).permutation(12)].tolist() == groups.tolist()
