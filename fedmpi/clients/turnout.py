"""Cohort of a round: available clients, selected clients, and those that answer in time.

Combines the availability model, the client sampler, the strata measured on all ranks, and the clients' devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from fedmpi.clients.availability import FOREVER, OWN_DRAWS, ClientAvailability
from fedmpi.clients.cohort import Cohort, Presence, cohort_size, full_participation, invited
from fedmpi.clients.devices import draw_devices, first_to_arrive, joules, phases, restricted, steps_in, survivors, total
from fedmpi.clients.sampler import ClientNumbers, ClientSampler, PastRounds, View
from fedmpi.clients.strata import Strata
from fedmpi.common.decorators import MEASURABLE, TRANSFERS
from fedmpi.common.errors import UserError
from fedmpi.common.streams import Purpose, Streams
from fedmpi.common.types import AnyArray, Floats, Ints
from fedmpi.config import Config
from fedmpi.config.checks import counts_late
from fedmpi.config.tables import probe_of, stratification
from fedmpi.updates.traffic import RoundTraffic, client_bytes, numbers_sent

if TYPE_CHECKING:
    from torch import Tensor

CLOCK = "clock"
"""Name in a checkpoint."""


@dataclass(frozen=True)
class Turnout:
    """Clients of a round: available, invited and selected."""

    cohort: Cohort  # The selected clients whose updates count
    asked: Ints  # (a,): Clients that received the model, including drop-outs and late arrivals
    present: Ints | int  # (p,): Clients that could have been invited, sorted; N if all of 0 … N − 1 are available
    # (m,): Arrival time of each update on the simulated clock, if there is one
    seconds: Floats | None = None
    # (c,): Clients that were measured before the draw, sorted
    candidates: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    waits: float = 0.0  # Simulated seconds for which the round lasts at least
    joules: Floats | None = None  # (a,): Energy of the invited clients, if it is recorded
    facts: Mapping[str, int] = field(default_factory=dict)  # Numbers of updates lost and of partial work

    @property
    def available(self) -> int:
        """Number of clients that could have been invited."""
        return self.present if isinstance(self.present, int) else len(self.present)


def opens_with_a_step(config: Config, t: int) -> bool:
    """Return whether round t is every client's initial probing step, w_1^k, for the strata (FedSSO, Algorithm 1)."""
    return t == 0 and stratification(config).initial_step


class CohortDraw:
    """Draw of a run's cohorts."""

    def __init__(
        self,
        config: Config,
        sizes: Ints,
        counts: Callable[[], Ints] | None,
        streams: Streams,
        values: int,
        widths: Mapping[str, int] = MappingProxyType({}),
        is_server: bool = True,
    ):
        self.config, self.values = config, values
        self.sampler = ClientSampler(config.clients.sampler, config.clients.sampler.options)
        self.numbers = ClientNumbers(self.sampler.numbers, len(sizes) if is_server else 0, widths)
        self.past = PastRounds() if self.sampler.needs_history else None
        self.counts = counts  # of every class held by each client, (N, C)
        self.sizes = sizes
        self._views: dict[int, tuple[View, Ints]] = {}  # With the candidates, (c,)
        self.clock = math.nan if config.devices is None else 0.0  # Simulated seconds before the next round
        self.streams = streams
        self.bytes_down, self.bytes_up = client_bytes(config, values)
        self.availability = ClientAvailability(config, streams)
        if config.clients.sampler.name != "all":
            self._wanted_of(len(sizes))  # rejected here, on all ranks alike, not once the server plans
        if (devices := config.devices) is not None:
            self._devices = draw_devices(streams, sizes, devices, counts)
        if self.availability.leaves:
            self.availability.until(self._all(0))  # rejects a table that does not fit the clients
        if devices is not None and config.clients.over_selection > 1:
            self._check_arrival(total(self._phases(np.arange(len(self.sizes)), self.sizes, opening=False)))

    def _check_arrival(self, seconds: Floats) -> None:
        """Reject weights that need π_k if over-selection takes some clients before others regardless of the draw."""
        if self.config.server.weights.name == "unbiased" and (seconds != seconds[:1]).any():
            raise UserError(
                'server.weights = "unbiased" needs the probability that a client counts. With clients.over_selection, '
                "the first to arrive count, and some clients always arrive before others (speeds, bandwidths or "
                "numbers of samples differ). Their probabilities are unknown. Set clients.over_selection = 1, or "
                'server.weights = "normalized", which estimates over the clients that arrive'
            )

    def draw(self, t: int, strata: Strata | None) -> Turnout:
        """Draw the clients of round t; `strata` are the current ones if the draw needs them."""
        present, opening = self.availability.present(self._all(t)), opens_with_a_step(self.config, t)
        candidates = np.empty(0, np.int64)
        if opening:
            asked = full_participation(present)
        elif t in self._views:
            view, candidates = self._views.pop(t)
            asked = self.sampler.draw(view)
        else:
            asked = self.sampler.draw(self._view(t, present, strata))
        asked = replace(asked, presence=self._presence(t, present, strata))
        arrived = survivors(self.streams, t, asked, len(self.sizes), self.config.clients.failure_rate)
        if self.config.devices is None or (counts_late(self.config) and not opening):
            return Turnout(arrived, asked.clients, present, None, candidates)
        return replace(self._in_time(t, asked, arrived, present, opening), candidates=candidates)

    def _in_time(self, t: int, asked: Cohort, arrived: Cohort, present: Ints | int, opening: bool) -> Turnout:
        """Leave out updates that arrive too late, or whose clients have left, and close the round.

        Inclusion probabilities stay those of clients that arrive. Invited clients (a,) spend energy until their update
        arrives, they leave or drop out (after training), or the round closes.
        """
        table, clients, facts = self.config.devices, asked.clients, dict[str, int]()
        assert table is not None
        deadline = math.inf if table.deadline is None or opening else table.deadline
        pool = self._pool(arrived, asked, present)
        times = self._phases(clients, pool, opening, asked)
        counts = np.isin(clients, arrived.clients)
        if table.late == "partial":
            if asked.steps is not None:
                raise UserError(
                    f'clients.sampler = "{self.sampler.part.name}" sets steps in its Cohort. Set devices.late = "lost"'
                )
            steps = self._shorten(asked, pool, times, deadline)
            facts["partial"] = int(np.count_nonzero(steps[counts]))
            arrived = replace(arrived, steps=steps[counts]) if facts["partial"] else arrived
        seconds = total(times)
        stays, waits = np.full(len(clients), np.inf), 0.0
        if self.availability.leaves and not opening:
            until = self.availability.until(self._all(t))
            stays = until[clients]
            if not isinstance(present, int) and not len(present) and until.min() < FOREVER:
                waits = self._after(until.min())
        limit = np.minimum(deadline, stays)
        lost = counts & (seconds > limit)
        late, kept = lost & (deadline <= stays), counts & ~lost
        cohort = restricted(arrived, kept[counts]) if lost.any() else arrived
        if table.deadline is not None:
            facts["late"] = int(late.sum())
        if self.availability.leaves:
            facts["departed"] = int(lost.sum()) - int(late.sum())
        full, ends = False, np.minimum(np.where(counts, seconds, times[0] + times[1]), limit)
        if self.config.clients.over_selection > 1 and not opening:
            if asked.own_work:
                self._check_arrival(seconds[counts])
            wanted = self._wanted_of(len(self.sizes))
            cohort = first_to_arrive(self.streams, t, cohort, seconds[kept], wanted)
            kept, full = np.isin(clients, cohort.clients), len(cohort.clients) >= wanted
            ends = np.minimum(ends, seconds[kept].max()) if full else ends
        if late.any() and not full:
            waits = deadline
        elif lost.any() and not kept.any():
            waits = self._after(limit[lost].max())
        energy = None if self._devices.watts is None else joules(self._devices, clients, times, ends)
        return Turnout(cohort, clients, present, seconds[kept], waits=waits, joules=energy, facts=facts)

    def _after(self, seconds: float) -> float:
        """Return slightly more simulated seconds, so that rounding does not leave the clock before the event."""
        return (self.clock + seconds) * (1 + 1e-15) - self.clock

    def _shorten(self, asked: Cohort, pool: Ints, times: Floats, deadline: float) -> Ints:
        """Return the steps of late clients that fit before the deadline, int64 (a,); 0 for those of the configuration.

        The seconds (3, a) of these clients are changed to those of the shorter work.
        """
        local, late = self.config.local, np.flatnonzero(total(times) > deadline)
        clients, transfers = asked.clients[late], times[0, late] + times[2, late]
        used = self._used(clients, pool)
        used = used if asked.budget is None else np.minimum(used, asked.budget[late])
        batch, speed = self._batches(used), self._devices.speed[clients]
        room = np.maximum(deadline - transfers, 0) * speed
        fitting, passed = steps_in(room, used, batch, None if local.steps is not None else self._per_pass(used, batch))
        steps = np.zeros(len(asked.clients), np.int64)
        steps[late] = fitting
        shorter = late[fitting > 0]
        times[1, shorter] = np.minimum(passed / speed, deadline * (1 - 1e-15) - transfers)[fitting > 0]  # rounding
        return steps

    def links(self, turnout: Turnout) -> RoundTraffic:
        """Return the traffic for the sampler: numbers that clients send, and the model for candidates not invited.

        The server knows seconds, and the updates of selected clients, without more traffic. Candidates need no model if
        only seconds are measured.
        """
        kept = sum(name in MEASURABLE for name in self.sampler.numbers)
        times = ("seconds", *TRANSFERS)
        measured = [self.numbers.widths.get(name, 1) for name in self.sampler.measures if name not in times]
        sent = kept * len(turnout.cohort.clients) + sum(measured) * len(turnout.candidates)
        uninvited = np.setdiff1d(turnout.candidates, turnout.asked, assume_unique=True) if measured else ()
        return numbers_sent(sent, len(uninvited) * self.values)

    def _all(self, t: int) -> View:
        """Return the availability model's view of round t."""
        clients, stream = len(self.sizes), (Purpose.AVAILABILITY, OWN_DRAWS)
        return View(t, clients, self.sizes, clients, self.streams, counts=self.counts, stream=stream, clock=self.clock)

    def _presence(self, t: int, present: Ints | int, strata: Strata | None) -> Presence | None:
        """Return the availability that weights need; None if all clients are available and none has been left out."""
        groups = strata.labels if strata is not None and self.sampler.needs_strata else None
        if isinstance(present, int):
            return None if groups is None else Presence(present, None, groups)
        known = self.config.server.weights.name == "unbiased"
        return Presence(present, self.availability.chance(self._all(t)) if known else None, groups)

    def candidates(self, t: int, strata: Strata | None) -> Ints:
        """Return the clients to measure for the sampler before round t; none if all clients take one step."""
        if opens_with_a_step(self.config, t):
            return np.empty(0, np.int64)
        view = self._view(t, self.availability.present(self._all(t)), strata)
        candidates = self.sampler.candidates(view)
        self._views = {t: (view, candidates)}
        return candidates

    def add_measured(self, t: int, measured: Mapping[str, AnyArray]) -> None:
        """Give the sampler the measurements of its candidates of round t, float64 (N,) or float32 (N, k) each.

        The seconds until the update of each would arrive, and those of its transfers, are computed here.
        """
        if t not in self._views:
            return
        view, candidates = self._views[t]
        view.measured.update(measured)
        if "seconds" in self.sampler.measures:
            times = self._phases(candidates, self.sizes[view.available], opening=False)
            view.measured["seconds"][candidates] = total(times)
        if "download_seconds" in self.sampler.measures:
            view.measured["download_seconds"][candidates] = self.bytes_down / self._devices.download[candidates]
        if "upload_seconds" in self.sampler.measures:
            view.measured["upload_seconds"][candidates] = self.bytes_up / self._devices.upload[candidates]

    def _view(self, t: int, present: Ints | int, strata: Strata | None) -> View:
        over, clients = self.config.clients.over_selection, len(self.sizes)
        return View(
            round=t,
            count=clients if self.sampler.part.name == "all" else invited(self._wanted_of(clients), over, clients),
            sizes=self.sizes,
            present=present,
            streams=self.streams,
            strata=strata,
            over_selection=over,
            wanted=self._wanted_of,
            numbers=self.numbers,
            counts=self.counts,
            past=None if self.past is None else tuple(self.past.rounds),
            clock=self.clock,
        )

    def state(self) -> dict[str, Tensor]:
        """Return the simulated clock and the past rounds, for a checkpoint."""
        import torch  # slow to import, and the configuration is checked before

        clock = {} if math.isnan(self.clock) else {CLOCK: torch.tensor(self.clock, dtype=torch.float64)}
        return clock | ({} if self.past is None else self.past.state())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of a checkpoint; raise KeyError if it is missing."""
        if not math.isnan(self.clock):
            self.clock = float(state[CLOCK])
        if self.past is not None:
            self.past.load(state)

    def _wanted_of(self, clients: int) -> int:
        """Return m, if a share β is one of so many clients."""
        part = self.config.clients
        return cohort_size(clients if part.fraction is not None else len(self.sizes), part.count, part.fraction)

    def _phases(self, clients: Ints, pool: Ints, opening: bool, cohort: Cohort | None = None) -> Floats:
        """Return the simulated seconds of each client's download, training and upload, float64 (3, m).

        `pool` are the sizes of the clients that share the sample budget K, if samples are drawn. The cohort of these
        clients sets their work, if it is given.
        """
        if opening:
            probed = {"full": np.inf, "batch": self.config.local.batch_size, "sample": 1}[probe_of(self.config)]
            passed: Floats = np.minimum(self.sizes[clients], np.inf if probed == "all" else probed)
        else:
            used, own = self._used(clients, pool), {} if cohort is None else cohort.own_work
            used = np.minimum(self.sizes[clients], own["budget"]) if "budget" in own else used
            passed = self._passed(used, own.get("steps"))
        return phases(self._devices, clients, passed, self.bytes_down, self.bytes_up)

    def seconds_of(self, clients: Ints, used: Ints | Floats, steps: Ints | None = None) -> Floats:
        """Return the simulated seconds of clients, (m,), for their numbers of used samples and of steps, (m,) each."""
        return total(phases(self._devices, clients, self._passed(used, steps), self.bytes_down, self.bytes_up))

    def _passed(self, used: Ints | Floats, steps: Ints | None = None) -> Floats:
        """Return the samples that pass through the model on each client, of the samples that it uses (m,)."""
        local, batch = self.config.local, self._batches(used)
        own = local.steps if steps is None else steps
        return np.asarray((local.epochs or 1) * self._per_pass(used, batch) if own is None else own * batch)

    def _batches(self, used: Ints | Floats) -> Floats:
        local = self.config.local
        return np.asarray(used if local.batch_size == "all" else np.minimum(used, local.batch_size))

    def _per_pass(self, used: Ints | Floats, batch: Floats) -> Floats:
        """Return the samples of an epoch."""
        return np.asarray(used - used % np.maximum(batch, 1) if self.config.local.drop_last else used)

    def _pool(self, arrived: Cohort, asked: Cohort, present: Ints | int) -> Ints:
        """Return the sizes of the clients that share the sample budget K: those that answer the size query, as if their
        total were known; if exactly K samples are drawn, the selected clients themselves."""
        part = self.config.samples
        if part.sampler.name == "exact":
            return self.sizes[arrived.clients]
        if part.size.query == "selected":
            return self.sizes[asked.clients]
        return self.sizes if isinstance(present, int) else self.sizes[present]

    def _used(self, clients: Ints, pool: Ints) -> Floats:
        """Return the expected number of samples used by each client: if samples are drawn, its share of the budget."""
        part, sizes = self.config.samples, self.sizes[clients].astype(np.float64)
        if part.sampler.name == "ratio":
            return np.asarray(sizes * part.sampler.options["ratio"])
        if part.sampler.name == "all" or part.budget is None:
            return sizes
        return sizes * min(1.0, part.budget / max(1, int(pool.sum())))
