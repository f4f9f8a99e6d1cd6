"""A run with mediators is Astraea's Algorithm 1 line by line (Duan et al. 2019), in float64.

Clients, samples and coefficients come from the loop of stars. The groups of a round are those of the run, which
`tests/mediators` checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.reference.plain_data import Round
from tests.reference.plain_draws import sampled_rows
from tests.reference.plain_loop import EPOCH_BITS, Memory, PlainLoop, batches, train


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
        total, works = np.zeros_like(w), []
        count = int(groups.max(initial=-1)) + 1
        for mediator in range(count):
            members = [k for k, group in zip(clients, groups, strict=True) if group == mediator]
            first = mediator * len(members) // count  # evenly spread starts
            ring = [k for k in [*members[first:], *members[:first]] if k in rows]
            model, memory = w.copy(), Memory()
            for epoch in range(part.epochs):
                for k in ring:
                    key, samples = t + (epoch << EPOCH_BITS), self.population.rows(k, rows[k])
                    steps, kept = batches(config, key, k, len(rows[k])), memory if part.keep_optimizer else Memory()
                    works.append(train(config, key, k, model, *samples, steps, self.network, memory=kept))
                    model = model + works[-1].change
            total += sum(factors[k] for k in ring) * (model - w)
        divisor = sum(factors[k] for k in rows) if normalizes and rows else 1.0
        self.w = self.server.step(w, total / divisor)
        visits, d = part.epochs * len(rows), len(w)
        passed = sum(work.loss_rows for work in works)
        record = {"participants": len(clients), "visits": visits, "steps": sum(work.steps for work in works), **facts}
        record |= {"samples": sum(map(len, rows.values())), "mediators": count}
        record |= {"train_loss": sum(work.loss_sum for work in works) / passed} if passed else {}
        record |= self._traffic(t, turnout, facts, visits, record["mediators"], d)
        record |= self._divergences(clients, groups) if clients else {}
        if turnout.seconds is not None:
            chains = [sum(s for s, g in zip(turnout.seconds, groups, strict=True) if g == m) for m in set(groups)]
            record["virtual_seconds"] = part.epochs * max(chains, default=0.0)
        return Round(clients, rows, {k: factors[k] / divisor for k in rows}, record, self.w.copy())

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
