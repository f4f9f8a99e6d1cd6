"""The server's decisions: who takes part, which share of the data is used, how much each update counts.

Only rank 0 plans. Everything random is drawn from streams keyed by the round, so a plan depends on the configuration,
the seed and the clients' sizes, never on the number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmpi.aggregation.weights import coefficients, is_normalised
from fedmpi.config import Config
from fedmpi.participation.clients import Cohort, cohort_size, everyone, uniform, weighted
from fedmpi.plan import Ints, Plan, learning_rate
from fedmpi.sampling.size_estimates import (
    SizeEstimate,
    answer_stream,
    estimate,
    sampling_probability,
    saturations,
)
from fedmpi.streams import Purpose, Streams

log = logging.getLogger("fedmpi")
PER_SAMPLE = ("samples", "gradient-sum")


@dataclass(frozen=True)
class DataSampling:
    """The probability with which a participant's sample is used, and the size estimate it came from, if any."""

    probability: float
    estimate: SizeEstimate | None = None


class Planner:
    """Plans the rounds of a run.

    Parameters
    ----------
    config : Config
        The parts.
    sizes : int64 (N,)
        Effective sizes of all clients.
    streams : Streams
        The run's random streams.
    """

    def __init__(self, config: Config, sizes: Ints, streams: Streams):
        self.config = config
        self.sizes = sizes
        self.streams = streams
        self._warned: set[str] = set()

    def plan(self, t: int) -> Plan:
        """The plan of round t."""
        local = self.config.local
        cohort = self.cohort(t)
        sampling = self.data_sampling(t, cohort)
        kind = self.config.aggregation.weights
        return Plan(
            round=t,
            lr=learning_rate(
                local.lr_schedule, local.lr, t, self.config.rounds, every=local.lr_every, factor=local.lr_factor
            ),
            clients=cohort.clients,
            coefficients=self._coefficients(kind, cohort),
            per_sample=kind in PER_SAMPLE,
            normalise=is_normalised(kind),
            probability=sampling.probability,
            facts=self._facts(cohort, sampling),
        )

    def cohort(self, t: int) -> Cohort:
        """Who takes part in round t."""
        part, clients = self.config.participation, len(self.sizes)
        if part.clients == "all":
            return everyone(clients)
        count = cohort_size(clients, part.count, part.fraction)
        generator = self.streams.generator(Purpose.COHORT, t)
        if part.clients == "weighted":
            return weighted(generator, self.sizes, None, count, part.replace)
        return uniform(generator, clients, count)

    def data_sampling(self, t: int, cohort: Cohort) -> DataSampling:
        """p = K/Ñ of the Bernoulli rule (FedSampling, Eq 2), the fixed ratio of the naive rule, 1 otherwise."""
        part = self.config.samples
        if part.rule == "ratio":
            assert part.ratio is not None
            return DataSampling(part.ratio)
        if part.rule != "bernoulli":
            return DataSampling(1.0)
        assert part.wanted is not None
        asked = cohort.clients if part.asked == "participants" else None
        answers = answer_stream(self.streams, t, part.memoise)
        size = estimate(part.size_estimate, self.sizes, part.epsilon, part.threshold, answers, part.clip, asked)
        for saturation in saturations(size, part.wanted, part.threshold):
            self._warn_once(saturation.kind, t, saturation.message)
        return DataSampling(sampling_probability(part.wanted, size.total), size)

    def _coefficients(self, kind: str, cohort: Cohort) -> np.ndarray:
        """Raw coefficients; of kinds that count samples, the factor of one sample."""
        used = np.ones_like(cohort.clients) if kind in PER_SAMPLE else None
        wanted = self.config.samples.wanted or int(self.sizes[cohort.clients].sum())
        return coefficients(kind, cohort, self.sizes, used, wanted)

    def _facts(self, cohort: Cohort, sampling: DataSampling) -> dict[str, Any]:
        facts: dict[str, Any] = {"participants": len(cohort.clients)}
        if self.config.samples.rule in ("bernoulli", "ratio"):
            facts["sampling_probability"] = sampling.probability
        if sampling.estimate is not None:
            facts["size_estimate"] = sampling.estimate.total
            facts["size_true"] = sampling.estimate.true_total
            facts["clipped_fraction"] = sampling.estimate.clipped_fraction
        return facts

    def _warn_once(self, kind: str, t: int, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("round %d: %s (said once)", t, message)
