"""The cohort of a round: who is available, who is drawn, who answers in time.

Combines the draws (participation), the strata observed by all ranks, and the system model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedmpi.config import Config
from fedmpi.participation.availability import Availability, available_clients, dominant_label
from fedmpi.participation.clients import Cohort, cohort_size, everyone, uniform, weighted
from fedmpi.participation.draws import importance
from fedmpi.participation.strata import Strata, stratified
from fedmpi.plan import Ints
from fedmpi.streams import Purpose, Streams
from fedmpi.system_model import RateLaw, draw_devices, first_to_arrive, participant_seconds, round_seconds, survivors


@dataclass(frozen=True)
class Turnout:
    """Who takes part in a round.

    Attributes
    ----------
    cohort : Cohort
        The participants whose updates count.
    asked : int
        Clients that received the model.
    available : int
        Clients that could have been asked.
    virtual_seconds : float or None
        Length of the round on the virtual clock, when there is one.
    """

    cohort: Cohort
    asked: int
    available: int
    virtual_seconds: float | None = None


class CohortDraw:
    """Draws the cohorts of a run.

    Parameters
    ----------
    config : Config
        The parts.
    sizes : int64 (N,)
        Effective sizes of all clients.
    class_counts : int64 (N, C)
        Used by availability by label group only.
    streams : Streams
        The run's random streams.
    model_bytes : int
        Bytes of the model, for the virtual clock.
    """

    def __init__(self, config: Config, sizes: Ints, class_counts: Ints | None, streams: Streams, model_bytes: int):
        self.config = config
        self.sizes = sizes
        self.streams = streams
        self.model_bytes = model_bytes
        system = config.system
        self.law = Availability(
            system.availability, system.probability, system.lowest, system.period, tuple(system.by_label)
        )
        self._labels = dominant_label(class_counts) if class_counts is not None else None
        if system.clock:
            sigma = system.bandwidth_sigma
            self._devices = draw_devices(
                streams,
                len(sizes),
                RateLaw(system.speed, system.speed_median, system.speed_sigma, system.speed_rates, system.speed_shares),
                RateLaw("lognormal", system.upload, sigma),
                RateLaw("lognormal", system.download, sigma),
            )

    def draw(self, t: int, strata: Strata | None) -> Turnout:
        """The turnout of round t; `strata` are the ones in force when the draw needs them."""
        present = self._present(t)
        available = present if isinstance(present, int) else len(present)
        asked = self._asked(t, present, strata)
        arrived = survivors(self.streams, t, asked, len(self.sizes), self.config.system.drop_out)
        if not self.config.system.clock:
            return Turnout(arrived, len(asked.clients), available)
        seconds = self._seconds(arrived.clients)
        if self.config.system.over_selection > 1:
            taken, length = first_to_arrive(arrived, seconds, self._wanted())
            return Turnout(taken, len(asked.clients), available, length)
        return Turnout(arrived, len(asked.clients), available, round_seconds(seconds))

    def _present(self, t: int) -> Ints | int:
        if self.law.law == "always":
            return len(self.sizes)
        return available_clients(self.law, self.streams, t, len(self.sizes), self._labels)

    def _wanted(self) -> int:
        part = self.config.participation
        return cohort_size(len(self.sizes), part.count, part.fraction)

    def _asked(self, t: int, present: Ints | int, strata: Strata | None) -> Cohort:
        part, over = self.config.participation, self.config.system.over_selection
        if part.clients == "all":
            return everyone(present)
        if part.clients == "stratified":
            assert strata is not None
            return stratified(
                strata,
                present,
                self._wanted(),
                self.streams,
                t,
                allocation=part.allocation,
                draw=part.draw,
                design=part.design,
                over_selection=over,
            )
        generator = self.streams.generator(Purpose.COHORT, t)
        count = min(len(self.sizes), int(np.ceil(self._wanted() * over - 1e-9)))
        if part.clients == "weighted":
            members = None if isinstance(present, int) else present
            return weighted(generator, self.sizes, members, count, part.replace)
        if part.clients == "importance":
            assert strata is not None and strata.norms is not None
            return importance(generator, strata.norms, present, count, part.design)
        return uniform(generator, present, count)

    def _seconds(self, clients: Ints) -> np.ndarray:
        """Virtual seconds of each participant: rows passed through the model, and the model's way down and up."""
        local, rows = self.config.local, self.sizes[clients]
        if local.steps is not None:
            batch = rows if local.batch_size == "all" else np.minimum(rows, local.batch_size)
            passed = local.steps * batch
        else:
            passed = (local.epochs or 1) * rows
        return participant_seconds(self._devices, clients, passed, self.model_bytes, self.model_bytes)
