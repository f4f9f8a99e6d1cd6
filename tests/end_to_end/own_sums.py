"""Custom components as a reader of the documentation would write them: rows, weights, aggregators."""

from __future__ import annotations

import numpy as np
import torch

from fedmpi import aggregator, data_sampler, weights


@data_sampler
def rare_first(client, *, share: float = 0.5) -> np.ndarray:
    "The samples of the client's rarest classes first, ties at random."
    counts = np.bincount(client.labels, minlength=client.labels.max() + 1)
    order = np.lexsort((client.generator.random(len(client.labels)), counts[client.labels]))
    return np.sort(order[: max(1, int(share * client.expected))])


@weights(per_sample=False, normalized=True)
def root(cohort, sizes) -> np.ndarray:
    return np.sqrt(sizes[cohort.clients])


@weights(per_sample=True, normalized=True)
def root_of_used(cohort, sizes) -> np.ndarray:
    return 1 / np.sqrt(sizes[cohort.clients])


@aggregator
def weighted(updates, coefficients) -> torch.Tensor:
    return coefficients @ updates
