"""Parts of one's own as a reader of the documentation would write them: rows, weights, combiners, server steps."""

from __future__ import annotations

import numpy as np
import torch

from fedmpi import LocalAlgorithm, aggregator, data_sampler, server_optimizer, weights


@data_sampler
def rare_first(client, *, share: float = 0.5) -> np.ndarray:
    "The samples of the client's rarest classes first, ties at random."
    counts = np.bincount(client.labels, minlength=client.labels.max() + 1)
    order = np.lexsort((client.generator.random(len(client.labels)), counts[client.labels]))
    return np.sort(order[: max(1, int(share * client.expected))])


@data_sampler(pooled=True)
def every_other(pool, *, step: int = 2) -> np.ndarray:
    "Every second sample of the cohort."
    return np.arange(-(-pool.start // step) * step, pool.stop, step)


@weights(per_sample=False, normalized=True)
def root(cohort, sizes) -> np.ndarray:
    return np.sqrt(sizes[cohort.clients])


@weights(per_sample=True, normalized=True)
def root_of_used(cohort, sizes) -> np.ndarray:
    return 1 / np.sqrt(sizes[cohort.clients])


@weights
class Loud:
    "The higher the loss before the work, the more."

    def __call__(self, cohort, sizes):
        return np.ones(len(cohort.clients))

    def after(self, work):
        return work.coefficient * work.loss


@aggregator
def median(updates, coefficients) -> torch.Tensor:
    return updates.quantile(0.5, dim=0)


@aggregator
def any_options(updates, coefficients, **options) -> torch.Tensor:
    "Whatever its options are, the plain mean."
    return updates.mean(0)


@aggregator
class Nearest:
    "The mean of the updates that are shorter than the middle one."

    def measure(self, updates):
        return (updates.double() ** 2).sum(1)

    def combine(self, updates, coefficients, measured):
        return updates[measured <= measured.median()].mean(0)


@aggregator
def weighted(updates, coefficients) -> torch.Tensor:
    return coefficients @ updates


class Persistent(LocalAlgorithm):
    "Every client goes on a little the way that it went when it last took part."

    client_state = ("m",)

    def correction(self, client, server):
        return 0.5 * client.m

    def finish(self, client, server, work):
        client.m = -work.delta / (work.steps * work.lr)


@server_optimizer
def capped(w, update, *, largest: float = 0.01, lr: float = 0.5):
    return w + lr * update.clamp(-largest, largest)


@server_optimizer
class Nesterov:
    "Two memories: a vector and a count of steps."

    state = ("m", "steps")

    def __init__(self, *, beta: float = 0.9):
        self.beta, self.steps = beta, 0

    def step(self, w, update):
        self.steps += 1
        self.m = self.beta * self.m + update
        w.add_(self.beta * self.m + update, alpha=1 / self.steps)


BROKEN: list[str] = []
"""Anything in it breaks `fragile`."""


@server_optimizer
def fragile(w, update):
    if BROKEN:
        raise ArithmeticError("out of order")
    return w + update
