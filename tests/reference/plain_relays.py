"""A run with mediators is Astraea's Algorithm 1 line by line (Duan et al. 2019), in float64.

Clients, samples and coefficients come from the loop of stars. The groups of a round are those of the run, which
`tests/mediators` checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.reference.plain_data import DROPOUT, Round, stream
from tests.reference.plain_draws import sampled_rows
from tests.reference.plain_loop import PlainLoop, batches

EPOCH_BITS = 32


@dataclass
class Memory:
    """Adam's moments and steps."""

    first: np.ndarray
    second: np.ndarray
    steps: int = 0


class PlainRelays(PlainLoop):
    """Rounds in which mediators pass a model from client to client; `groups` has each client's mediator, by round."""

    groups: list[np.ndarray]

    def round(self, t: int) -> Round:
        """One round."""
        config, part, w, groups = self.config, self.config.topology, self.w, self.groups[t]
        turnout = self._turnout(t)
        clients = turnout.cohort.clients
        p, facts = self._probability(t, turnout)
        rows = sampled_rows(config.samples.sampler.name, config, t, clients, self.sizes, p)
        factors, normalizes = self._factors(t, turnout, rows)
        total, self.steps, self.loss, self.passed = np.zeros_like(w), 0, 0.0, 0
        count = int(groups.max(initial=-1)) + 1
        for mediator in range(count):
            members = [k for k, group in zip(clients, groups, strict=True) if group == mediator]
            first = mediator * len(members) // count  # evenly spread starts
            ring = [k for k in [*members[first:], *members[:first]] if k in rows]
            model, memory = w.copy(), self._memory()
            for epoch in range(part.epochs):
                for k in ring:
                    kept = memory if part.keep_optimizer else self._memory()
                    self._visit(t, t + (epoch << EPOCH_BITS), k, model, rows[k], kept)
            total += sum(factors[k] for k in ring) * (model - w)
        divisor = sum(factors[k] for k in rows) if normalizes and rows else 1.0
        self.w = self.server.step(w, total / divisor)
        visits, d = part.epochs * len(rows), len(w)
        record = {"participants": len(clients), "visits": visits, "steps": self.steps, **facts}
        record |= {"samples": sum(map(len, rows.values())), "mediators": count}
        record |= {"train_loss": self.loss / self.passed} if self.passed else {}
        record |= self._traffic(t, turnout, facts, visits, record["mediators"], d)
        record |= self._divergences(clients, groups) if clients else {}
        if turnout.seconds is not None:
            chains = [sum(s for s, g in zip(turnout.seconds, groups, strict=True) if g == m) for m in set(groups)]
            record["virtual_seconds"] = part.epochs * max(chains, default=0.0)
        return Round(clients, rows, {k: factors[k] / divisor for k in rows}, record, self.w.copy())

    def _memory(self) -> Memory:
        return Memory(*np.zeros((2, self.network.trainable)))

    def _visit(self, t: int, key: int, k: int, model: np.ndarray, rows: list[int], memory: Memory) -> None:
        """The client's epochs or steps on the mediator's model, which it changes."""
        part, net, start = self.config.local, self.network, model.copy()
        adam = SimpleNamespace(**part.optimizer.options)
        x, y = self.population.rows(k, rows)
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

    def _traffic(
        self, t: int, turnout: Any, facts: dict[str, Any], visits: int, mediators: int, d: int
    ) -> dict[str, int]:
        """The models on their ways, Adam's memory with them; class counts, and the copies of each class, once."""
        moments = 2 * self.network.trainable if self.config.topology.keep_optimizer else 0
        lost = len(turnout.asked) - len(turnout.cohort.clients)
        up, down = 4 * visits * (d + moments), 4 * (visits + lost) * (d + moments)
        counts = 4 * self.n * self.population.description.classes
        if t == 0:
            up, down = up + counts, down + (counts if self.config.rebalance is not None else 0)
        if "size_asked" in facts:
            up, down = up + 4 * facts["size_asked"], down + 8 * len(turnout.asked)
        gamma, c = self.config.topology.clients_per_mediator, len(turnout.cohort.clients)
        links = {"client_up": up, "client_down": down, "mediator_up": 4 * mediators * d}
        links |= {"mediator_down": 4 * mediators * d, "paper_formula": 8 * d * (-(-c // gamma) + c)}
        return {f"bytes_{link}": count for link, count in links.items() if count}

    def _divergences(self, clients: list[int], groups: np.ndarray) -> dict[str, Any]:
        """Σ p log(p C) of mediators and of clients: their mean, deviation, largest value and five quartiles."""
        counts = self.population.class_counts[clients]
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
